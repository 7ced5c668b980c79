"""Residual maps in place by `correct.c`: one pass over a layer's keys and values, its ranks side by side in a vector.

Torch's compiler writes one horizontal sum per position and rank, which costs more than reading the cache does. Where one
token reads the layer next, `attend.c` corrects what it reads, a few positions at a time: the cache comes from memory once.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from kvlib.cache import PrefixCache
from kvlib.errors import KvlibError
from kvlib.kernels.compiler import library
from kvlib.kernels.residual import Half, Residual
from kvlib.maps.residual import ResidualMap, angle_norm

SOURCE = Path(__file__).with_name("correct.c")
# As in the source: ranks side by side, the room that they have, and what each takes at a time.
GROUP, GROUP_BYTES, STEP_BYTES = 8, 64, 8
REAL = {torch.float32: "float", torch.float64: "double"}
STORED = {torch.bfloat16: 1, torch.float16: 2}  # any other cache holds what is computed in


class Layer(ctypes.Structure):
    """`struct layer` of the source."""

    _fields_ = [("residual", Residual)] + [
        (name, ctypes.c_int64) for name in ("batches", "heads", "positions", "threads")
    ]


def c_correction(
    cache_map: ResidualMap, prefix: PrefixCache, angles, *, keys_only: bool = False
) -> "Correction":
    """`CacheMap.correct_` of this map for this cache, on a processor; `angles` as from `CacheMap.angles`.

    keys_only: leave the values as they are, for attention to absorb their part.

    It computes in the dtype of the map's weights, which are float32 or float64; the cache is in that, or in half
    precision and rounded once.

    Raises: KvlibError where there is no C compiler, or it refuses.
    """
    real, dtype, dim = cache_map.key_left.dtype, prefix.dtype, cache_map.geometry.head_dim
    if real not in REAL or dtype not in (real, *STORED):
        raise KvlibError(
            f"a map in {real} for a cache in {dtype} given, expected float32 or float64 for a cache in the same or in half "
            "precision: convert one of them"
        )
    if cache_map.features == "rope_stripped" and dim % 2:
        raise KvlibError(f"heads of {dim} numbers given, expected an even count to turn: leave compiled out")
    return Correction(cache_map, dtype, angles, keys_only)


class Correction:
    """What `c_correction` makes: call it with a layer's number, keys and values (B, H, T, D), which are corrected where they lie.

    macros: what a source that includes `residual.h` is compiled with.
    """

    def __init__(self, cache_map: ResidualMap, dtype: torch.dtype, angles, keys_only: bool):
        self.dtype, self.device = dtype, cache_map.key_left.device
        self.real, self.dim = cache_map.key_left.dtype, cache_map.geometry.head_dim
        self.layers, self.heads = cache_map.key_scale.shape
        turn = cache_map.features == "rope_stripped"
        self.macros = {
            "DIM": self.dim,
            "RANK": -(-cache_map.rank // GROUP) * GROUP,
            "REAL": REAL[self.real],
            "STORED": STORED.get(dtype, 0),
            "RMS": int(cache_map.features == "rms"),
            "SQUARES": int(cache_map.residual == "quadratic"),
            "TURN": int(turn),
        }
        self._correct = library(SOURCE, self.macros).correct
        self._correct.restype, self._correct.argtypes = None, [ctypes.POINTER(Layer)]
        self._weights = [_packed(*cache_map.low_rank(slice(None), False), angles)]
        if not keys_only:
            self._weights.append(_packed(*cache_map.low_rank(slice(None), True)))
        self._angles = tuple(t.to(self.real).contiguous() for t in angles) if turn else None

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor, _angles=None) -> None:
        batches, _, positions, _ = keys.shape
        residual = self.residual(layer, keys, values)
        self._correct(Layer(residual, batches, self.heads, positions, torch.get_num_threads()))

    def at(self, layer: int) -> "LayerCorrection":
        """The correction of one layer, to be called, or taken along by the attention that reads the layer."""
        return LayerCorrection(self, layer)

    def residual(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Residual:
        """What C is told of one layer. Raises: KvlibError for another cache than this was made for."""
        batches, _, positions, _ = keys.shape
        # C reads and writes where it is told to: what it is told must be so
        fits = keys.shape == values.shape and keys.shape[1::2] == (self.heads, self.dim)
        fits = fits and 0 <= layer < self.layers
        fits = fits and keys.dtype == values.dtype == self.dtype
        fits = fits and keys.device == values.device == self.device
        if self._angles is not None:
            cos = self._angles[0]
            fits = fits and batches == cos.shape[0] and positions <= cos.shape[1]
        if not fits:
            raise KvlibError(
                f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} of layer {layer} given to a "
                f"correction that was compiled for {self.heads} heads of {self.dim} in {self.dtype}: begin a handoff of this very cache"
            )
        halves = [
            Half(x.data_ptr(), *x.stride(), *(None if w is None else w[layer].data_ptr() for w in one))
            for x, one in zip((keys, values), self._weights)
        ]
        halves += [Half()] * (2 - len(halves))
        if self._angles is None:
            return Residual(*halves)
        return Residual(*halves, *(t.data_ptr() for t in self._angles), self._angles[0].stride(0))


@dataclass(frozen=True)
class LayerCorrection:
    """`Correction` of one layer."""

    whole: Correction
    layer: int

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.whole(self.layer, keys, values)

    def residual(self, keys: torch.Tensor, values: torch.Tensor) -> Residual:
        return self.whole.residual(self.layer, keys, values)


def _packed(rows, squares, right, angles=(None, None)):
    """`ResidualMap.low_rank` of all layers as the source wants it: (rows, squares or None, right), padded with zeros.

    rows, squares (L, H, r, D) -> (L, H, r / 8, steps, 8, step). right (L, H, r, D) -> (L, H, r, D), both in multiples.
    """
    step, lanes = STEP_BYTES // right.element_size(), GROUP_BYTES // right.element_size()
    norm = 1.0 if angles[0] is None else angle_norm(angles).to(right.dtype)

    def in_groups(w):
        w = _in_multiples(w, GROUP, step)
        return w.unflatten(-1, (-1, step)).unflatten(2, (-1, GROUP)).transpose(3, 4).contiguous()

    # turned back by an angle whose cos² + sin² is not 1, a key is that much too long
    squares = None if squares is None else in_groups(squares / norm**2)
    return in_groups(rows / norm), squares, _in_multiples(right, GROUP, lanes).contiguous()


def _in_multiples(w: torch.Tensor, of_ranks: int, of_dims: int) -> torch.Tensor:
    """(…, r, D) with zeros after it up to multiples."""
    return F.pad(w, (0, -w.shape[-1] % of_dims, 0, -w.shape[-2] % of_ranks))
