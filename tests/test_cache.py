"""PrefixCache: what goes in comes out, views share memory, and bad caches are refused in one sentence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_llama, tokens
from transformers import DynamicCache

from kvlib import KvlibError, PrefixCache, prefill
from kvlib.cache import Geometry, forward, handoff_cache
from kvlib.cache_layers import FilledLayer


def test_round_trip_through_transformers_keeps_every_bit():
    prefix = prefill(tiny_llama(), tokens(2, 9))
    back = PrefixCache.from_dynamic(prefix.to_dynamic())
    assert all(torch.equal(a, b) for a, b in zip(prefix.keys + prefix.values, back.keys + back.values))
    assert prefix.geometry == Geometry(3, 2, 16) and prefix.tokens == 9 and prefix.batch == 2
    assert prefix.bytes == 2 * 3 * 2 * 2 * 9 * 16 * 4


def test_going_on_from_a_round_trip_equals_native():
    model, ids = tiny_llama(), tokens(2, 12)
    prefix = prefill(model, ids[:, :-1])
    hidden = forward(model, ids[:, -1:], prefix.to_dynamic(), torch.tensor([[11]]))
    assert torch.allclose(model.lm_head(hidden), model(ids).logits[:, -1:], atol=1e-4)
    assert prefix.tokens == 11  # appending concatenates: the prefix itself has not grown


def test_prefill_in_chunks_is_prefill_in_one_go():
    model, ids = tiny_llama(), tokens(2, 13)
    (one, hidden_one), (many, hidden_many) = (
        prefill(model, ids, chunk_tokens=n, return_hidden=True) for n in (None, 4)
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one.keys, many.keys))
    assert torch.allclose(hidden_one, hidden_many, atol=1e-4)


def test_slices_and_selections_are_of_the_same_values():
    prefix = prefill(tiny_llama(), tokens(3, 8))
    assert torch.equal(prefix.slice(5).keys[1], prefix.keys[1][:, :, :5])
    assert torch.equal(prefix.select([2, 0]).values[0], prefix.values[0][[2, 0]])
    prefix.clone().keys[0].zero_()
    assert prefix.keys[0].abs().sum() > 0


def test_positions_count_valid_entries_only():
    prefix = prefill(tiny_llama(), tokens(2, 4))
    padded = PrefixCache(
        prefix.keys, prefix.values, torch.tensor([[False, True, True, True], [True, True, False, False]])
    )
    assert padded.positions.tolist() == [[0, 0, 1, 2], [0, 1, 1, 1]]
    assert padded.lengths.tolist() == [3, 2]


def test_a_handoff_layer_returns_new_positions_only():
    prefix = prefill(tiny_llama(), tokens(1, 6))
    cache = handoff_cache(prefix)
    new = torch.randn(1, 2, 1, 16)
    keys, _ = cache.update(new, new, 0)
    assert keys.shape[2] == 1 and cache.layers[0].get_seq_length() == 7
    assert cache.layers[0].prefix_keys.data_ptr() == prefix.keys[0].data_ptr()


def good() -> PrefixCache:
    return prefill(tiny_llama(), tokens(1, 6))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda c: PrefixCache([], []), "0 key"),
        (lambda c: PrefixCache(c.keys, c.values[:-1]), "3 key and 2 value layers"),
        (lambda c: PrefixCache([*c.keys[:-1], c.keys[-1][:, :, :-1]], c.values), "key layer 2"),
        (lambda c: PrefixCache(c.keys, [v.double() for v in c.values]), "value layer 0"),
        (lambda c: PrefixCache([k[:, :, :0] for k in c.keys], [v[:, :, :0] for v in c.values]), "empty"),
        (lambda c: PrefixCache(c.keys, c.values, torch.ones(1, 5, dtype=torch.bool)), "validity mask"),
        (lambda c: PrefixCache(c.keys[:2], c.values[:2]).check_fits(tiny_llama()), "2 layers"),
        (lambda c: PrefixCache(c.keys * 2, c.values * 2).check_fits(tiny_llama()), "6 layers"),
        (lambda c: c.check_fits(tiny_llama(num_key_value_heads=3)), "KV heads"),
        (lambda c: c.check_fits(tiny_llama(head_dim=8)), "head_dim"),
        (lambda c: c.to(torch.bfloat16).check_fits(tiny_llama()), "bfloat16"),
        (lambda c: c.check_fits(tiny_llama(max_position_embeddings=6)), "6 positions"),
        (lambda c: c.slice(7), "7 positions"),
        (
            lambda c: PrefixCache([k / 0 for k in c.keys], c.values).check_finite("the source"),
            "NaN or infinity",
        ),
        (lambda c: PrefixCache.from_dynamic(DynamicCache()), "without layers"),
        (lambda c: prefill(tiny_llama(), tokens(1, 513)), "513 tokens"),
        (lambda c: prefill(tiny_llama(), tokens(1, 4) + 100), "vocabulary"),
        (lambda c: prefill(tiny_llama(), tokens(1, 4)[0]), "(B, T)"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_in_one_sentence(damage, sentence):
    with pytest.raises(KvlibError) as refusal:
        damage(good())
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), length=st.integers(1, 7), dim=st.sampled_from([2, 4]),
    layers=st.integers(1, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_cache_survives_the_adapter(batch, heads, length, dim, layers, seed):
    generator = torch.Generator().manual_seed(seed)
    make = lambda: [torch.randn(batch, heads, length, dim, generator=generator) for _ in range(layers)]  # noqa: E731
    prefix = PrefixCache(make(), make())
    back = PrefixCache.from_dynamic(prefix.to_dynamic())
    assert back.geometry == Geometry(layers, heads, dim) and back.tokens == length
    assert all(torch.equal(a, b) for a, b in zip(prefix.keys + prefix.values, back.keys + back.values))
    stop = 1 + seed % length
    assert torch.equal(prefix.slice(stop).keys[-1], prefix.keys[-1][:, :, :stop])


@pytest.mark.parametrize("chunk_tokens", [1, 4, 12, 13, 50])
def test_chunks_are_written_into_place_and_say_what_one_pass_says(chunk_tokens):
    model, ids = tiny_llama().double(), tokens(2, 13)
    one, many = prefill(model, ids), prefill(model, ids, chunk_tokens=chunk_tokens)
    for a, b in zip(one.keys + one.values, many.keys + many.values):
        assert b.is_contiguous() and b.untyped_storage().nbytes() == b.numel() * b.element_size()
        assert float((a - b).abs().max()) < 1e-12  # float64: sums in another order


def test_a_prefill_computes_nothing_that_is_thrown_away():
    model, ids, ran = tiny_llama(), tokens(1, 9), []
    last = model.base_model.layers[-1]
    for name, module in (
        ("head", model.lm_head),
        ("norm", model.base_model.norm),
        ("mlp", last.mlp),
        ("o", last.self_attn.o_proj),
    ):
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    prefill(model, ids, chunk_tokens=4)
    assert ran == []  # the last layer's keys and values are there before its attention
    prefill(model, ids, return_hidden=True)
    assert ran == ["o", "mlp", "norm"]


def test_a_layer_that_is_not_as_the_configuration_says_is_refused():
    layer = FilledLayer(4, torch.empty(1, 2, 4, 16), torch.empty(1, 2, 4, 16))
    for wrong in (torch.zeros(1, 1, 2, 16), torch.zeros(1, 2, 2, 16).half(), torch.zeros(1, 2, 5, 16)):
        with pytest.raises(KvlibError, match="expected what its configuration says"):
            layer.update(wrong, wrong)
