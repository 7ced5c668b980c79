"""Attention over a ragged, frozen prefix by `prefix.c`, forward and backward: for training a map on a CPU."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from kvlib.kernels.compiler import library_or_none

SOURCE = Path(__file__).with_name("prefix.c")
STORED = {torch.float32: 0, torch.bfloat16: 1}
LANES, BLOCK = 16, 48  # as in the source, or a multiple: floats of a vector, positions at a time


class _Prefix(ctypes.Structure):
    """`struct prefix` of the source."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values", "p", "d_keys")] + [
        (name, ctypes.c_int64) for name in ("key_head", "value_head", "d_head", "length")
    ]


class _Call(ctypes.Structure):
    """`struct call` of the source."""

    POINTERS = ("prefixes", "q", "column", "out", "share", "inverse", "d_q", "d_column", "scratch")
    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS] + [
        (name, ctypes.c_int64) for name in ("room", "batch", "heads", "rows", "threads")
    ]


@dataclass(frozen=True)
class Reader:
    """The compiled loops for one kind of map. dim: D. columns: E of the keys and of the values."""

    code: ctypes.CDLL
    dim: int
    columns: tuple[int, int]

    @classmethod
    def of(cls, stored: torch.dtype, dim: int, rms: bool, squares: bool, corrected: bool) -> "Reader | None":
        """None where this kind is not compiled: another dtype or dimension, or no compiler."""
        if stored not in STORED or dim % LANES:
            return None
        macros = {"DIM": dim, "STORED": STORED[stored], "RMS": int(rms), "SQUARES": int(squares)}
        code = library_or_none(SOURCE, macros | {"CORRECTED": int(corrected)})
        wide = dim * (1 + rms + squares)
        return None if code is None else cls(code, dim, (dim if corrected else wide, wide))

    def suits(self, q: torch.Tensor, rows: list[torch.Tensor]) -> bool:
        """q (B, H, R, E) of a few rows in whole vectors, and caches (2, H, T, D) whose positions lie side by side."""
        side_by_side = all(row.stride()[2:] == (self.dim, 1) for row in rows)
        return (
            q.dtype == torch.float32 and q.device.type == "cpu" and q.shape[2] % LANES == 0 and side_by_side
        )

    def read(self, q: torch.Tensor, column: torch.Tensor, rows: list[torch.Tensor], corrected=None):
        """(out (B, H, R, E), the column's share (B, H, R, 1), [exponentials, 1 / their sum])

        q: (B, H, R, E). column: (B, H, R, 1), a score beside those of the prefix. rows: of each prompt its cache
        (2, H, T, D), T from 1 on. corrected: keys in their place, (H, N, D), and where each prompt begins in them; or None.
        """
        batch, heads, count, _ = q.shape
        out, share = q.new_empty(batch, heads, count, self.columns[1]), q.new_empty(batch, heads, count, 1)
        inverse = torch.empty_like(share)
        p = q.new_empty(heads * count * sum(row.shape[2] for row in rows))
        self._call(
            "attend",
            self._prefixes(rows, p, q, corrected),
            q=q,
            column=column,
            out=out,
            share=share,
            inverse=inverse,
        )
        return out, share, [p, inverse]

    def read_back(self, d_out, d_share, q, share, kept, rows, corrected=None, d_corrected=None):
        """The gradients (of q, of the column), shaped like them, from those of what `read` gave.

        d_corrected: (H, N, D), where the corrected keys' gradient is put, or None.
        """
        p, inverse = kept
        d_q, d_column = q.new_empty(q.shape), q.new_empty(share.shape)
        prefixes = self._prefixes(rows, p, q, corrected, d_corrected)
        self._call(
            "attend_back", prefixes, most=max(row.shape[2] for row in rows),
            q=q, column=d_share, out=d_out, share=share, inverse=inverse, d_q=d_q, d_column=d_column,
        )  # fmt: skip
        return d_q, d_column

    def _prefixes(self, rows, p, q, corrected, d_corrected=None):
        keys, starts = (None, [0] * len(rows)) if corrected is None else corrected
        found, place = (_Prefix * len(rows))(), 0
        for own, row, start in zip(found, rows, starts):
            length = row.shape[2]
            own.keys = row.data_ptr() if keys is None else keys[:, start:].data_ptr()
            own.key_head = row.stride(1) if keys is None else keys.stride(0)
            own.values, own.value_head = row[1].data_ptr(), row.stride(1)
            own.p, own.length = p.data_ptr() + 4 * place, length
            if d_corrected is not None:
                own.d_keys, own.d_head = d_corrected[:, start:].data_ptr(), d_corrected.stride(0)
            place += q.shape[1] * q.shape[2] * length
        return found

    def _call(self, name: str, prefixes, most: int = 0, **tensors):
        q, threads = tensors["q"], torch.get_num_threads()
        batch, heads, count, _ = q.shape
        room = BLOCK * self.columns[1] + max(self.columns) * count + 2 * count + most * count
        scratch = q.new_empty(threads, -(-room // LANES) * LANES)
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()} | {
            "scratch": scratch
        }  # what C writes is so
        pointers = {key: tensor.data_ptr() for key, tensor in tensors.items()}
        call = _Call(
            prefixes=ctypes.cast(prefixes, ctypes.c_void_p), **pointers,
            room=scratch.shape[1], batch=batch, heads=heads, rows=count, threads=threads,
        )  # fmt: skip
        getattr(self.code, name)(ctypes.byref(call))
