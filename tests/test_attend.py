"""One new token's attention in C: against attention in float64, through every shape, dtype and layout, and where it is not used."""

import pytest
import torch
from tiny import tiny_llama, tokens

from kvlib import DirectMap, KvlibError, attention, handoff, prefill
from kvlib.attention import IDENTITY, Affine, two_segment_attention
from kvlib.kernels import attend

# prompts, KV heads, queries of each, prefix, new positions, D
SHAPES = [
    (1, 3, 3, 700, 1, 64),
    (2, 2, 4, 256, 5, 48),
    (3, 1, 1, 1, 300, 5),
    (2, 8, 4, 257, 64, 128),
    (1, 2, 16, 33, 2, 33),
    (1, 1, 2, 0, 3, 16),
]


def tensors(batch, heads, group, tokens, new, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    prefix = [drawn(batch, heads, tokens, dim) for _ in range(2)]
    fresh = [
        drawn(batch, new, heads, dim).transpose(1, 2) for _ in range(2)
    ]  # as a model's projection leaves them
    return [drawn(batch, heads * group, 1, dim), *prefix, *fresh]


def maps(heads, dim, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size):
        return torch.randn(*size, generator=generator)

    dense = torch.eye(dim) + 0.1 * drawn(heads, dim, dim)
    low_rank = 0.2 * drawn(heads, dim, 4), 0.2 * drawn(heads, 4, dim)
    return Affine(dense, drawn(heads, dim)), Affine(None, drawn(heads, dim), *low_rank, 0.5)


def dense_maps(heads, dim, seed=1):
    """Keys and values as `composed` maps leave them: one matrix and a bias, one of them without either part."""
    (key, _), (value, low_rank) = maps(heads, dim, seed), maps(heads, dim, seed + 1)
    return {
        "both": (key, value),
        "no bias": (Affine(key.dense), Affine(value.dense)),
        "keys alone": (key, IDENTITY),
        "a bias alone": (IDENTITY, Affine(None, low_rank.bias)),
    }


def exact(arguments, both=(IDENTITY, IDENTITY), valid=None):
    wide = [t.double() for t in arguments]
    scaling = arguments[0].shape[-1] ** -0.5
    return two_segment_attention(*wide, scaling, *(one.to(torch.float64) for one in both), valid)


def found(arguments, both=(IDENTITY, IDENTITY), valid=None):
    assert attend.kernel(*arguments) is not None
    return two_segment_attention(*arguments, arguments[0].shape[-1] ** -0.5, *both, valid)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_every_shape_is_attention(shape, mapped, padded):
    arguments, valid = tensors(*shape), None
    both = maps(shape[1], shape[5]) if mapped else (IDENTITY, IDENTITY)
    if padded:
        valid = torch.rand(shape[0], shape[3], generator=torch.Generator().manual_seed(2)) > 0.4
        valid[0, : shape[3] // 2 + 1] = False  # whole blocks of padding
    wanted = exact(arguments, both, valid)
    # a sum of D products in the scores, one of T weights: a few units in the last place of what is summed
    assert float((found(arguments, both, valid) - wanted).abs().max()) < 64 * 2**-24 * float(
        wanted.abs().max()
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["both", "no bias", "keys alone", "a bias alone"])
def test_maps_of_one_matrix_are_applied_in_the_same_pass(monkeypatch, shape, kind):
    def never(*_):
        raise AssertionError("a map was applied outside of the compiled step")

    arguments, both = tensors(*shape), dense_maps(shape[1], shape[5])[kind]
    valid = torch.rand(shape[0], shape[3], generator=torch.Generator().manual_seed(2)) > 0.4
    wanted = exact(arguments, both, valid)
    monkeypatch.setattr(Affine, "forward", never)
    monkeypatch.setattr(Affine, "transpose", never)
    result = found(arguments, both, valid)
    assert float((result - wanted).abs().max()) < 64 * 2**-24 * float(wanted.abs().max())
    untouched = exact(arguments, (IDENTITY, IDENTITY), valid)
    assert shape[3] == 0 or float((wanted - untouched).abs().max()) > 1e-3


def test_a_map_of_another_shape_is_refused():
    with pytest.raises(KvlibError, match="key_dense .* given for 3 KV heads of 64, expected"):
        found(tensors(1, 3, 3, 40, 1, 64), (Affine(torch.ones(2, 64, 64)), IDENTITY))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_where_it_lies_and_rounded_once(dtype):
    arguments = tensors(2, 3, 3, 300, 4, 64, dtype=dtype)
    wanted = exact(arguments, maps(3, 64))
    result = found(arguments, maps(3, 64))
    assert result.dtype == dtype
    step = 2 * torch.finfo(dtype).eps * wanted.abs().clamp_min(1e-3)
    assert bool(((result - wanted).abs() <= step).all())


def test_large_scores_and_scores_far_apart_keep_their_weights():
    arguments = tensors(1, 2, 2, 600, 2, 64)
    arguments[0] = arguments[0] * 40  # scores of hundreds: nearly all weights are nothing
    wanted = exact(arguments)
    assert float((found(arguments) - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())
    arguments[1][:] = 0
    arguments[3][:] = 0  # all alike: the mean
    everything = torch.cat([arguments[2], arguments[4]], 2).mean(2)
    assert torch.allclose(found(arguments)[0, 0, 0], everything[0, 0], atol=1e-6)


@pytest.mark.parametrize("where", [1, 2, 3, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(where, value):
    arguments = tensors(1, 1, 1, 300, 3, 64)
    arguments[where][0, 0, -1, 5] = value
    assert (
        not torch.isfinite(found(arguments)).all() or not torch.isfinite(exact(arguments)).logical_not().any()
    )


def test_a_view_of_a_longer_cache_is_read_as_its_copy():
    q, keys, values, *new = tensors(2, 3, 2, 500, 1, 64)
    views = [q, keys[:, :, 7:400], values[:, :, 7:400], *new]
    copies = [q, views[1].clone(), views[2].clone(), *new]
    assert torch.equal(found(views), found(copies))


@pytest.mark.all_cores
def test_threads_do_not_change_what_is_said():
    arguments, before = tensors(2, 3, 3, 3000, 1, 64), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(found(arguments))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], one) for one in results[1:])


def test_where_it_does_not_apply_torch_attends():
    arguments = tensors(1, 2, 2, 40, 1, 64)
    several = [arguments[0].repeat(1, 1, 3, 1), *arguments[1:]]
    with_gradient = [arguments[0].clone().requires_grad_(), *arguments[1:]]
    mixed = [arguments[0], arguments[1].bfloat16(), *arguments[2:]]
    strided = [arguments[0], arguments[1].transpose(2, 3).contiguous().transpose(2, 3), *arguments[2:]]
    for given in (several, with_gradient, [t.double() for t in arguments], mixed, strided):
        assert attend.kernel(*given) is None
    many, wide = tensors(1, 1, 17, 40, 1, 64), tensors(1, 1, 1, 40, 1, 257)
    assert attend.kernel(*many) is None and attend.kernel(*wide) is None
    with torch.no_grad():
        assert attend.kernel(*with_gradient) is not None


def test_a_map_that_learns_has_its_gradient():
    arguments, (keys, values) = tensors(1, 2, 2, 40, 1, 64), maps(2, 64)
    for both in ((keys, IDENTITY), (IDENTITY, values)):
        for one in both:
            if one.bias is not None:
                one.bias.requires_grad_()
                result = two_segment_attention(*arguments, 0.125, *both)
                assert torch.autograd.grad(result.sum(), one.bias)[0].abs().sum() > 0
                one.bias.requires_grad_(False)


def test_without_a_compiler_a_handoff_says_the_same(monkeypatch):
    model, ids = tiny_llama(), tokens(2, 40)
    prefix, logits = prefill(model, ids[:, :-1]), []
    for step in (attend.kernel, lambda *given, **options: None):
        monkeypatch.setattr(attention.attend, "kernel", step)
        with torch.no_grad(), handoff(model, prefix, DirectMap()) as active:
            logits.append(torch.cat([active.logits(ids[:, -1:]) for _ in range(3)], 1))
    assert torch.allclose(*logits, atol=1e-5)


def test_a_compiler_that_refuses_leaves_it_to_torch(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    attend._compiled.cache_clear()
    try:
        assert attend.kernel(*tensors(1, 2, 2, 40, 1, 64)) is None
    finally:
        attend._compiled.cache_clear()
