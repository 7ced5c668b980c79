"""Two-segment attention over prefixes of unequal length, without padding: forward and backward by hand.

The same attention as `kvlib.attention`, for training a map on a CPU: every prompt's scores are as long as its own
prefix, a frozen prefix gets no gradient, and the backward pass finds the probabilities and nothing else kept.

Where there is a C compiler the prefix's part is `kvlib.kernels.prefix`, else torch's and oneDNN's products.

In the one softmax over both segments a single column, right behind a prompt's prefix, stands for all new positions
together: their log-sum-exp, and the bias of the keys, the same for every cached position, taken off it. So the large
matrices are whole and contiguous, and nothing is added to them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvlib.kernels.prefix import Reader
from kvlib.packed import suits_onednn
from kvlib.ragged import parts, roomy_length


@dataclass(frozen=True)
class PrefixRead:
    """What one layer's attention reads of B packed prefixes: k' = [x φ(x)] W + c, and values alike.

    pack: makes (keys, values), each (H, N, E), packed roomily, in the dtype in which to compute; once for each direction,
    which takes no longer than keeping all layers' packed, and none of the memory. lengths: of the prefixes, N the sum
    of their `roomy_length`. stored: what is packed so, of each prompt, (2, H, T, D). reader: the compiled way to read it,
    or None. key_dense, value_dense: W (H, E, D); None for the identity. corrected: keys (H, N, D) that
    depend on the map's weights and are read in the place of the packed ones, or None. key_bias, value_bias: c (H, D) or
    None.
    """

    pack: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    dtype: torch.dtype
    stored: list[torch.Tensor]
    reader: Reader | None = None
    key_dense: torch.Tensor | None = None
    value_dense: torch.Tensor | None = None
    corrected: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None

    LEARNT = ("key_dense", "value_dense", "corrected")

    @property
    def lengths(self) -> list[int]:
        return [row.shape[2] for row in self.stored]

    @property
    def learnt(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that may want a gradient, in the order of `LEARNT`."""
        return tuple(getattr(self, name) for name in self.LEARNT)

    def parts(self) -> list[tuple[slice, int]]:
        """Of each prompt: where it lies among the packed positions, and its length."""
        return list(zip(parts([roomy_length(n) for n in self.lengths]), self.lengths))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values), the corrected keys in their place."""
        keys, values = self.pack()
        if self.corrected is not None:
            for part, length in self.parts():
                inside = slice(part.start, part.start + length)
                keys[:, inside] = self.corrected[:, inside]
        return keys, values

    def corrected_from(self) -> tuple[torch.Tensor, list[int]] | None:
        """The corrected keys and where each prompt begins in them."""
        return (
            None
            if self.corrected is None
            else (self.corrected.contiguous(), [part.start for part, _ in self.parts()])
        )

    def with_learnt(self, tensors) -> "PrefixRead":
        return replace(self, **dict(zip(self.LEARNT, tensors)))


class Kept(NamedTuple):
    """What the backward pass needs; R = G S rows for each KV head, a KV head's queries side by side."""

    q: torch.Tensor  # (B, H, R, D), scaled
    to_prefix: torch.Tensor  # (B, H, R, E): the query that reads [x φ(x)]
    new_keys: torch.Tensor  # (B, H, S, D)
    new_values: torch.Tensor
    out: torch.Tensor  # (B, H, R, E): what was read of [x φ(x)]
    share: torch.Tensor  # (B, H, R, 1): the new positions' part of the probabilities
    p_new: torch.Tensor  # (B, H, R, S): probabilities among them
    p: list[
        torch.Tensor
    ]  # of each prompt: (H, R, its roomy length), the new positions' share at its length; or `Reader`'s


class Wanted(NamedTuple):
    """Which gradients are asked for: of the new positions' queries, keys and values, and of `PrefixRead.learnt`."""

    new: bool
    learnt: tuple[bool, ...]


def attend(
    q: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, prefix: PrefixRead
) -> tuple[torch.Tensor, Kept]:
    """Attention of S new positions over each prompt's own prefix, and causally over each other.

    q: (B, H, R, D), scaled, in the prefix's dtype, as are new_keys, new_values: (B, H, S, D). Returns: (B, H, R, D).
    """
    rows, steps = q.shape[2], new_keys.shape[2]
    to_prefix = q if prefix.key_dense is None else q @ prefix.key_dense.mT
    new_scores = (q @ new_keys.mT).masked_fill_(ahead(steps, rows // steps, q.device), float("-inf"))
    column = new_scores.logsumexp(-1, keepdim=True)
    p_new = torch.softmax(new_scores, -1)
    if prefix.key_bias is not None:  # q · c, the same at every cached position
        column = column - q @ prefix.key_bias.unsqueeze(-1)
    out, share, kept = _read(to_prefix, column, prefix)
    mapped = out if prefix.value_dense is None else out @ prefix.value_dense
    mapped = mapped + (p_new @ new_values).mul_(share)
    if prefix.value_bias is not None:
        mapped.addcmul_(1 - share, prefix.value_bias.unsqueeze(-2))
    return mapped, Kept(q, to_prefix, new_keys, new_values, out, share, p_new, kept)


def attend_back(d: torch.Tensor, kept: Kept, prefix: PrefixRead, wanted: Wanted):
    """The gradients (of q, of new keys, of new values, those of `prefix.learnt`), None where not wanted.

    d: (B, H, R, D), the gradient of what `attend` returned.
    """
    learnt = dict(zip(PrefixRead.LEARNT, wanted.learnt))
    d_out = d if prefix.value_dense is None else d @ prefix.value_dense.mT
    of_new = d @ kept.new_values.mT
    column = (of_new * kept.p_new).sum(-1, keepdim=True)  # the gradient of the new positions' share
    if prefix.value_bias is not None:
        column = column - d @ prefix.value_bias.unsqueeze(-1)
    d_to_prefix, d_column, d_corrected = _read_back(d_out, column, kept, prefix, learnt["corrected"])
    d_q = d_new_keys = d_new_values = None
    if wanted.new:
        d_new_scores = torch._softmax_backward_data(of_new.mul_(kept.share), kept.p_new, -1, d.dtype)
        d_new_scores.addcmul_(kept.p_new, d_column)
        d_new_keys = d_new_scores.mT @ kept.q
        d_new_values = (kept.p_new * kept.share).mT @ d
        d_q = d_to_prefix if prefix.key_dense is None else d_to_prefix @ prefix.key_dense
        d_q = d_q.add_(d_new_scores @ kept.new_keys)
        if prefix.key_bias is not None:
            d_q.addcmul_(d_column, prefix.key_bias.unsqueeze(-2), value=-1)
    found = {"corrected": d_corrected}
    found["key_dense"] = (d_to_prefix.mT @ kept.q).sum(0) if learnt["key_dense"] else None
    found["value_dense"] = (kept.out.mT @ d).sum(0) if learnt["value_dense"] else None
    return d_q, d_new_keys, d_new_values, tuple(found[name] for name in PrefixRead.LEARNT)


def _read(to_prefix: torch.Tensor, column: torch.Tensor, prefix: PrefixRead):
    """(what is read of the prefixes (B, H, R, E), the column's share (B, H, R, 1), what to keep)"""
    if prefix.reader is not None and prefix.reader.suits(to_prefix, prefix.stored):
        return prefix.reader.read(to_prefix, column, prefix.stored, prefix.corrected_from())
    keys, values = prefix.read()
    out, share, kept = (
        to_prefix.new_empty(*to_prefix.shape[:3], values.shape[-1]),
        torch.empty_like(column),
        [],
    )
    for n, (part, length) in enumerate(prefix.parts()):
        scores = times_rows(to_prefix[n], keys[:, part])
        scores[..., length : length + 1] = column[n]
        scores[..., length + 1 :] = float("-inf")
        p = torch.softmax(scores, -1, out=scores)
        times_columns(p, values[:, part], out[n])
        share[n] = p[..., length : length + 1]
        kept.append(p)
    return out, share, kept


def _read_back(d_out: torch.Tensor, column: torch.Tensor, kept: Kept, prefix: PrefixRead, corrected: bool):
    """The gradients (of what read the prefixes, of the column's score, of corrected keys or None).

    d_out: (B, H, R, E). column: the gradient of its share. corrected: whether those keys' gradient is asked for.
    """
    if prefix.reader is not None and prefix.reader.suits(kept.to_prefix, prefix.stored):
        d_corrected = prefix.corrected.new_zeros(prefix.corrected.shape) if corrected else None
        given = d_out, column, kept.to_prefix, kept.share, kept.p, prefix.stored
        return *prefix.reader.read_back(*given, prefix.corrected_from(), d_corrected), d_corrected
    keys, values = prefix.read()
    d_column, d_to_prefix = torch.empty_like(column), torch.empty_like(kept.to_prefix)
    d_corrected = torch.zeros_like(keys) if corrected else None
    for n, (p, (part, length)) in enumerate(zip(kept.p, prefix.parts())):
        d_p = times_rows(d_out[n], values[:, part])
        d_p[..., length : length + 1] = column[n]
        d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        d_column[n] = d_scores[..., length : length + 1]
        times_columns(d_scores, keys[:, part], d_to_prefix[n])
        if d_corrected is not None:
            inside = slice(part.start, part.start + length)
            torch.bmm(d_scores[..., :length].mT, kept.to_prefix[n], out=d_corrected[:, inside])
    return d_to_prefix, d_column, d_corrected


def times_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x (H, R, E), y (H, N, E) -> x yᵀ (H, R, N)."""
    if not suits_onednn(y):
        return torch.bmm(x, y.mT)
    return torch.stack([torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "") for a, b in zip(x, y)])


def times_columns(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """x (H, R, N), y (H, N, E) -> x y into out (H, R, E)."""
    if not suits_onednn(y):
        torch.bmm(x, y, out=out)
        return
    for a, b, own in zip(x, y, out):
        own.copy_(torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], ""))


def ahead(steps: int, group: int, device: torch.device) -> torch.Tensor:
    """(G S, S), true where a new position would look ahead."""
    return torch.ones(steps, steps, dtype=torch.bool, device=device).triu(1).repeat(group, 1)
