"""Training: the loss is the KL that is measured, only the map learns, and gradients add up."""

import math
from dataclasses import replace

import pytest
import torch
from test_maps import KINDS, random_residual
from tiny import tiny_llama, tokens

from kvlib import ResidualMap, RidgeAccumulator, prefill
from kvlib.cache import Geometry
from kvlib.divergence import path_divergence, text_reference
from kvlib.maps.residual import WEIGHTS
from kvlib.packed import FrozenMatrix
from kvlib.pair import rotary_of
from kvlib.study.progress import Progress
from kvlib.study.store import WindowStore
from kvlib.training import Frozen, HeadKL, forced_kl, train
from kvlib.warmup import kv_mse

STEPS = 4


@pytest.fixture(scope="module")
def models():
    target = tiny_llama(0)
    source = tiny_llama(1)
    source.load_state_dict({n: w + 0.05 * source.state_dict()[n] for n, w in target.state_dict().items()})
    return target, source


@pytest.fixture(scope="module")
def store(models, tmp_path_factory):
    target, source = models
    folder = tmp_path_factory.mktemp("windows")
    windows = WindowStore(
        folder, tokens(6, 40), Geometry.of(target), target.config.hidden_size, torch.float32
    )
    return windows.fill(source, target, Progress("test", 6), 1)


def head_of(target):
    return target.lm_head.weight.detach()


@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_the_loss_is_the_divergence_that_is_measured(models, store, residual, features):
    target, source = models
    cache_map = random_residual(residual, features)
    cuts = [9, 17, 30]
    batch = store.batch([0, 3, 5], cuts, STEPS, with_target=False)
    frozen = Frozen.of(target, head_of(target), len(cuts) * STEPS)
    loss = forced_kl(frozen, cache_map, batch, rotary_of(target) if cache_map.needs_rotary else None)
    each = []
    for row, cut in zip((0, 3, 5), cuts):
        window = store.windows[row : row + 1]
        reference = text_reference(target, window[:, :cut], window[:, cut : cut + STEPS])
        each.append(
            path_divergence(target, prefill(source, window[:, : cut - 1]), cache_map, reference).kl.mean()
        )
    assert float(loss) == pytest.approx(float(torch.stack(each).mean()), rel=1e-3)


def test_the_heads_gradient_is_autograds():
    generator = torch.Generator().manual_seed(0)
    hidden, native = torch.randn(2, 7, 12, generator=generator)
    head = torch.randn(50, 12, generator=generator)
    ours, theirs = (hidden.clone().requires_grad_(True) for _ in range(2))
    loss = HeadKL.apply(ours, native, FrozenMatrix(head, 7))
    p, q = ((t @ head.T).log_softmax(-1) for t in (native, theirs))
    wanted = (p.exp() * (p - q)).sum(-1).mean()
    loss.backward()
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5) and torch.allclose(
        ours.grad, theirs.grad, atol=1e-6
    )


def run(target, store, initial, **changes):
    settings = {
        "steps": 6,
        "warmup_steps": 2,
        "learning_rate": 0.02,
        "head_weight": head_of(target),
        **changes,
    }
    batches = lambda number, warm: store.batch(
        [number % 6, (number + 3) % 6], [12, 25], STEPS, with_target=warm
    )  # noqa: E731
    return list(train(target, initial, batches, **settings))


def fresh(store, **changes):
    return ResidualMap.initial(
        *store.source_scale(), 16, 4, generator=torch.Generator().manual_seed(1), **changes
    )


def test_training_lowers_the_loss_and_touches_the_map_only(models, store):
    target, _ = models
    before = {n: w.clone() for n, w in target.state_dict().items()}
    initial = fresh(store)
    steps = run(target, store, initial, steps=40, warmup_steps=0)
    assert steps[-1].loss < 0.9 * steps[0].loss
    assert all(torch.equal(before[n], w) for n, w in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters())
    assert torch.count_nonzero(initial.key_right) == 0  # the initial map is not changed either
    assert torch.equal(steps[-1].map.key_scale, initial.key_scale)


def test_the_warm_up_lowers_the_reconstruction_error(models, store):
    target, _ = models
    steps = run(target, store, fresh(store), steps=30, warmup_steps=29)
    batch = store.batch([0, 1], [30, 30], STEPS, with_target=True)
    caches = batch.source, batch.target
    assert kv_mse(steps[28].map, *caches) < kv_mse(fresh(store), *caches)
    assert [s.phase for s in steps] == ["warmup"] * 29 + ["kl"]


def test_micro_batches_give_the_whole_batchs_result(models, store):
    target, _ = models
    for warmup_steps in (0, 1):
        whole, parts = (
            run(target, store, fresh(store), steps=2, warmup_steps=warmup_steps, micro_batch=size)[-1]
            for size in (None, 1)
        )
        assert parts.loss == pytest.approx(whole.loss, rel=1e-4)
        # Adam's first steps are the gradient's sign: entries whose gradient is rounding noise are left out.
        for name in WEIGHTS:
            ours, theirs = getattr(parts.map, name), getattr(whole.map, name)
            assert float(((ours - theirs).abs() > 1e-3).float().mean()) < 0.01


def test_the_same_seed_gives_the_same_bytes(models, store):
    target, _ = models
    one, two = (run(target, store, fresh(store))[-1].map for _ in range(2))
    assert all(torch.equal(getattr(one, n), getattr(two, n)) for n in WEIGHTS)


def test_a_loss_that_is_not_finite_ends_training(models, store):
    target, _ = models
    poisoned = replace(
        fresh(store), value_right=torch.full((3, 2, 4, 16), 3e38), value_left=torch.full((3, 2, 16, 4), 3e38)
    )
    steps = run(target, store, poisoned, steps=50, warmup_steps=0)
    assert len(steps) == 1 and not math.isfinite(steps[0].loss)


def test_the_ridge_base_stays_as_it_was(models, store):
    target, _ = models
    sums = RidgeAccumulator(store.geometry)
    for n in range(6):
        sums.add(*store.pair_of_caches(n))
    ridge = sums.solve()
    assert torch.equal(ridge.key_weight, store.fit_ridge(1e-3).key_weight)
    trained = run(target, store, fresh(store, base=ridge))[-1].map
    assert torch.equal(trained.base.key_weight, ridge.key_weight)
    assert not torch.equal(trained.key_right, torch.zeros_like(trained.key_right))
