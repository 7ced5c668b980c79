"""What C is told of a residual on a layer's keys and values: `residual.h`, which two sources include."""

import ctypes


class Half(ctypes.Structure):
    """`struct half` of `residual.h`: keys or values of a layer, and what is added to them."""

    _fields_ = (
        [("x", ctypes.c_void_p)]
        + [(name, ctypes.c_int64) for name in ("batch", "head", "position", "element")]
        + [(name, ctypes.c_void_p) for name in ("rows", "squares", "right")]
    )


class Residual(ctypes.Structure):
    """`struct residual` of `residual.h`."""

    _fields_ = [(name, Half) for name in ("keys", "values")] + [
        ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("angles", ctypes.c_int64)
    ]  # fmt: skip
