"""The handoff: every mode says the same, the model is always restored, and what cannot be is refused."""

import pytest
import torch
from test_maps import KINDS, fitted_ridge, random_residual
from tiny import LLAMA3_ROPE, tiny_llama, tokens
from transformers import MistralConfig, MistralForCausalLM

from kvlib import DirectMap, KvlibError, PrefixCache, handoff, prefill
from kvlib.attention import Affine, two_segment_attention


def read(model, prefix, cache_map, mode, ids):
    with torch.no_grad(), handoff(model, prefix.clone(), cache_map, mode) as active:
        first = active.logits(ids[:, :1])
        return torch.cat([first, active.logits(ids[:, 1:])], 1), active


@pytest.mark.parametrize("mode", ["absorbed", "in_place", "materialised"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_native_in_native_out(mode, dtype):
    model, ids = tiny_llama(rope_parameters=LLAMA3_ROPE).to(dtype), tokens(2, 20)
    native = model(ids).logits[:, 11:]
    logits, _ = read(model, prefill(model, ids[:, :11]), DirectMap(), mode, ids[:, 11:])
    # Half precision: about one unit in the last place of logits of size 4, in each of three layers.
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 0.03, torch.bfloat16: 0.2}[dtype]
    assert float((logits - native).abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "cache_map",
    [fitted_ridge(), random_residual(), random_residual(base=fitted_ridge())],
    ids=["ridge", "linear", "both"],
)
def test_absorbed_equals_materialised_up_to_the_64th_token(cache_map, dtype):
    model, ids = tiny_llama().to(dtype), tokens(2, 40 + 64)
    prefix = prefill(model, ids[:, :40])
    (absorbed, active), (materialised, _) = (
        read(model, prefix, cache_map.to(dtype), mode, ids[:, 40:]) for mode in ("auto", "materialised")
    )
    assert active.mode == "absorbed" and "absorbs" in active.reason
    # Both forms are exact; they differ by the order of roundings: some 1e3 units in the last place of logits of size 5.
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    assert float((absorbed - materialised)[:, [0, 63]].abs().max()) <= tolerance


@pytest.mark.parametrize(("residual", "features"), [kind for kind in KINDS if kind != ("linear", "own")])
def test_what_cannot_be_absorbed_is_applied_in_place_and_says_why(residual, features):
    model, ids = tiny_llama(), tokens(2, 20)
    prefix, cache_map = prefill(model, ids[:, :11]), random_residual(residual, features)
    (auto, active), (materialised, _) = (
        read(model, prefix, cache_map, mode, ids[:, 11:]) for mode in ("auto", "materialised")
    )
    assert active.mode == "in_place" and active.reason.startswith(f"{cache_map.why_not_affine}; ")
    assert torch.allclose(auto, materialised, atol=1e-5)
    with pytest.raises(KvlibError, match="use mode='in_place'"):
        handoff(model, prefix, cache_map, "absorbed")


def test_padded_prompts_are_read_as_if_alone():
    model, ids = tiny_llama(), tokens(1, 13)
    long = prefill(model, ids[:, :12])
    short = prefill(model, ids[:, 5:12])
    pad = torch.full((1, 2, 5, 16), 7.0)  # garbage that must not be seen
    for order in ((pad, None), (None, pad)):
        glue = lambda t: torch.cat([part for part in (order[0], t, order[1]) if part is not None], 2)  # noqa: E731, B023
        valid = torch.ones(2, 12, dtype=torch.bool)
        valid[1, slice(0, 5) if order[0] is not None else slice(7, 12)] = False
        both = PrefixCache(
            [torch.cat([a, glue(b)]) for a, b in zip(long.keys, short.keys)],
            [torch.cat([a, glue(b)]) for a, b in zip(long.values, short.values)],
            valid,
        )
        cache_map = random_residual(base=fitted_ridge())
        logits, _ = read(model, both, cache_map, "auto", ids[:, 12:].expand(2, 1).repeat(1, 3))
        for row, alone in ((0, long), (1, short)):
            wanted, _ = read(model, alone, cache_map, "materialised", ids[:, 12:].repeat(1, 3))
            assert torch.allclose(logits[row], wanted[0], atol=1e-4)


def test_generate_goes_on_like_native_from_its_own_cache():
    model, ids = tiny_llama(), tokens(2, 15)
    native = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()) as active:
        assert torch.equal(active.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0), native)
        assert active.seen == 14 + 9


def test_the_model_is_restored_even_after_an_error():
    model, ids = tiny_llama(), tokens(1, 8)
    before, native = model.config._attn_implementation, model(ids).logits
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        handoff(model, prefill(model, ids[:, :-1]), DirectMap()),
    ):
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == before and torch.equal(model(ids).logits, native)


def test_absorbing_leaves_the_prefix_alone_and_copies_nothing():
    model, ids = tiny_llama(), tokens(1, 8)
    prefix = prefill(model, ids[:, :-1])
    before = [t.clone() for t in prefix.keys + prefix.values]
    with torch.no_grad(), handoff(model, prefix, random_residual()) as active:
        active.logits(ids[:, -1:])
        assert active.cache.layers[0].prefix_keys.data_ptr() == prefix.keys[0].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(before, prefix.keys + prefix.values))


def test_refusals_are_one_sentence():
    model, ids = tiny_llama(), tokens(2, 8)
    prefix = prefill(model, ids[:, :-1])
    with pytest.raises(KvlibError, match="expected one of"):
        handoff(model, prefix, DirectMap(), "absorb")
    with pytest.raises(KvlibError, match="outside its `with` block"):
        handoff(model, prefix, DirectMap()).logits(ids[:, -1:])
    with handoff(model, prefix, DirectMap()) as active:
        with pytest.raises(KvlibError, match=r"expected \(2, S\)"):
            active.logits(ids[:1, -1:])
        with pytest.raises(KvlibError, match="covers all 7 tokens"):
            active.generate(ids[:, 1:])
    with handoff(model, prefix, DirectMap()) as active:
        active.logits(ids[:, -1:])
        with pytest.raises(KvlibError, match="has read 1 tokens already"):
            active.generate(ids)
        with pytest.raises(KvlibError, match="S at least 1"):
            active.logits(ids[:, :0])
    with pytest.raises(KvlibError, match="outside its `with` block"):
        active.generate(ids)
    with pytest.raises(KvlibError, match="a DynamicCache given as the prefix"):
        handoff(model, prefix.to_dynamic(), DirectMap())
    with pytest.raises(KvlibError, match="a NoneType given as the map"):
        handoff(model, prefix, None)
    short = tiny_llama(max_position_embeddings=8)
    with (
        handoff(short, prefill(short, ids[:, :7]), DirectMap()) as active,
        pytest.raises(KvlibError, match="has 8"),
    ):
        active.logits(ids[:, :2])
    prefix.values[1][0, 0, 0, 0] = float("inf")
    with pytest.raises(KvlibError, match="values of layer 1"):
        handoff(model, prefix, DirectMap())


def test_a_cache_that_a_map_has_used_up_is_not_mapped_again():
    model, ids = tiny_llama(), tokens(1, 8)
    cache_map = random_residual("quadratic")
    prefix = prefill(model, ids[:, :-1])
    with torch.no_grad(), handoff(model, prefix, cache_map) as active:
        first = active.logits(ids[:, -1:])
    for used in (prefix, prefix.clone(), prefix.slice(3), prefix.select([0]), prefix.to(torch.float32)):
        with pytest.raises(KvlibError, match="a residual map has corrected already"):
            handoff(model, used, cache_map)
    with (
        torch.no_grad(),
        handoff(model, prefix, DirectMap(), "in_place") as active,
    ):  # as it is: no second correction
        assert torch.allclose(active.logits(ids[:, -1:]), first, atol=1e-5)
    with pytest.raises(KvlibError, match="corrected already"):
        handoff(model, fitted_ridge().materialise(prefill(model, ids)), fitted_ridge())


def test_a_correction_that_overflows_is_refused_in_every_mode():
    model, ids = tiny_llama(), tokens(1, 8)
    cache_map = random_residual().with_scale(3.3e38)  # times what it multiplies, more than float32 holds
    for mode, where in (
        ("absorbed", "the logits of"),
        ("in_place", "corrected"),
        ("materialised", "corrected"),
    ):
        prefix = prefill(model, ids[:, :-1])
        with (
            pytest.raises(KvlibError, match=f"{where}.* NaN or infinity"),
            torch.no_grad(),
            handoff(model, prefix, cache_map, mode) as active,
        ):
            active.logits(ids[:, -1:])
        assert model(ids).logits.isfinite().all()  # and the model is its own again


def test_unchecked_handoffs_check_nothing():
    model, ids = tiny_llama(), tokens(1, 8)
    foreign = prefill(tiny_llama(1, rope_parameters=LLAMA3_ROPE), ids[:, :-1])
    foreign.values[0][:] = float("nan")
    with torch.no_grad(), handoff(model, foreign, DirectMap(), check=False) as active:
        assert active.logits(ids[:, -1:]).isnan().all()
    with handoff(model, foreign, DirectMap(), check=False) as active:
        assert active.generate(ids.flip(1), max_new_tokens=2, pad_token_id=0).shape == (1, 10)


def test_a_model_with_sliding_windows_is_refused():
    config = MistralConfig(
        vocab_size=101, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, sliding_window=4,
    )  # fmt: skip
    prefix = prefill(tiny_llama(), tokens(1, 8))
    with pytest.raises(KvlibError, match="full attention in every layer"):
        handoff(MistralForCausalLM(config), prefix, DirectMap())


def test_many_queries_in_chunks_equal_all_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    arguments = (
        draw(2, 6, 9, 4),
        draw(2, 2, 5, 4),
        draw(2, 2, 5, 4),
        draw(2, 2, 11, 4),
        draw(2, 2, 11, 4),
        0.5,
    )
    maps = (
        Affine(draw(2, 4, 4), draw(2, 4), draw(2, 4, 2), draw(2, 2, 4)),
        Affine(None, draw(2, 4), draw(2, 4, 2), draw(2, 2, 4)),
    )
    whole = two_segment_attention(*arguments, *maps)
    monkeypatch.setattr("kvlib.attention.QUERY_ROWS", 7)
    assert torch.allclose(two_segment_attention(*arguments, *maps), whole, atol=1e-12)
