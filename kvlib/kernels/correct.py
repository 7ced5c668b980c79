"""Residual maps in place by `correct.c`: one pass over a layer's keys and values, its ranks side by side in a vector.

Torch's compiler writes one horizontal sum per position and rank, which costs more than reading the cache does.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from kvlib.cache import PrefixCache
from kvlib.errors import KvlibError
from kvlib.kernels.compiler import library
from kvlib.maps.residual import ResidualMap, angle_norm

SOURCE = Path(__file__).with_name("correct.c")
# As in the source: ranks side by side, the room that they have, and what each takes at a time.
GROUP, GROUP_BYTES, STEP_BYTES = 8, 64, 8
REAL = {torch.float32: "float", torch.float64: "double"}
STORED = {torch.bfloat16: 1, torch.float16: 2}  # any other cache holds what is computed in


class Half(ctypes.Structure):
    """`struct half` of the source: keys or values of a layer, and what is added to them."""

    _fields_ = (
        [("x", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("batch", "head", "position", "element")]
        + [(name, ctypes.c_void_p) for name in ("rows", "squares", "right")]
    )


class Layer(ctypes.Structure):
    """`struct layer` of the source."""

    _fields_ = (
        [("keys", Half), ("values", Half)]
        + [(name, ctypes.c_int64) for name in ("batches", "heads", "positions", "threads")]
        + [("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("angles", ctypes.c_int64)]
    )


def c_correction(cache_map: ResidualMap, prefix: PrefixCache, angles, *, keys_only: bool = False) -> Callable:
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
    turn = cache_map.features == "rope_stripped"
    if turn and dim % 2:
        raise KvlibError(f"heads of {dim} numbers given, expected an even count to turn: leave compiled out")
    defines = {
        "DIM": dim,
        "RANK": -(-cache_map.rank // GROUP) * GROUP,
        "REAL": REAL[real],
        "STORED": STORED.get(dtype, 0),
        "RMS": int(cache_map.features == "rms"),
        "SQUARES": int(cache_map.residual == "quadratic"),
        "TURN": int(turn),
    }
    correct = library(SOURCE, defines).correct
    correct.restype, correct.argtypes = None, [ctypes.POINTER(Layer)]
    weights = [_packed(*cache_map.low_rank(slice(None), False), angles)]
    if not keys_only:
        weights.append(_packed(*cache_map.low_rank(slice(None), True)))
    cos, sin = (t.to(real).contiguous() if turn else None for t in angles)
    layers, heads = cache_map.key_scale.shape

    def correct_(layer: int, keys: torch.Tensor, values: torch.Tensor, _angles=None) -> None:
        batches, _, positions, _ = keys.shape
        # C reads and writes where it is told to: what it is told must be so
        fits = keys.shape == values.shape and keys.shape[1::2] == (heads, dim) and 0 <= layer < layers
        fits = (
            fits
            and keys.dtype == values.dtype == dtype
            and keys.device == values.device == cache_map.key_left.device
        )
        if not fits or (turn and (batches != cos.shape[0] or positions > cos.shape[1])):
            raise KvlibError(
                f"keys {tuple(keys.shape)} {keys.dtype} and values {tuple(values.shape)} {values.dtype} of layer {layer} given to a "
                f"correction that was compiled for {heads} heads of {dim} in {dtype}: begin a handoff of this very cache"
            )
        halves = [
            Half(x.data_ptr(), *x.stride(), *(None if w is None else w[layer].data_ptr() for w in one))
            for x, one in zip((keys, values), weights)
        ]
        halves += [Half()] * (2 - len(halves))
        turned = (cos.data_ptr(), sin.data_ptr(), cos.stride(0)) if turn else (None, None, 0)
        correct(Layer(*halves, batches, heads, positions, torch.get_num_threads(), *turned))

    return correct_


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
