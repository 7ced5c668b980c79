"""For caches of any shape: the adapter keeps every bit, and one thing wrong is refused or does no harm."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import is_one_sentence, tiny_llama, tokens
from torch._subclasses.fake_tensor import FakeTensorMode

from kvlib import DirectMap, KvlibError, PrefixCache, handoff, prefill
from kvlib.cache import Geometry
from kvlib.origin import Origin

MODES = ("absorbed", "in_place", "materialised")


@dataclass(frozen=True)
class Shape:
    """A tiny model's geometry and a batch of prompts of `length` tokens, the last of them held back."""

    layers: int
    heads: int
    group: int
    head_dim: int
    batch: int
    length: int
    seed: int

    def model(self):
        # the hidden size is a multiple of the query heads and never heads x head_dim
        queries = self.heads * self.group
        return tiny_llama(
            self.seed, num_hidden_layers=self.layers, num_attention_heads=queries, num_key_value_heads=self.heads,
            head_dim=self.head_dim, hidden_size=queries * (self.head_dim + 2), max_position_embeddings=32,
        ).double()  # fmt: skip

    def ids(self):
        return tokens(self.batch, self.length, self.seed)


shapes = st.builds(
    Shape, layers=st.integers(1, 3), heads=st.integers(1, 3), group=st.integers(1, 3), head_dim=st.sampled_from([2, 4, 6]),
    batch=st.integers(1, 3), length=st.integers(2, 8), seed=st.integers(0, 99),
)  # fmt: skip


def tensors(cache: PrefixCache) -> list[torch.Tensor]:
    return cache.keys + cache.values


def same(one: PrefixCache, other: PrefixCache) -> bool:
    """Bit for bit, padding and token ids included."""
    pairs = [*zip(tensors(one), tensors(other)), (one.valid, other.valid), (one.input_ids, other.input_ids)]
    return len(one.keys) == len(other.keys) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs
    )


@st.composite
def padded_caches(draw) -> PrefixCache:
    """Random values; each prompt padded on the left or on the right, or none padded."""
    batch, heads, length, dim, layers = (draw(st.integers(1, n)) for n in (3, 3, 7, 4, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    make = lambda: [
        torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for _ in range(layers)
    ]
    valid = None
    if draw(st.booleans()):
        valid = torch.zeros(batch, length, dtype=torch.bool)
        for row in range(batch):
            count = draw(st.integers(1, length))
            valid[row, slice(None, count) if draw(st.booleans()) else slice(length - count, None)] = True
    ids = torch.randint(101, (batch, length), generator=generator) if draw(st.booleans()) else None
    origin = Origin.of(tiny_llama()).over(ids) if draw(st.booleans()) or ids is not None else None
    return PrefixCache(make(), make(), valid, origin=origin)


@settings(max_examples=60)
@given(cache=padded_caches(), data=st.data())
def test_cutting_choosing_copying_and_converting_keep_every_bit(cache, data):
    assert same(cache.clone(), cache) and same(cache.to(cache.dtype), cache)
    assert cache.clone().keys[0].data_ptr() != cache.keys[0].data_ptr()
    if cache.dtype in (torch.bfloat16, torch.float16):
        assert same(cache.to(torch.float32).to(cache.dtype), cache)
    first_valid = 1 if cache.valid is None else int(cache.valid.long().argmax(-1).max()) + 1
    stop = data.draw(st.integers(first_valid, cache.tokens))
    cut = cache.slice(stop)
    assert all(torch.equal(a, b[:, :, :stop]) for a, b in zip(tensors(cut), tensors(cache)))
    assert cut.keys[0].data_ptr() == cache.keys[0].data_ptr()  # a view
    rows = data.draw(st.lists(st.integers(-cache.batch, cache.batch - 1), min_size=1, max_size=4))
    for chosen in (cache.select(rows), cache.select(torch.tensor(rows))):
        assert same(chosen, cache.select([row % cache.batch for row in rows])) and chosen.batch == len(rows)
        assert torch.equal(chosen.positions, cache.positions[rows])
    for derived in (cut, cache.select(rows), cache.clone(), cache.to(torch.float32)):
        assert (derived.origin is None) == (cache.origin is None)
        if cache.origin is not None:
            assert derived.origin.identity == cache.origin.identity
        if derived.input_ids is not None:
            assert derived.input_ids.shape == (derived.batch, derived.tokens)
    # cutting and choosing commute
    assert same(cut.select(rows), cache.select(rows).slice(stop))


@settings(max_examples=40)
@given(cache=padded_caches())
def test_a_round_trip_through_transformers_keeps_every_bit_or_refuses_padding(cache):
    if cache.valid is not None and not cache.valid.all():
        with pytest.raises(KvlibError, match="no place for the mask"):
            cache.to_dynamic()
        return
    back = PrefixCache.from_dynamic(cache.to_dynamic())
    assert same(back, PrefixCache(cache.keys, cache.values)) and back.origin is None


@settings(max_examples=25)
@given(shape=shapes, mode=st.sampled_from(MODES), chunk=st.integers(1, 8))
def test_a_models_own_cache_handed_back_is_native(shape, mode, chunk):
    model, ids = shape.model(), shape.ids()
    native = model(ids).logits[:, -1:]
    prefix = prefill(model, ids[:, :-1], chunk_tokens=chunk)
    assert prefix.geometry == Geometry.of(model) and torch.equal(prefix.input_ids, ids[:, :-1])
    with torch.no_grad(), handoff(model, prefix.clone(), DirectMap(), mode, source=model) as active:
        assert torch.allclose(active.logits(ids[:, -1:]), native, atol=1e-10, rtol=1e-10)
    with handoff(model, prefix, DirectMap(), mode, source=model) as active:
        ours = active.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(ours, model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))


def drop(cache, layer, rest):
    return cache.keys[:layer] + cache.keys[layer + 1 :], cache.values[:layer] + cache.values[layer + 1 :]


def surplus(cache, layer, rest):
    return cache.keys + [cache.keys[layer]], cache.values + [cache.values[layer]]


def keys_only(cache, layer, rest):
    return cache.keys + [cache.keys[layer]], cache.values


def with_layer(change):
    """One layer of the keys or of the values changed."""

    def damage(cache, layer, rest):
        sides = [list(cache.keys), list(cache.values)]
        side = sides[rest % 2]
        side[layer] = change(side[layer], rest)
        return sides

    return damage


def with_all(change):
    def damage(cache, layer, rest):
        return [change(t, rest) for t in cache.keys], [change(t, rest) for t in cache.values]

    return damage


def poison(number):
    def put(tensor, rest):
        poisoned = tensor.clone()
        poisoned.view(-1)[rest % poisoned.numel()] = number
        return poisoned

    return with_layer(put)


DAMAGES = {
    "a layer missing": drop,
    "a layer too many": surplus,
    "a key layer too many": keys_only,
    "no layer": lambda cache, layer, rest: ([], []),
    "one layer of another length": with_layer(lambda t, rest: torch.cat([t, t], 2)),
    "one layer of another batch": with_layer(lambda t, rest: torch.cat([t, t], 0)),
    "one layer of other heads": with_layer(lambda t, rest: torch.cat([t, t], 1)),
    "one layer of another width": with_layer(lambda t, rest: torch.cat([t, t], 3)),
    "one layer of another dtype": with_layer(lambda t, rest: t.float()),
    "one layer of whole numbers": with_layer(lambda t, rest: t.long()),
    "one layer flat": with_layer(lambda t, rest: t.flatten(1)),
    "one layer that is no tensor": with_layer(lambda t, rest: t.tolist()),
    "one layer that is nothing": with_layer(lambda t, rest: None),
    "one layer that is nowhere": with_layer(lambda t, rest: t.to("meta")),
    "one layer that is sparse": with_layer(lambda t, rest: t.to_sparse()),
    "all of other heads": with_all(lambda t, rest: torch.cat([t, t], 1)),
    "all of another width": with_all(lambda t, rest: torch.cat([t, t], 3)),
    "all of another dtype": with_all(lambda t, rest: t.to((torch.float32, torch.float16, torch.bfloat16)[rest % 3])),
    "all whole numbers": with_all(lambda t, rest: t.long()),
    "all complex": with_all(lambda t, rest: t.to(torch.complex64)),
    "all empty": with_all(lambda t, rest: t[:, :, :0]),
    "no prompts": with_all(lambda t, rest: t[:0]),
    "too long": with_all(lambda t, rest: t[:, :, :1].repeat(1, 1, 32 + rest % 3, 1)),
    "NaN somewhere": poison(float("nan")),
    "infinity somewhere": poison(float("inf")),
    "minus infinity somewhere": poison(float("-inf")),
    "heads and positions swapped": with_all(lambda t, rest: t.transpose(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
@settings(max_examples=12)
@given(shape=shapes, mode=st.sampled_from(MODES), layer=st.integers(0, 2), rest=st.integers(0, 10**6))
def test_one_thing_wrong_with_a_cache_is_refused_in_one_sentence(what, shape, mode, layer, rest):
    model, ids = shape.model(), shape.ids()
    whole = prefill(model, ids[:, :-1])
    damaged = DAMAGES[what](whole, layer % shape.layers, rest)
    # as many heads as positions: swapped, they have the shape of a valid cache
    assume(what != "heads and positions swapped" or shape.heads != shape.length - 1)
    with pytest.raises(KvlibError) as refusal:
        handoff(model, PrefixCache(*damaged), DirectMap(), mode)
    assert is_one_sentence(refusal.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_a_cache_is_of_floating_point_numbers(dtype):
    whole = [torch.ones(1, 2, 3, 4).to(dtype)]
    with pytest.raises(KvlibError, match="expected floating point"):
        PrefixCache(whole, whole)


def test_layers_on_another_device_are_refused():
    here = torch.ones(1, 2, 3, 16)
    with FakeTensorMode():
        there = torch.ones(1, 2, 3, 16, device="cuda")  # no GPU is needed to say so
    with pytest.raises(KvlibError, match="value layer 0 of the cache is on cuda:0, expected cpu"):
        PrefixCache([here], [there])
    with pytest.raises(KvlibError, match="validity mask is on cuda:0, expected cpu"):
        with FakeTensorMode():
            mask = torch.ones(1, 3, dtype=torch.bool, device="cuda")
        PrefixCache([here], [here], mask)
    with pytest.raises(KvlibError, match="the cache is on cpu, the model on meta"):
        PrefixCache([here] * 3, [here] * 3).check_fits(tiny_llama().to("meta"))
    with pytest.raises(KvlibError, match="token ids on cpu given, the model is on meta"):
        prefill(tiny_llama().to("meta"), tokens(1, 3))


HARMLESS = {
    "not contiguous": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "part of something larger": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
    "with a gradient asked for": lambda t: t.clone().requires_grad_(),
    "a parameter": lambda t: torch.nn.Parameter(t.clone()),
}


@pytest.mark.parametrize("what", HARMLESS)
@settings(max_examples=8)
@given(shape=shapes, mode=st.sampled_from(MODES))
def test_another_layout_in_memory_does_no_harm(what, shape, mode):
    model, ids = shape.model(), shape.ids()
    native, whole = model(ids).logits[:, -1:], prefill(model, ids[:, :-1])
    cache = PrefixCache([HARMLESS[what](t) for t in whole.keys], [HARMLESS[what](t) for t in whole.values])
    with torch.no_grad(), handoff(model, cache, DirectMap(), mode) as active:
        assert torch.allclose(active.logits(ids[:, -1:]), native, atol=1e-10)


@settings(max_examples=100)
@given(data=st.data(), batch=st.integers(1, 3), length=st.integers(1, 6))
def test_a_mask_marks_one_run_per_prompt_or_is_refused(data, batch, length):
    rows = data.draw(st.lists(st.integers(0, 2**length - 1), min_size=batch, max_size=batch))
    texts = [f"{row:0{length}b}" for row in rows]
    mask = torch.tensor([[bit == "1" for bit in text] for text in texts])
    cache = PrefixCache(*([torch.ones(batch, 1, length, 2)] for _ in range(2)))
    runs = [text.strip("0") for text in texts]
    if all(run and "0" not in run for run in runs):
        padded = PrefixCache(cache.keys, cache.values, mask)
        assert padded.lengths.tolist() == [len(run) for run in runs]
        assert torch.equal(padded.positions.amax(-1), padded.lengths - 1)
    else:
        with pytest.raises(KvlibError, match="runs of positions, expected one"):
            PrefixCache(cache.keys, cache.values, mask)


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask[:, 1:], lambda mask: torch.cat([mask, mask], 1), lambda mask: torch.cat([mask, mask]),
        lambda mask: mask.flatten(), lambda mask: mask[:1], lambda mask: mask.long(), lambda mask: mask.float(),
        lambda mask: mask.tolist(), lambda mask: True, lambda mask: mask[:, None, None],
    ],
)  # fmt: skip
def test_a_mask_of_another_shape_or_kind_is_refused(change):
    cache = PrefixCache(*([torch.ones(2, 1, 5, 2)] for _ in range(2)))
    with pytest.raises(KvlibError, match=r"validity mask is .*, expected \(2, 5\) torch.bool"):
        PrefixCache(cache.keys, cache.values, change(torch.ones(2, 5, dtype=torch.bool)))


@settings(max_examples=30)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 5),
    wanted=st.one_of(st.integers(-9, 9), st.sampled_from([2.5, None, "2", slice(2), [1]])),
)
def test_positions_and_prompts_that_are_not_there_are_refused(batch, length, wanted):
    cache = PrefixCache(*([torch.ones(batch, 1, length, 2)] for _ in range(2)))
    if isinstance(wanted, int) and 1 <= wanted <= length:
        assert cache.slice(wanted).tokens == wanted
    else:
        with pytest.raises(KvlibError, match="ask for 1 to"):
            cache.slice(wanted)
    for prompts in (
        wanted,
        [wanted],
        torch.empty(0, dtype=torch.long),
        [batch],
        slice(batch, None),
        [True] * (batch + 1),
    ):
        try:
            chosen = cache.select(prompts)
        except KvlibError as refusal:
            assert "write [i]" in str(refusal)  # noqa: PT017 - which of the two is right depends on what was drawn
        else:
            wanted_rows = prompts if isinstance(prompts, slice) else torch.tensor(prompts)
            assert torch.equal(chosen.keys[0], cache.keys[0][wanted_rows]) and chosen.batch >= 1
