"""The warm-up's loop in C: against float64 through every kind of map, shape, layout and length, and torch in its place."""

from dataclasses import replace

import pytest
import torch
from test_step_kernels import largest_error

import kvlib.warmup as warmup
from kvlib import ResidualMap, RidgeMap
from kvlib.kernels.warmup import c_kv_mse
from kvlib.maps.residual import WEIGHTS
from kvlib.ragged import RaggedPrefix
from kvlib.warmup import POSITIONS, kv_mse

pytestmark = pytest.mark.usefixtures("compiled_code")
LAYERS, HEADS = 2, 3
# one position, less than a block of the source, a block, some more; the longest has every third position looked at
LENGTHS = [1, 37, 144, 3 * POSITIONS + 50]
KINDS = [(residual, features) for residual in ("linear", "quadratic") for features in ("own", "rms")]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn_map(residual, features, dim=16, rank=4, ridge=False) -> ResidualMap:
    """No weight is zero, and no two heads have the same σ."""
    sigma = 0.5 + torch.rand(2, LAYERS, HEADS, generator=torch.Generator().manual_seed(1))
    base = None
    if ridge:
        wide = [torch.eye(dim) + 0.1 * draw(LAYERS, HEADS, dim, dim, seed=n) for n in range(2)]
        base = RidgeMap(
            wide[0], draw(LAYERS, HEADS, dim), wide[1], draw(LAYERS, HEADS, dim, seed=1), penalty=0.0
        )
    fresh = ResidualMap.initial(
        *sigma, dim, rank, residual=residual, features=features, base=base, generator=torch.Generator().manual_seed(2)
    )  # fmt: skip
    rights = {name: 0.2 * draw(LAYERS, HEADS, rank, dim, seed=len(name)) for name in WEIGHTS[1::2]}
    return replace(fresh, **rights, scale=0.75)


def caches(dim=16, dtype=torch.float32, lengths=LENGTHS) -> tuple[RaggedPrefix, RaggedPrefix]:
    """The source's and the target's, cut from windows that are longer than the prompts."""
    windows = [draw(len(lengths), LAYERS, 2, HEADS, 500, dim, seed=n).to(dtype) for n in (7, 8)]
    return tuple(RaggedPrefix([w[..., :n, :] for w, n in zip(of, lengths)]) for of in windows)


def loss_and_gradients(cache_map, source, target):
    own = replace(cache_map, **{n: getattr(cache_map, n).clone().requires_grad_(True) for n in WEIGHTS})
    loss = kv_mse(own, source, target)
    loss.backward()
    return [loss.detach(), *(getattr(own, n).grad for n in WEIGHTS)]


def exact(cache_map, source, target):
    """In float64, which is torch's to do."""
    wide = [RaggedPrefix([row.double() for row in of.rows]) for of in (source, target)]
    assert c_kv_mse(cache_map.to(torch.float64), *wide) is None
    return loss_and_gradients(cache_map.to(torch.float64), *wide)


@pytest.fixture
def counted(monkeypatch):
    """How many calls of the compiled loop there were."""
    found = []

    def call(*given):
        result = c_kv_mse(*given)
        found.append(result is not None)
        return result

    monkeypatch.setattr(warmup, "c_kv_mse", call)
    return lambda: sum(found)


# 2e-5: float32 sums of some hundred terms. A wrong term is off by far more.
@pytest.mark.parametrize("ridge", [False, True], ids=["direct", "ridge"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_loss_and_gradients_are_those_of_float64(counted, residual, features, dim, stored, ridge):
    cache_map, both = drawn_map(residual, features, dim, 8, ridge), caches(dim, stored)
    found = loss_and_gradients(cache_map, *both)
    assert counted() == 1
    wanted = exact(cache_map, *both)
    assert all(float(tensor.abs().max()) > 0 for tensor in wanted)
    assert largest_error(found, wanted) < 2e-5


@pytest.mark.parametrize("rank", [1, 4, 5, 12, 16])
@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_every_rank_is_one(counted, residual, features, rank):
    cache_map, both = drawn_map(residual, features, rank=rank), caches()
    found = loss_and_gradients(cache_map, *both)
    assert counted() == 1 and largest_error(found, exact(cache_map, *both)) < 2e-5


def test_a_prompt_of_no_positions_adds_nothing(counted):
    cache_map, both = drawn_map("linear", "own"), caches(lengths=[0, 37, 0])
    found = loss_and_gradients(cache_map, *both)
    assert counted() == 1 and largest_error(found, exact(cache_map, *both)) < 2e-5


def test_vectors_are_found_wherever_they_lie(counted):
    """Heads behind positions, layers behind both, another order in the target, an odd number of numbers before them."""
    source, target = caches()
    moved = [
        RaggedPrefix([row.permute(3, 2, 0, 1, 4).clone().permute(2, 3, 1, 0, 4) for row in source.rows]),
        RaggedPrefix([torch.cat([torch.zeros(1), row.flatten()])[1:].view(row.shape) for row in target.rows]),
    ]
    cache_map = drawn_map("quadratic", "own")
    found, wanted = (loss_and_gradients(cache_map, *both) for both in (moved, (source, target)))
    assert counted() == 2 and all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_how_many_threads_there_are_changes_no_byte(counted, residual, features):
    cache_map, both, before, found = drawn_map(residual, features), caches(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(loss_and_gradients(cache_map, *both))
    finally:
        torch.set_num_threads(before)
    assert counted() == 3
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("ridge", [False, True], ids=["direct", "ridge"])
@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_without_a_compiler_torch_says_the_same(counted, monkeypatch, residual, features, ridge):
    cache_map, both = drawn_map(residual, features, ridge=ridge), caches(dtype=torch.bfloat16)
    ours = loss_and_gradients(cache_map, *both)
    monkeypatch.setenv("CC", "no-such-compiler")
    theirs = loss_and_gradients(cache_map, *both)
    assert counted() == 1 and largest_error(ours, theirs) < 2e-5


@pytest.mark.parametrize("features", ["own", "rms"])
@pytest.mark.parametrize("where", ["source", "target", "weight"])
def test_what_is_not_finite_is_seen_in_the_loss(counted, features, where):
    cache_map, (source, target) = drawn_map("quadratic", features), caches()
    place = {
        "source": source.rows[3],
        "target": target.rows[3],
        "weight": cache_map.value_left[:, None, :, :, :],
    }
    place[where][1, -1, 2, 3, 2] = float("nan")
    assert bool(loss_and_gradients(cache_map, source, target)[0].isnan()) and counted() == 1


def test_a_target_of_zeros_is_no_measure():
    source, target = caches()
    target.rows[1].zero_()
    assert not bool(loss_and_gradients(drawn_map("linear", "own"), source, target)[0].isfinite())


def test_what_is_not_compiled_is_left_to_torch():
    linear, turned = drawn_map("linear", "own"), drawn_map("linear", "rope_stripped")
    for cache_map, both in (
        (turned, caches()),
        (linear, caches(dtype=torch.float16)),
        (drawn_map("linear", "own", dim=20), caches(20)),
        (linear.to(torch.float64), caches()),
        (linear, (caches()[0], caches(dtype=torch.bfloat16)[1])),
    ):
        assert c_kv_mse(cache_map, *both) is None


def test_caches_that_do_not_fit_are_not_read():
    """Where C would read beside them: torch refuses."""
    cache_map, (source, target) = drawn_map("linear", "own"), caches()
    for other in (target.select(slice(1, None)), caches(lengths=[2, 37, 144, 434])[1], caches(32)[1]):
        assert c_kv_mse(cache_map, source, other) is None
