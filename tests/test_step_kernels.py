"""A training step's loops in C: against float64, through every kind of map, and a step with them against one without."""

from dataclasses import replace

import pytest
import torch
from test_maps import random_residual
from tiny import tiny_llama, tokens

import kvlib.training as training
from kvlib import KvlibError
from kvlib.cache import Geometry
from kvlib.kernels.kl import c_kl
from kvlib.kernels.prefix import BLOCK, Reader
from kvlib.maps.residual import WEIGHTS
from kvlib.pair import rotary_of
from kvlib.ragged import parts
from kvlib.study.progress import Progress
from kvlib.study.store import WindowStore
from kvlib.training import Frozen, forced_kl, kl_and_gradient

LENGTHS = [1, BLOCK - 1, BLOCK, 2 * BLOCK + 5]
KINDS = [(rms, squares) for rms in (False, True) for squares in (False, True)]


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def features(x, rms, squares):
    found = [x]
    if rms:
        found.append(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12))
    return torch.cat([*found, found[-1].square()] if squares else found, -1)


def by_hand(q, column, rows, wide, keys=None):
    """Of `Reader.read`, under autograd: what is read and the column's share."""
    out, share = [], []
    for n, row in enumerate(rows):
        of_keys, of_values = wide(row[0]) if keys is None else keys[n], wide(row[1])
        p = torch.cat([q[n] @ of_keys.mT, column[n]], -1).softmax(-1)
        out.append(p[..., :-1] @ of_values)
        share.append(p[..., -1:])
    return torch.stack(out), torch.stack(share)


def largest_error(ours, theirs) -> float:
    """Of any tensor, relative to its largest entry."""
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in zip(ours, theirs))


# 2e-5: float32 sums of at most a few hundred terms. A wrong term is off by far more.
@pytest.mark.usefixtures("compiled_code")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize(("rms", "squares"), KINDS)
def test_what_is_read_and_its_gradients_are_attentions_in_float64(rms, squares, dim, stored):
    rows = [draw(2, 3, length + 2, dim).to(stored)[:, :, :length] for length in LENGTHS]
    reader = Reader.of(stored, dim, rms, squares, False)
    q, column = 0.3 * draw(len(rows), 3, 48, reader.columns[0]), draw(len(rows), 3, 48, 1)
    assert reader.suits(q, rows)
    out, share, kept = reader.read(q, column, rows)
    d_out, d_share = draw(*out.shape), draw(*share.shape)
    found = reader.read_back(d_out, d_share, q, share, kept, rows)
    exact = [t.double().requires_grad_(True) for t in (q, column)]
    wanted = by_hand(*exact, [row.double() for row in rows], lambda x: features(x, rms, squares))
    gradients = torch.autograd.grad(wanted, exact, (d_out.double(), d_share.double()))
    assert largest_error([out, share, *found], [*wanted, *gradients]) < 2e-5


@pytest.mark.usefixtures("compiled_code")
@pytest.mark.parametrize("threads", [1, 2])
def test_corrected_keys_are_read_in_the_place_of_the_stored_ones_and_get_their_gradient(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, room = [draw(2, 3, length, 16) for length in LENGTHS], [length + 3 for length in LENGTHS]
        own = parts(room)
        keys, starts = draw(3, sum(room), 16), [part.start for part in own]
        q, column = draw(len(rows), 3, 16, 16), draw(len(rows), 3, 16, 1)
        reader = Reader.of(torch.float32, 16, False, False, True)
        out, share, kept = reader.read(q, column, rows, (keys, starts))
        d_out, d_share, d_keys = draw(*out.shape), draw(*share.shape), torch.zeros_like(keys)
        found = reader.read_back(d_out, d_share, q, share, kept, rows, (keys, starts), d_keys)
    finally:
        torch.set_num_threads(before)
    exact = [t.double().requires_grad_(True) for t in (q, column, keys)]
    cut = [exact[2][:, part.start : part.start + length] for part, length in zip(own, LENGTHS)]
    wanted = by_hand(*exact[:2], [row.double() for row in rows], lambda x: x, cut)
    gradients = torch.autograd.grad(wanted, exact, (d_out.double(), d_share.double()))
    assert largest_error([out, share, *found, d_keys], [*wanted, *gradients]) < 2e-5


@pytest.mark.usefixtures("compiled_code")
def test_a_cache_that_is_not_finite_is_seen_in_what_is_read():
    rows, reader = [draw(2, 1, 20, 16)], Reader.of(torch.float32, 16, False, False, False)
    rows[0][0, 0, 7, 3] = float("nan")
    out, _, _ = reader.read(draw(1, 1, 16, 16), draw(1, 1, 16, 1), rows)
    assert bool(out.isnan().all())


def test_kinds_that_are_not_compiled_are_left_to_torch():
    assert Reader.of(torch.float16, 64, False, False, False) is None
    assert Reader.of(torch.bfloat16, 20, False, False, False) is None


def exact_kl(path, native):
    log_p, log_q = native.double().log_softmax(-1), path.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1), (log_q.exp() - log_p.exp()) / len(path)


# 1e-5: of logits of about 20 float32 knows the seventh digit; what is smaller than the largest exponential by e⁻⁸⁷ counts as that
@pytest.mark.parametrize("vocabulary", [7, 101, 4099])
@pytest.mark.parametrize("compiled", [True, False])
def test_kl_and_its_gradient_are_those_of_float64(monkeypatch, request, vocabulary, compiled):
    if compiled:
        request.getfixturevalue("compiled_code")
    else:
        monkeypatch.setattr(training, "c_kl", lambda: None)
    native = 6 * draw(5, vocabulary)
    path = native + 0.3 * draw(5, vocabulary + 1)[:, :-1]
    wanted, gradient = exact_kl(path, native)
    kl = kl_and_gradient(path, native)
    assert float((kl - wanted).abs().max()) < 1e-5 and float(wanted.mean()) > 1e-3
    assert largest_error([path], [gradient]) < 1e-5


@pytest.mark.usefixtures("compiled_code")
def test_logits_that_are_not_finite_give_a_kl_that_is_not_finite():
    for at in (0, 100):
        path, native = draw(3, 101), draw(3, 101)
        path[1, at] = float("nan")
        found = c_kl()(path, native)
        assert found.isnan().tolist() == [False, True, False]


@pytest.mark.usefixtures("compiled_code")
def test_logits_in_another_dtype_or_shape_are_refused():
    for path, native in (
        (draw(2, 8), draw(2, 9)),
        (draw(2, 8).double(), draw(2, 8)),
        (draw(8, 2).T, draw(2, 8)),
    ):
        with pytest.raises(KvlibError, match="contiguous"):
            c_kl()(path, native)


STEPS, CUTS = 16, [9, 17, 90]  # 3 queries to a KV head times 16 steps: whole vectors


def loss_and_gradients(frozen, cache_map, batch):
    own = replace(cache_map, **{n: getattr(cache_map, n).clone().requires_grad_(True) for n in WEIGHTS})
    loss = forced_kl(frozen, own, batch, rotary_of(frozen.target) if own.needs_rotary else None)
    loss.backward()
    return float(loss.detach()), [getattr(own, n).grad for n in WEIGHTS]


@pytest.mark.usefixtures("compiled_code")
@pytest.mark.parametrize("residual", ["linear", "quadratic"])
@pytest.mark.parametrize("feature", ["own", "rms", "rope_stripped"])
def test_a_step_with_them_is_the_step_without(tmp_path, monkeypatch, residual, feature):
    target, source = (tiny_llama(seed) for seed in (0, 1))
    store = WindowStore(
        tmp_path, tokens(3, 110), Geometry.of(target), target.config.hidden_size, torch.bfloat16
    )
    store.fill(source, target, Progress("test", 3), 1)
    batch = store.batch([0, 1, 2], CUTS, STEPS, with_target=False)
    frozen = Frozen.of(target, target.lm_head.weight.detach(), batch.inputs.numel())
    cache_map, called = random_residual(residual, feature), []
    read = Reader.read
    monkeypatch.setattr(Reader, "read", lambda *given: called.append(1) or read(*given))
    loss, ours = loss_and_gradients(frozen, cache_map, batch)
    assert len(called) == target.config.num_hidden_layers
    monkeypatch.setattr(Reader, "of", classmethod(lambda *_: None))
    monkeypatch.setattr(training, "c_kl", lambda: None)
    wanted, theirs = loss_and_gradients(frozen, cache_map, batch)
    assert len(called) == target.config.num_hidden_layers
    assert loss == pytest.approx(wanted, rel=1e-4) and largest_error(ours, theirs) < 1e-3
