"""A warm-up step's loss and the gradients of a map's four weights by `warmup.c`, straight from the stored caches."""

import ctypes
from pathlib import Path

import torch

from kvlib.kernels.compiler import library_or_none
from kvlib.maps.residual import ResidualMap
from kvlib.ragged import RaggedPrefix

SOURCE = Path(__file__).with_name("warmup.c")
STORED = {torch.float32: 0, torch.bfloat16: 1}
LANES = 16  # as in the source, or a multiple: floats of a vector


class _Prompt(ctypes.Structure):
    """`struct prompt` of the source."""

    STEPS = ("layer", "kind", "head", "position")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y")),
        *((name, ctypes.c_int64 * 2) for name in STEPS),
        ("length", ctypes.c_int64),
    ]


class _Weights(ctypes.Structure):
    """`struct weights` of the source."""

    NAMES = ("left", "right", "sigma", "ridge", "bias", "d_left", "d_right")
    _fields_ = [(name, ctypes.c_void_p) for name in NAMES]


class _Call(ctypes.Structure):
    """`struct call` of the source."""

    _fields_ = [
        ("prompts", ctypes.c_void_p),
        ("weights", _Weights * 2),
        *((name, ctypes.c_void_p) for name in ("scratch", "losses")),
        *((name, ctypes.c_int64) for name in ("batch", "layers", "heads", "threads")),
        ("scale", ctypes.c_double),
    ]


def c_kv_mse(
    cache_map: ResidualMap, source: RaggedPrefix, target: RaggedPrefix
) -> tuple[float, list[torch.Tensor]] | None:
    """(the loss of `kvlib.warmup.kv_mse`, its gradients in the map's four weights, in the order of `WEIGHTS`).

    None where torch has to do it: keys whose correction turns with the position, a dtype or dimension that is not
    compiled, another device, no compiler.
    """
    if not _fits(cache_map, source, target):
        return None
    layers, heads, dim = cache_map.geometry.layers, cache_map.geometry.heads, cache_map.geometry.head_dim
    macros = {
        "DIM": dim, "RANK": cache_map.rank, "STORED": STORED[source.dtype], "RMS": int(cache_map.features == "rms"),
        "SQUARES": int(cache_map.residual == "quadratic"), "RIDGE": int(cache_map.base is not None),
    }  # fmt: skip
    code = library_or_none(SOURCE, macros)
    if code is None:
        return None
    code.kv_mse.restype, code.scratch_floats.restype = ctypes.c_double, ctypes.c_int64
    threads, held = torch.get_num_threads(), [_tensors(cache_map, kind) for kind in ("key", "value")]
    scratch = torch.empty(threads, code.scratch_floats())
    losses = torch.empty(layers * 2 * heads, dtype=torch.float64)
    prompts = (_Prompt * source.batch)(*map(_prompt, source.rows, target.rows))
    weights = (_Weights * 2)(
        *(_Weights(**{name: t.data_ptr() for name, t in tensors.items()}) for tensors in held)
    )
    call = _Call(
        prompts=ctypes.cast(prompts, ctypes.c_void_p), weights=weights, scratch=scratch.data_ptr(),
        losses=losses.data_ptr(), batch=source.batch, layers=layers, heads=heads, threads=threads, scale=cache_map.scale,
    )  # fmt: skip
    loss = code.kv_mse(ctypes.byref(call))
    return loss, [tensors[name] for tensors in held for name in ("d_left", "d_right")]


def _fits(cache_map: ResidualMap, source: RaggedPrefix, target: RaggedPrefix) -> bool:
    """C reads where it is told to: what it is told must be so."""
    shape, rows = cache_map.geometry, [*source.rows, *target.rows]
    wanted = (shape.layers, 2, shape.heads, shape.head_dim)
    return (
        not cache_map.needs_rotary
        and shape.head_dim % LANES == 0
        and source.dtype in STORED
        and source.lengths == target.lengths
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in cache_map.tensors().values())
        and all(row.dtype == source.dtype and row.device.type == "cpu" for row in rows)
        and all((*row.shape[:3], row.shape[4]) == wanted and row.stride(4) == 1 for row in rows)
    )


def _tensors(cache_map: ResidualMap, kind: str) -> dict[str, torch.Tensor]:
    """What `struct weights` points to, of keys or of values."""
    left, right, sigma = (
        getattr(cache_map, f"{kind}_{name}").contiguous() for name in ("left", "right", "scale")
    )
    found = {"left": left, "right": right, "sigma": sigma}
    if cache_map.base is not None:
        found["ridge"], found["bias"] = (
            getattr(cache_map.base, f"{kind}_{name}").contiguous() for name in ("weight", "bias")
        )
    return found | {"d_left": torch.empty_like(left), "d_right": torch.empty_like(right)}


def _prompt(x: torch.Tensor, y: torch.Tensor) -> _Prompt:
    """Of one prompt the source's and the target's cache, each (L, 2, H, T, D)."""
    steps = {name: tuple(t.stride(axis) for t in (x, y)) for axis, name in enumerate(_Prompt.STEPS)}
    return _Prompt(x=x.data_ptr(), y=y.data_ptr(), length=x.shape[3], **steps)
