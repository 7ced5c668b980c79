"""x Wᵀ + b of a few rows in C (`product.c`): one token's way through a model is reading its weights, and little else.

The libraries that torch carries are made for many rows; for one they read a weight at half of what the memory gives, or less.
"""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from kvlib.kernels.compiler import library_or_none

SOURCE = Path(__file__).with_name("product.c")
MOST_ROWS = 8  # with more, a product is arithmetic and no longer reading


class Product(ctypes.Structure):
    """`struct product` of the source."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y")] + [
        (name, ctypes.c_int64) for name in ("rows", "out", "in", "threads")
    ]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """x Wᵀ + b for x (…, I), weight (O, I), bias (O), all float32 on a CPU; None where this is not for it: more rows than a
    few, a weight that does not lie row after row, no compiler. No gradient.
    """
    size = weight.shape[1]
    rows = x.numel() // max(size, 1)
    if not 0 < rows <= MOST_ROWS or x.shape[-1] != size or not weight.is_contiguous():
        return None
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return None
    multiply = _compiled()
    if multiply is None:
        return None
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    pointers = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()
    multiply(Product(*pointers, rows, *weight.shape, torch.get_num_threads()))
    return y


@functools.cache
def _compiled() -> Callable | None:
    code = library_or_none(SOURCE, {})
    if code is None:
        return None
    code.multiply.restype, code.multiply.argtypes = None, [ctypes.POINTER(Product)]
    return code.multiply
