"""How near each path's cache, and what attention reads from it, comes to the target's own on held-out prompts."""

import pandas as pd
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlib.attention import two_segment_attention
from kvlib.cache import Geometry, PrefixCache, prefill
from kvlib.divergence import Reference
from kvlib.handoff import handoff
from kvlib.maps import CacheMap, DirectMap
from kvlib.pair import rotary_of
from kvlib.study.progress import Progress

QUALITY_STEPS = 1.5  # what one prompt costs, in training steps
COLUMNS = ["layer", "kind", "path", "r2", "cosine"]
TINY = 1e-12  # share of a square sum below which a variance is rounding


class SquareSums:
    """Sums for R² of each path's keys or values against the target's own, per layer; memory does not grow with prompts."""

    def __init__(self, geometry: Geometry, paths):
        size = (geometry.layers, geometry.heads, geometry.head_dim)
        self.sum, self.square = (torch.zeros(size, dtype=torch.float64) for _ in range(2))  # on the processor
        self.error = {path: torch.zeros(geometry.layers, dtype=torch.float64) for path in paths}
        self.count = 0

    def add(self, own: list[torch.Tensor], mapped: dict[str, list[torch.Tensor]]) -> None:
        """One batch: a tensor (B, H, T, D) per layer, of the target and of each path."""
        for layer, y in enumerate(own):
            y = y.double()
            self.sum[layer] += y.sum((0, 2)).cpu()
            self.square[layer] += y.pow(2).sum((0, 2)).cpu()
            for path, tensors in mapped.items():
                self.error[path][layer] += (y - tensors[layer].double()).pow(2).sum().cpu()
        self.count += own[0].shape[0] * own[0].shape[2]

    def r2(self, path: str) -> list[float | None]:
        """1 − Σ|y − ŷ|² / Σ|y − ȳ|² per layer, ȳ the mean of each head and dimension; None where y does not vary."""
        total = (self.square - self.sum.pow(2) / self.count).sum((1, 2))
        varies = total > TINY * self.square.sum((1, 2))
        share = self.error[path] / total
        return [1 - float(s) if ok else None for s, ok in zip(share, varies)]


@torch.no_grad()
def attention_cosines(
    target, own: PrefixCache, mapped: dict[str, PrefixCache], inputs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Per path, (L, B, S): the cosine of a layer's attention output with the native one, all heads side by side.

    Args:
        own: the target's own cache of B prompts. mapped: the caches to be read in its place. inputs: (B, S), read natively.

    At every layer the queries, and the keys and values of the forced tokens, are those of the native pass, so that a layer
    is not blamed for what went wrong below it.
    """
    cosines = {path: [] for path in mapped}
    with handoff(target, own, DirectMap()) as native:
        name = target.config._attn_implementation
        read = ALL_ATTENTION_FUNCTIONS[name]

        def watched(module, query, key, value, attention_mask, scaling=None, **kwargs):
            out, weights = read(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )  # (B, S, Q, D)
            for path, prefix in mapped.items():
                keys, values = prefix.keys[module.layer_idx], prefix.values[module.layer_idx]
                other = two_segment_attention(query, keys, values, key, value, scaling).transpose(1, 2)
                pair = (t.flatten(2).double() for t in (out, other))
                cosines[path].append(torch.cosine_similarity(*pair, dim=-1))
            return out, weights

        ALL_ATTENTION_FUNCTIONS.register(name, watched)  # the handoff takes it away again
        native.hidden(inputs)
    return {path: torch.stack(layers) for path, layers in cosines.items()}


@torch.no_grad()
def measure_quality(
    target,
    tokens: torch.Tensor,
    batches: list[tuple[PrefixCache, Reference]],
    maps: dict[str, CacheMap],
    progress: Progress,
) -> pd.DataFrame:
    """ridge.parquet: r2 of keys and of values, cosine of the attention's output, per layer and path (`COLUMNS`).

    Args:
        tokens: (N, T) the prompts, as they were cut. batches: the source's cache and native's reference, over the prompts in
            order. maps: by path.
    """
    geometry, rotary = Geometry.of(target), rotary_of(target)
    sums = {kind: SquareSums(geometry, maps) for kind in ("keys", "values")}
    total = {path: torch.zeros(geometry.layers, dtype=torch.float64) for path in maps}
    start = 0
    for source, reference in batches:
        part = tokens[start : start + source.batch].to(source.device)
        own = prefill(target, part[:, :-1])
        mapped = {path: cache_map.materialise(source, rotary) for path, cache_map in maps.items()}
        for kind, collected in sums.items():
            collected.add(getattr(own, kind), {path: getattr(cache, kind) for path, cache in mapped.items()})
        for path, found in attention_cosines(target, own, mapped, reference.inputs).items():
            total[path] += found.mean(-1).sum(-1).cpu()
        start += source.batch
        progress.advance(
            source.batch * QUALITY_STEPS, f"caches compared over prompt {start} of {len(tokens)}"
        )
    rows = [
        (layer, kind, path, r2, None)
        for kind, collected in sums.items()
        for path in maps
        for layer, r2 in enumerate(collected.r2(path))
    ]
    rows += [
        (layer, "attention", path, None, float(value) / start)
        for path in maps
        for layer, value in enumerate(total[path])
    ]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.astype({"r2": float, "cosine": float})
