"""One new token's attention by `attend.c`: one pass over the cached keys and values, whole softmax included.

Step by step torch reads the keys, writes scores, reads them for the softmax and reads the values, and on a processor its
products of a few rows are far from what the memory gives. Every path that goes through a handoff attends by the same code,
and a map that attention absorbs as one matrix for keys and one for values is applied in the same pass. So is a correction
of the prefix (`kvlib.kernels.correct`): what is read is corrected and written on the way, and comes from memory once.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvlib.errors import KvlibError
from kvlib.kernels.compiler import library_or_none
from kvlib.kernels.residual import Residual

if TYPE_CHECKING:  # it knows maps, which know attention
    from kvlib.kernels.correct import Correction, LayerCorrection

SOURCE = Path(__file__).with_name("attend.c")
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BLOCK = 256  # positions, as in the source
MAX_ROWS, MAX_DIM = 16, 256  # above, what a block sums up does not stay in the registers


MAPS = ("key_dense", "key_bias", "value_dense", "value_bias")


class Segment(ctypes.Structure):
    """`struct segment` of the source."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values")] + [
        (f"{of}_{axis}", ctypes.c_int64) for of in ("key", "value") for axis in ("batch", "head", "position")
    ] + [("positions", ctypes.c_int64)]  # fmt: skip

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> "Segment":
        return cls(
            keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3], keys.shape[2]
        )


class Step(ctypes.Structure):
    """`struct step` of the source."""

    _fields_ = (
        [(name, Segment) for name in ("prefix", "new")]
        + [(name, ctypes.c_void_p) for name in ("read", "query", "bias", *MAPS)]
        + [(name, ctypes.c_void_p) for name in ("valid", "out", "out_new", "share", "scratch")]
        + [(name, ctypes.c_int64) for name in ("batches", "heads", "threads")]
    )  # fmt: skip


class CorrectingStep(Step):
    """`struct step` of the source where it corrects the prefix."""

    _fields_ = [("residual", Residual)]


def kernel(
    q: torch.Tensor, *cached: torch.Tensor, correction: "LayerCorrection | None" = None
) -> Callable | None:
    """The compiled step for q (B, Q, 1, D) and the keys and values of both segments, each (B, H, ·, D); None where it is not
    to be had: another device or dtype, a gradient that is asked for, no compiler.

    correction: what the step does to the prefix as it reads it, for good; None: nothing.

    The first one for a shape is compiled then, in about a second, and kept for later processes.
    """
    keys, rows, dim = cached[0], q.shape[1] // cached[0].shape[1], q.shape[3]
    if q.device.type != "cpu" or q.shape[2] != 1 or q.dtype not in STORED or keys.dtype not in STORED:
        return None
    if rows > MAX_ROWS or dim > MAX_DIM or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, *cached)):
        return None
    plain = all(
        t.dtype == keys.dtype and t.device == q.device and t.stride(3) == 1 and t.shape[3] == dim
        for t in cached
    )
    if not plain or (correction is not None and correction.whole.real != torch.float32):
        return None
    step = _compiled_for(rows, {"DIM": dim, "STORED": STORED[keys.dtype]}, correction and correction.whole)
    if step is None or correction is None:
        return step
    return functools.partial(step, residual=correction.residual(*cached[:2]))


def prepare(rows: int, correction: "Correction") -> None:
    """Have the step of `rows` queries for each KV head compiled that corrects what it reads, so that no clock sees it."""
    if rows <= MAX_ROWS and correction.dim <= MAX_DIM and correction.real == torch.float32:
        _compiled_for(rows, {}, correction)


def _compiled_for(rows: int, macros: dict, correction: "Correction | None") -> Callable | None:
    more = {} if correction is None else correction.macros
    return _compiled(rows, tuple(sorted({**macros, **more}.items())))


@functools.cache
def _compiled(rows: int, macros: tuple[tuple[str, object], ...]) -> Callable | None:
    code = library_or_none(SOURCE, {"ROWS": rows, **dict(macros)})
    if code is None:
        return None  # torch's products say the same
    step = code.attend
    step.restype, step.argtypes = None, [ctypes.POINTER(Step)]
    return functools.partial(_attend, step)


def _attend(
    step, q, prefix_keys, prefix_values, new_keys, new_values, valid, *,
    read=None, bias=None, apart: bool = False, maps: tuple = (None,) * len(MAPS),
    residual: Residual | None = None,
):  # fmt: skip
    """One softmax over both segments: (what the prefix comes to, what the new positions do, the prefix's share).

    q: scaled queries (B, H, R, D) in float32. valid: bool (B, T) or None. maps: W (H, D, D) and c (H, D) of keys and of values
    that are read as x W + c, float32, in the order of `MAPS`, each or None.

    read, bias, apart: for maps that are applied by the caller: the queries for the prefix, what is added to its scores
    (B, H, R), and that both sums are wanted; else the first result holds both, and the second is None.

    residual: of the prefix, for a step that was compiled to correct it.

    Returns: (B, H, R, D) float32, the same or None, (B, H, R).
    """
    batch, heads, rows, dim = q.shape
    blocks = -(-prefix_keys.shape[2] // BLOCK) - (-new_keys.shape[2] // BLOCK)
    q = q.contiguous()
    # C reads where it is told to: what it is told must be so
    for name, given in zip(MAPS, maps):
        wanted = (heads, dim, dim) if name.endswith("dense") else (heads, dim)
        if given is not None and given.shape != wanted:
            raise KvlibError(
                f"{name} {tuple(given.shape)} given for {heads} KV heads of {dim}, expected {wanted}: take a map of this pair"
            )
    maps = [None if t is None else t.to(torch.float32).contiguous() for t in maps]
    key_dense, key_bias = maps[:2]
    read = torch.empty_like(q) if key_dense is not None else q if read is None else read.contiguous()
    if key_bias is not None:
        bias = q.new_empty(batch, heads, rows)
    bias = None if bias is None else bias.contiguous()
    valid = None if valid is None else valid.contiguous()
    out, share = torch.empty_like(q), q.new_empty(batch, heads, rows)
    new = torch.empty_like(q) if apart else None
    scratch = q.new_empty(batch * heads * blocks * rows * (dim + 2))
    tensors = (read, q, bias, *maps, valid, out, new, share, scratch)
    pointers = (None if t is None else t.data_ptr() for t in tensors)
    segments = Segment.of(prefix_keys, prefix_values), Segment.of(new_keys, new_values)
    given = (*segments, *pointers, batch, heads, torch.get_num_threads())
    step(Step(*given) if residual is None else CorrectingStep(*given, residual))
    return out, new, share
