"""What a step holds in tensors at its peak, counted byte by byte: a map that is absorbed, or corrects as it is read, adds a vector or two."""

import weakref

import pytest
import torch
from test_maps import fitted_ridge, random_residual
from tiny import tiny_llama, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from kvlib import DirectMap, handoff, prefill

pytestmark = pytest.mark.usefixtures("compiled_code")
LENGTH = 500
FEW = 1024  # bytes: a query, an output, a score of each of a layer's heads; its cache holds a hundred times as many


class Live(TorchDispatchMode):
    """`peak`: the most bytes that tensors made within held at a time, those known before left out."""

    def __init__(self, known):
        super().__init__()
        self.known, self.held, self.now, self.peak = {self._of(t) for t in known}, {}, 0, 0

    @staticmethod
    def _of(tensor) -> int:
        return tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and self._of(tensor) not in self.known | self.held.keys():
                self.held[self._of(tensor)] = size = tensor.untyped_storage().nbytes()
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor, self._drop, self._of(tensor))
        return out

    def _drop(self, storage: int) -> None:
        self.now -= self.held.pop(storage, 0)


def peak(cache_map, mode="auto", **options) -> int:
    model, ids = tiny_llama(), tokens(1, LENGTH)
    prefix = prefill(model, ids[:, :-1])
    for _ in range(2):  # what is made once per process is made in the first
        handed = prefix.clone()
        live = Live([*model.parameters(), *handed.keys, *handed.values, ids, *cache_map.tensors().values()])
        with torch.no_grad(), handoff(model, handed, cache_map, mode, check=False, **options) as active, live:
            active.logits(ids[:, -1:], last=True)
    return live.peak


@pytest.fixture(scope="module")
def direct() -> int:
    return peak(DirectMap())


@pytest.mark.parametrize("cache_map", [fitted_ridge(), random_residual()], ids=["ridge", "learned"])
def test_a_map_that_is_absorbed_holds_what_direct_reuse_holds(cache_map, direct):
    assert 0 <= peak(cache_map) - direct <= FEW


@pytest.mark.parametrize(("residual", "features"), [("quadratic", "own"), ("linear", "rms")])
def test_a_cache_that_is_corrected_as_it_is_read_needs_no_room(residual, features, direct):
    assert 0 <= peak(random_residual(residual, features), compiled=True) - direct <= FEW


def test_a_cache_that_is_written_out_shows(direct):
    model = tiny_llama()
    cache_bytes = prefill(model, tokens(1, LENGTH)[:, :-1]).bytes
    prefix, live = prefill(model, tokens(1, LENGTH)[:, :-1]), Live([])
    with torch.no_grad(), live, handoff(model, prefix, random_residual(), "materialised", check=False):
        pass
    assert live.peak >= cache_bytes > 100 * FEW and cache_bytes > 4 * direct
