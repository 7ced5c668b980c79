"""How attention reads a cached prefix through a residual map in training, so that gradients reach A and B cheaply.

Attention is linear in K and in V. A map that is affine is one matrix on the query and one on the output. Of any other,
x' = [x z] [W; s σ B] with z = f(x) A, r columns wide: the corrected cache is never made, and the gradients of what has
its length are r wide instead of D.
"""

from collections.abc import Callable

import torch

from kvlib.maps.residual import ResidualMap, rotate
from kvlib.ragged import RaggedPrefix
from kvlib.ragged_attention import PrefixRead


def prefix_reads(
    cache_map: ResidualMap, prefix: RaggedPrefix, dtype: torch.dtype, angles=None
) -> Callable[[int], PrefixRead]:
    """A function of the layer's index: what its attention reads.

    dtype: in which to compute. angles: cos and sin (1, N, D) of the packed, roomy positions, for a map that needs them.
    """
    lengths, affine, rank = prefix.lengths, not cache_map.why_not_affine, cache_map.rank
    matrices = {kind: _matrices(cache_map, kind, dtype) for kind in ("key", "value")}
    biases = {kind: _biases(cache_map, kind, dtype) for kind in ("key", "value")}
    if cache_map.needs_rotary:  # a correction that turns with the position is no product of z with one matrix
        matrices["key"] = biases["key"] = [None] * prefix.layers
    columns = (0 if affine or cache_map.needs_rotary else rank, 0 if affine else rank)
    dim = cache_map.geometry.head_dim

    def read(layer: int) -> PrefixRead:
        keys, values = prefix.layer(layer, dtype, roomy=True, columns=columns)
        key_latent = value_latent = None
        if not affine:
            x, y = keys[None, ..., :dim], values[None, ..., :dim]
            make = _turned if cache_map.needs_rotary else _latent
            key_latent, value_latent = make(cache_map, layer, x, angles), cache_map.latent(layer, y, True)[0]
        return PrefixRead(
            keys, values, lengths, matrices["key"][layer], matrices["value"][layer], key_latent, value_latent,
            biases["key"][layer], biases["value"][layer],
        )  # fmt: skip

    return read


def _latent(cache_map: ResidualMap, layer: int, keys: torch.Tensor, angles) -> torch.Tensor:
    return cache_map.latent(layer, keys, False)[0]


def _turned(cache_map: ResidualMap, layer: int, keys: torch.Tensor, angles) -> torch.Tensor:
    """The corrected keys themselves, (H, N, D)."""
    base = keys if cache_map.base is None else cache_map.base.affine(layer)[0].forward(keys)
    right = cache_map.scale * cache_map.key_scale[layer][:, None, None] * cache_map.key_right[layer]
    return (base + rotate(cache_map.latent(layer, keys, False, angles) @ right, *angles))[0]


def _matrices(cache_map: ResidualMap, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of each layer W + s A B (H, D, D), or [W; s σ B] (H, D + r, D): W the base's, I for direct."""
    left, right = (getattr(cache_map, f"{kind}_{side}") for side in ("left", "right"))
    if cache_map.base is None:
        base = torch.eye(right.shape[-1]).to(right).expand(*right.shape[:2], -1, -1)
    else:
        base = getattr(cache_map.base, f"{kind}_weight").to(right.dtype)
    if cache_map.why_not_affine:
        sigma = getattr(cache_map, f"{kind}_scale")[..., None, None]
        whole = torch.cat([base, right * (cache_map.scale * sigma)], -2)
    else:
        whole = base + (left @ right).mul(cache_map.scale)
    return whole.to(dtype).unbind(0)


def _biases(cache_map: ResidualMap, kind: str, dtype: torch.dtype):
    if cache_map.base is None:
        return [None] * cache_map.geometry.layers
    return getattr(cache_map.base, f"{kind}_bias").to(dtype).unbind(0)
