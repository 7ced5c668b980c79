"""KL between rows of logits and its gradient by `kl.c`, in fewer passes than torch's operators take."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from kvlib.errors import KvlibError
from kvlib.kernels.compiler import library_or_none

SOURCE = Path(__file__).with_name("kl.c")


def c_kl() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """A function of path and native logits (R, V), float32 and contiguous, both overwritten; None without a C compiler.

    It returns the KL of each row in nats (R,) and leaves (softmax(path) − softmax(native)) / R in the path's logits.
    """
    code = library_or_none(SOURCE, {})
    if code is None:
        return None
    code = code.kl
    code.restype = None
    code.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float, ctypes.c_int64]

    def kl(path: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
        # C reads and writes where it is told to: what it is told must be so
        fits = path.shape == native.shape and path.ndim == 2
        if not fits or any(t.dtype != torch.float32 or not t.is_contiguous() for t in (path, native)):
            raise KvlibError(
                f"logits {tuple(path.shape)} {path.dtype} and {tuple(native.shape)} {native.dtype} given, expected two of (R, V) in "
                "float32, contiguous: convert them"
            )
        found = path.new_empty(len(path))
        pointers = (t.data_ptr() for t in (native, path, found))
        code(*pointers, *path.shape, 1 / len(path), torch.get_num_threads())
        return found

    return kl
