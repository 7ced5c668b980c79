"""One new token's attention by `attend.c`: one pass over the cached keys and values, whole softmax included.

Step by step torch reads the keys, writes scores, reads them for the softmax and reads the values, and on a processor its
products of a few rows are far from what the memory gives. Every path that goes through a handoff attends by the same code.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from kvlib.errors import KvlibError
from kvlib.kernels.compiler import library

SOURCE = Path(__file__).with_name("attend.c")
STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BLOCK = 256  # positions, as in the source
MAX_ROWS, MAX_DIM = 16, 256  # above, what a block sums up does not stay in the registers


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
        + [(n, ctypes.c_void_p) for n in ("read", "query", "bias", "valid", "out", "out_new", "share", "scratch")]
        + [(name, ctypes.c_int64) for name in ("batches", "heads", "threads")]
    )  # fmt: skip


def kernel(q: torch.Tensor, *cached: torch.Tensor) -> Callable | None:
    """The compiled step for q (B, Q, 1, D) and the keys and values of both segments, each (B, H, ·, D); None where it is not
    to be had: another device or dtype, a gradient that is asked for, no compiler.

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
    return _compiled(dim, rows, STORED[keys.dtype]) if plain else None


@functools.cache
def _compiled(dim: int, rows: int, stored: int) -> Callable | None:
    try:
        step = library(SOURCE, {"DIM": dim, "ROWS": rows, "STORED": stored}).attend
    except KvlibError:
        return None  # torch's products say the same
    step.restype, step.argtypes = None, [ctypes.POINTER(Step)]
    return functools.partial(_attend, step)


def _attend(step, read, q, prefix_keys, prefix_values, new_keys, new_values, bias, valid, apart: bool):
    """One softmax over both segments: (what the prefix comes to, what the new positions do, the prefix's share).

    read, q: scaled queries (B, H, R, D) in float32 for the prefix and for the new positions. bias: (B, H, R) on the prefix's
    scores, or None. valid: bool (B, T) or None. apart: else the first result holds both sums, and the second is None.

    Returns: (B, H, R, D) float32, the same or None, (B, H, R).
    """
    batch, heads, rows, dim = q.shape
    blocks = -(-prefix_keys.shape[2] // BLOCK) - (-new_keys.shape[2] // BLOCK)
    read, q = read.contiguous(), q.contiguous()
    bias = None if bias is None else bias.contiguous()
    valid = None if valid is None else valid.contiguous()
    out, share = torch.empty_like(q), q.new_empty(batch, heads, rows)
    new = torch.empty_like(q) if apart else None
    scratch = q.new_empty(batch * heads * blocks * rows * (dim + 2))
    pointers = (None if t is None else t.data_ptr() for t in (read, q, bias, valid, out, new, share, scratch))
    segments = Segment.of(prefix_keys, prefix_values), Segment.of(new_keys, new_values)
    step(Step(*segments, *pointers, batch, heads, torch.get_num_threads()))
    return out, new, share
