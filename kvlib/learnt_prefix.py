"""How attention reads a cached prefix through a residual map in training, so that gradients reach A and B cheaply.

Attention is linear in K and in V. A map that is affine in x is one matrix on the query and one on the output; any other
is so in [x, φ(x)], with φ its features that are not linear in x: the corrected cache is never made, and nothing of its
length has a gradient. Keys whose correction turns with the position are the exception: those are corrected.
"""

import functools
from collections.abc import Callable

import torch

from kvlib.kernels.prefix import Reader
from kvlib.maps.residual import ResidualMap, rotate
from kvlib.ragged import RaggedPrefix
from kvlib.ragged_attention import PrefixRead


def prefix_reads(
    cache_map: ResidualMap, prefix: RaggedPrefix, dtype: torch.dtype, angles=None
) -> Callable[[int], PrefixRead]:
    """A function of the layer's index: what its attention reads.

    dtype: in which to compute. angles: cos and sin (1, N, D) of the packed, roomy positions, for a map that needs them.
    """
    dim, turned = cache_map.geometry.head_dim, cache_map.needs_rotary
    rms, quadratic = cache_map.features == "rms", cache_map.residual == "quadratic"
    more = dim * (rms + quadratic)
    on_cpu = dtype == torch.float32 and prefix.device.type == "cpu"
    reader = Reader.of(prefix.dtype, dim, rms, quadratic, turned) if on_cpu else None
    (key_matrices, key_biases), (value_matrices, value_biases) = (
        (_matrices(cache_map, kind, dtype), _biases(cache_map, kind, dtype)) for kind in ("key", "value")
    )
    if turned:
        key_matrices = key_biases = [None] * prefix.layers

    def pack(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = prefix.layer(layer, dtype, roomy=True, columns=(0 if turned else more, more))
        for wide in (values,) if turned else (keys, values):
            _fill(wide, dim, rms, quadratic)
        return keys, values

    def read(layer: int) -> PrefixRead:
        packed = functools.partial(pack, layer)
        corrected = _turned(cache_map, layer, packed()[0], angles) if turned else None
        matrices = key_matrices[layer], value_matrices[layer]
        biases, stored = (key_biases[layer], value_biases[layer]), [row[layer] for row in prefix.rows]
        return PrefixRead(packed, dtype, stored, reader, *matrices, corrected, *biases)

    return read


def _fill(wide: torch.Tensor, dim: int, rms: bool, quadratic: bool) -> None:
    """wide (H, N, E): x is there; behind it x / rms(x) for RMS-normalised features, and the squares for a quadratic map."""
    x = wide[..., :dim]
    if rms:
        weight = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-12)
        x = torch.mul(x, weight, out=wide[..., dim : 2 * dim])
    if quadratic:
        torch.square(x, out=wide[..., -dim:])


def _turned(cache_map: ResidualMap, layer: int, keys: torch.Tensor, angles) -> torch.Tensor:
    """The corrected keys themselves, (H, N, D)."""
    base = keys if cache_map.base is None else cache_map.base.affine(layer)[0].forward(keys)
    right = cache_map.scale * cache_map.key_scale[layer][:, None, None] * cache_map.key_right[layer]
    return base + rotate(cache_map.latent(layer, keys[None], False, angles) @ right, *angles)[0]


def _matrices(cache_map: ResidualMap, kind: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Of each layer (H, E, D): the rows for x, for x / rms(x) and for the squares, as the map has them."""
    left, right = (getattr(cache_map, f"{kind}_{side}") for side in ("left", "right"))
    sigma, scale, rms = (
        getattr(cache_map, f"{kind}_scale")[..., None, None],
        cache_map.scale,
        cache_map.features == "rms",
    )
    dim = right.shape[-1]
    product = (left @ right).mul(scale)  # (L, H, F, D)
    linear, squares = product[..., :dim, :], product[..., dim:, :]
    base = torch.eye(dim) if cache_map.base is None else getattr(cache_map.base, f"{kind}_weight")
    base = base.to(right)
    rows = [base.expand_as(linear), linear * sigma] if rms else [base + linear]
    if cache_map.residual == "quadratic":
        rows.append(squares * sigma if rms else squares / sigma)
    return torch.cat(rows, -2).to(dtype).unbind(0)


def _biases(cache_map: ResidualMap, kind: str, dtype: torch.dtype):
    if cache_map.base is None:
        return [None] * cache_map.geometry.layers
    return getattr(cache_map.base, f"{kind}_bias").to(dtype).unbind(0)
