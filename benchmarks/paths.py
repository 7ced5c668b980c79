"""The ways to a target's first token that are timed against each other, each with its map and mode by name.

Besides kvlib's own there is `naive`: a map written out head by head, layer by layer, into a second cache that
transformers' own attention then reads. That is what the study's figures imply.
"""

import time
from dataclasses import dataclass

import torch
from common import Clocked

from kvlib.attaching import compute_dtype
from kvlib.cache import PrefixCache, prefill
from kvlib.clocks import synchronise
from kvlib.compiled import why_not_by_itself
from kvlib.geometry import rotary_of
from kvlib.latency import FirstToken, TargetPath, first_token
from kvlib.maps import CacheMap, DirectMap

CONSUMING = ("in_place", "background")


@dataclass(frozen=True, eq=False)  # a map holds tensors, which do not compare
class Entry:
    """path: as in the records. kind: of map, None for native. mode: as asked of `handoff`, or prefill, stock, naive.

    chosen: mode and compiled say what `handoff` comes to by itself, and it is left to choose.
    """

    path: str
    kind: str | None
    mode: str
    cache_map: CacheMap | None = None
    compiled: bool = False
    chosen: bool = False

    @property
    def name(self) -> str:
        return f"{self.path} {self.kind} {self.mode}{' compiled' if self.compiled else ''}"

    @property
    def label(self) -> dict:
        """The columns that tell this entry from the others; stock attention writes a whole second cache."""
        mode = "materialised" if self.mode == "stock" else self.mode
        return {"path": self.path, "mode": mode, "compiled": self.compiled, "kind": self.kind}

    def target_path(self) -> TargetPath:
        if self.mode in ("prefill", "stock"):
            return TargetPath(self.path, self.mode)
        mode, compiled = ("auto", None) if self.chosen else (self.mode, self.compiled)
        return TargetPath(self.path, "handoff", self.cache_map, mode, compiled)


NATIVE = Entry("native", None, "prefill")
DIRECT = Entry("direct", "direct", "absorbed", DirectMap())
STOCK = Entry("direct_stock", "direct", "stock")


def kind_of(cache_map: CacheMap) -> str:
    """direct, ridge, or by its residual: linear, quadratic, rms, rope_stripped."""
    if cache_map.kind != "residual":
        return cache_map.kind
    return cache_map.features if cache_map.features != "own" else cache_map.residual


def entry(path: str, cache_map: CacheMap, mode: str, *, compiled: bool = False) -> Entry:
    return Entry(path, kind_of(cache_map), mode, cache_map, compiled)


def chosen_entry(path: str, cache_map: CacheMap, device: torch.device) -> Entry:
    """As `handoff` chooses: absorbed where the map allows it, else in place, compiled where that is done unasked."""
    if cache_map.why_not_affine is None:
        return Entry(path, kind_of(cache_map), "absorbed", cache_map, chosen=True)
    compiled = why_not_by_itself(cache_map, device) is None
    return Entry(path, kind_of(cache_map), "in_place", cache_map, compiled, chosen=True)


def standard_entries(ridge: CacheMap, learned: CacheMap, device: torch.device) -> list[Entry]:
    """The four paths and stock direct."""
    chosen = [chosen_entry(name, one, device) for name, one in (("ridge", ridge), ("learned", learned))]
    return [NATIVE, DIRECT, STOCK, *chosen]


def clocked(
    which: Entry, target, prompt: torch.Tensor, prefix: PrefixCache | None, *, every: int = 1
) -> Clocked:
    """From the resident cache on; prompt (B, T), prefix over T − 1. A copy to be used up is made off the clock."""
    if which.mode == "prefill":
        path = which.target_path()
        return Clocked(which.name, lambda: first_token(target, path, prompt, None), every=every)
    run = _from_prefix(which, target, prompt)
    if which.mode in CONSUMING:
        return Clocked(which.name, run, prefix.clone, every)
    return Clocked(which.name, lambda: run(prefix), every=every)


def clocked_cold(which: Entry, target, source, prompt: torch.Tensor) -> Clocked:
    """From the source's prefill on; its part in milliseconds is the handoff's, after the prefill's end."""
    run = _from_prefix(which, target, prompt)

    def cold():
        prefix = prefill(source, prompt[:, :-1])
        synchronise(prompt.device)
        start = time.perf_counter()
        result = run(prefix)  # ends with the token on the host
        return result, (time.perf_counter() - start) * 1e3

    return Clocked(which.name, cold)


def _from_prefix(which: Entry, target, prompt: torch.Tensor):
    """A function of the prefix that gives the `FirstToken`."""
    if which.mode != "naive":
        path = which.target_path()
        return lambda prefix: first_token(target, path, prompt, prefix)
    naive, stock = NaiveMap(which.cache_map, target), TargetPath(which.path, "stock")

    def run(prefix: PrefixCache) -> FirstToken:
        return first_token(target, stock, prompt, naive.write_out(prefix))

    return run


class NaiveMap:
    """A map as one small map per layer and head, in the dtype in which attention would apply it."""

    def __init__(self, cache_map: CacheMap, target):
        device = next(target.parameters()).device
        cache_map = cache_map.to(device, compute_dtype(target))
        self.rotary = rotary_of(target) if cache_map.needs_rotary else None
        shape = cache_map.geometry
        self.maps = [
            [self._one(cache_map, layer, head) for head in range(shape.heads)]
            for layer in range(shape.layers)
        ]

    @staticmethod
    def _one(cache_map: CacheMap, layer: int, head: int) -> CacheMap:
        """Every tensor of a map begins with (L, H)."""
        own = {
            name: t[layer : layer + 1, head : head + 1].contiguous()
            for name, t in cache_map.tensors().items()
        }
        return type(cache_map).restore(cache_map.settings(), own)

    @torch.no_grad()
    def write_out(self, prefix: PrefixCache) -> PrefixCache:
        """A second cache, written head by head."""
        cos_sin = (None, None) if self.rotary is None else self.rotary(prefix.positions)
        keys = [torch.empty_like(k) for k in prefix.keys]
        values = [torch.empty_like(v) for v in prefix.values]
        for layer, heads in enumerate(self.maps):
            for head, one in enumerate(heads):
                part = slice(head, head + 1)
                new_k, new_v = one.correct(
                    0, prefix.keys[layer][:, part], prefix.values[layer][:, part], cos_sin
                )
                keys[layer][:, part], values[layer][:, part] = new_k, new_v
        return PrefixCache(keys, values, prefix.valid)
