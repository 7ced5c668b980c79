"""What the frozen correction is made of: its singular values, and its size beside the cache that it corrects."""

import pandas as pd
import torch

from kvlib.cache import PrefixCache
from kvlib.maps import ResidualMap
from kvlib.pair import rotary_of

KINDS = ("keys", "values")


def singular_values(cache_map: ResidualMap) -> pd.DataFrame:
    """Of s A B, per layer, KV head and kind: layer, head, kind, index (0 … r − 1, largest first), value.

    A linear map of own-head features has the correction s A B from x / σ to (x' − b(x)) / σ; RoPE-stripped features are
    those turned back by a rotation. Quadratic and RMS-normalised features have F rows in A that are no longer x / σ, and the
    values are those of s A B as it stands.
    """
    rows = []
    for kind, left, right in (
        ("keys", cache_map.key_left, cache_map.key_right),
        ("values", cache_map.value_left, cache_map.value_right),
    ):
        # With A = Q R and Bᵀ = Q' R', A B has the singular values of R R'ᵀ, an r × r matrix.
        inner = torch.linalg.qr(left.double())[1] @ torch.linalg.qr(right.double().mT)[1].mT  # (L, H, r, r)
        values = torch.linalg.svdvals(inner * abs(cache_map.scale))  # (L, H, r)
        layers, heads, rank = values.shape
        for layer in range(layers):
            for head in range(heads):
                for index in range(rank):
                    rows.append((layer, head, kind, index, float(values[layer, head, index])))
    return pd.DataFrame(rows, columns=["layer", "head", "kind", "index", "value"])


@torch.no_grad()
def sizes(cache_map: ResidualMap, prefixes: list[PrefixCache], target) -> pd.DataFrame:
    """layer, kind, cache_rms, correction_rms (of x' − b(x)) and ratio, over every vector of the source caches `prefixes`."""
    layers = cache_map.geometry.layers
    cache, correction = (torch.zeros(2, layers, dtype=torch.float64) for _ in range(2))
    rotary, count = rotary_of(target) if cache_map.needs_rotary else None, 0
    for prefix in prefixes:
        angles = rotary(prefix.positions) if rotary else None
        count += prefix.keys[0].numel()
        for layer in range(layers):
            x = (
                prefix.keys[layer].to(cache_map.key_left.dtype),
                prefix.values[layer].to(cache_map.key_left.dtype),
            )
            base = x if cache_map.base is None else cache_map.base.correct(layer, *x)
            for kind, new in enumerate(cache_map.correct(layer, *x, angles)):
                cache[kind, layer] += x[kind].double().pow(2).sum().cpu()
                correction[kind, layer] += (new.double() - base[kind].double()).pow(2).sum().cpu()
    cache, correction = (cache / count).sqrt(), (correction / count).sqrt()
    rows = [
        (layer, name, float(cache[kind, layer]), float(correction[kind, layer]))
        for kind, name in enumerate(KINDS)
        for layer in range(layers)
    ]
    table = pd.DataFrame(rows, columns=["layer", "kind", "cache_rms", "correction_rms"])
    return table.assign(ratio=table["correction_rms"] / table["cache_rms"].where(table["cache_rms"] > 0))
