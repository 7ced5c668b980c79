"""Products of a few rows with long cached matrices, shared out evenly among a processor's cores.

A batched product gives each core whole matrices. Three KV heads on two cores leave one of them idle for a third of the
time, so the heads that do not go round are cut along the positions. On other devices, with one core, and with many
rows, these are plain batched products. Axes: N prompts × KV heads, T positions, D head_dim, R rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

FEW_ROWS = 16  # above, a product is bound by arithmetic and shares itself out
MIN_TOKENS = 256  # below, cutting costs more than it brings


@dataclass(frozen=True)
class Share:
    """A batch of equal matrices out of N × T: some heads whole, or one head in `pieces` along the positions."""

    heads: slice | int
    start: int
    stop: int
    pieces: int = 1

    def along(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, T, ·) -> a view (n, T', ·)."""
        x = x[self.heads, self.start : self.stop]
        return x if self.pieces == 1 else x.unflatten(0, (self.pieces, -1))

    def across(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, ·, T) -> a view (n, ·, T')."""
        x = x[self.heads, :, self.start : self.stop]
        return x if self.pieces == 1 else x.unflatten(1, (self.pieces, -1)).transpose(0, 1)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """x (N, ·, ·) -> a view (n, ·, ·), the same for every piece."""
        return x[self.heads] if self.pieces == 1 else x[self.heads].expand(self.pieces, -1, -1)


def shares(count: int, tokens: int, device: torch.device) -> Iterator[Share]:
    """Cover `count` matrices of `tokens` positions; one share where nothing is to be gained."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    spare = count % threads if tokens >= max(MIN_TOKENS, threads) else 0
    if count > spare:
        yield Share(slice(0, count - spare), 0, tokens)
    even = tokens - tokens % threads
    for head in range(count - spare, count):
        yield Share(head, 0, even, threads)
        if even < tokens:
            yield Share(slice(head, head + 1), even, tokens)


def _plain(rows: int, *tensors: torch.Tensor) -> bool:
    """Whether sharing out by hand does not apply: many rows, another device, or a gradient that is asked for."""
    tracked = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return rows > FEW_ROWS or tensors[0].device.type != "cpu" or tracked


def scores(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q (N, R, D), keys (N, T, D) -> q kᵀ (N, R, T)."""
    if _plain(q.shape[1], q, keys):
        return q @ keys.transpose(1, 2)
    columns = q.transpose(1, 2)
    out = q.new_empty(keys.shape[0], keys.shape[1], q.shape[1])
    for part in shares(*keys.shape[:2], q.device):
        torch.bmm(part.along(keys), part.whole(columns), out=part.along(out))
    return out.transpose(1, 2)


def weighted_sum(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """p (N, R, T), values (N, T, D) -> p v (N, R, D)."""
    if _plain(p.shape[1], p, values):
        return p @ values
    sums = {}  # by first head, in order: what a head's pieces come to is added up
    for part in shares(*values.shape[:2], p.device):
        product = torch.bmm(part.across(p), part.along(values))
        if part.pieces > 1:
            product = product.sum(0, keepdim=True)
        first = part.heads if part.pieces > 1 else part.heads.start
        sums[first] = sums[first] + product if first in sums else product
    return torch.cat([*sums.values()]) if len(sums) > 1 else sums[0]
