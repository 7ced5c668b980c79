"""Two-segment attention: a cached prefix read through an affine map that never touches the cache.

For keys and values that are to be read as x' = x W + c + s x L R, attention being linear in K and in V,

    q · k' = (q Wᵀ + s (q Rᵀ) Lᵀ) · k + q · c        Σ p v' = o W + (Σ p) c + s (o L) R,   o = Σ p v

so the map acts on one query and one output instead of on T cached positions. The target's own new positions
are read as they are; one softmax covers both segments.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvlib import products
from kvlib.kernels import attend

if TYPE_CHECKING:  # it knows maps, which know attention
    from kvlib.kernels.correct import LayerCorrection

QUERY_ROWS = 4096  # bounds the score matrix: queries are taken in chunks of this many rows per KV head


@dataclass(frozen=True)
class Affine:
    """x' = x W + c + s x L R for each KV head; a part that is None is left out (W None: the identity).

    dense W (H, D, D), bias c (H, D), left L (H, D, r), right R (H, r, D). The scale s is applied to the r numbers
    between L and R, so that no scaled copy of the weights is ever made.
    """

    dense: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    scale: float = 1.0

    @property
    def is_identity(self) -> bool:
        return self.dense is None and self.bias is None and self.left is None

    @property
    def learns(self) -> bool:
        """Whether a gradient of one of its parts is asked for."""
        parts = (self.dense, self.bias, self.left, self.right)
        return any(t is not None and t.requires_grad for t in parts)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Map x (..., H, N, D); `weight` (..., H, N, 1) is the share of the bias that applies to each row."""
        rows = self._batched(x)
        y = rows if self.dense is None else torch.bmm(rows, self._for(rows, self.dense))
        if self.left is not None:
            latent = torch.bmm(rows, self._for(rows, self.left))
            y = torch.baddbmm(y, latent, self._for(rows, self.right), alpha=self.scale)
        if self.bias is not None:
            bias = self._for(rows, self.bias.unsqueeze(-2))  # (H, 1, D)
            y = y + (bias if weight is None else self._batched(weight) * bias)
        return y.view(x.shape)

    def transpose(self, q: torch.Tensor) -> torch.Tensor:
        """The adjoint of the linear part: q (..., H, N, D) -> the query that reads unmapped keys."""
        rows = self._batched(q)
        y = rows if self.dense is None else torch.bmm(rows, self._for(rows, self.dense).mT)
        if self.left is not None:
            latent = torch.bmm(rows, self._for(rows, self.right).mT)
            y = torch.baddbmm(y, latent, self._for(rows, self.left).mT, alpha=self.scale)
        return y.view(q.shape)

    def composed(self) -> "Affine":
        """The same map with its linear part as one matrix, W + s L R, laid out row by row: one product where there were three.

        Not in half precision: the identity's ones would swallow what is small beside them.
        """
        if self.left is None and self.dense is not None:
            return Affine(self.dense.contiguous(), self.bias)
        if self.left is None or self.left.dtype not in (torch.float32, torch.float64):
            return self
        dense = self.dense
        if dense is None:
            dense = torch.eye(self.left.shape[1], dtype=self.left.dtype, device=self.left.device)
        return Affine(dense + self.scale * (self.left @ self.right), self.bias)

    @staticmethod
    def _batched(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, *x.shape[-2:])

    @staticmethod
    def _for(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A weight (H, ·, ·) for each matrix of `rows` (prompts × H, N, ·)."""
        return weight if len(rows) == len(weight) else weight.repeat(len(rows) // len(weight), 1, 1)

    def to(self, *args, **kwargs) -> "Affine":
        moved = (
            None if t is None else t.to(*args, **kwargs)
            for t in (self.dense, self.bias, self.left, self.right)
        )
        return Affine(*moved, self.scale)


IDENTITY = Affine()


def two_segment_attention(
    q: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scaling: float,
    key_map: Affine = IDENTITY,
    value_map: Affine = IDENTITY,
    prefix_valid: torch.Tensor | None = None,
    correction: "LayerCorrection | None" = None,
) -> torch.Tensor:
    """Attention of S new queries over T prefix positions read through the maps, and over N >= S new ones as they are.

    Args:
        q: (B, Q, S, D), the last S of the N new positions. prefix_keys, prefix_values: (B, H, T, D).
        new_keys, new_values: (B, H, N, D). scaling: factor on the scores.
        key_map, value_map: in the dtype in which this function computes (float32 on a CPU, else q's).
        prefix_valid: bool (B, T), false at padding.
        correction: what is done to the prefix for good, before it is read or in the same pass. None: nothing.

    Returns: (B, Q, S, D), dtype of q. The softmax is float32. On a CPU, half precision is computed in float32: the
    processor's half-precision matrix product rounds the scores to 8 bits. There one new token goes through compiled code
    where it can be had (`kvlib.kernels.attend`), else and for more tokens through torch; both say the same.
    """
    batch, query_heads, steps, dim = q.shape
    heads, dtype = prefix_keys.shape[1], q.dtype
    group = query_heads // heads
    if steps > 1 and group * steps > QUERY_ROWS:
        if correction is not None:
            correction(prefix_keys, prefix_values)
        return _in_query_chunks(
            q, prefix_keys, prefix_values, new_keys, new_values, scaling, key_map, value_map, prefix_valid,
            max(1, QUERY_ROWS // group),
        )  # fmt: skip
    cached = prefix_keys, prefix_values, new_keys, new_values
    step = attend.kernel(q, *cached, correction=correction)
    if step is not None and torch.is_grad_enabled() and (key_map.learns or value_map.learns):
        step = None
    if step is None and correction is not None:
        correction(prefix_keys, prefix_values)
    if step is not None:
        q = (q.float() * scaling).reshape(batch, heads, group, dim)
        if key_map.left is None and value_map.left is None:
            maps = key_map.dense, key_map.bias, value_map.dense, value_map.bias
            out, _, _ = step(q, *cached, prefix_valid, maps=maps)
        else:
            bias = None if key_map.bias is None else (q * key_map.bias.unsqueeze(-2)).sum(-1)
            read = key_map.transpose(q)
            out, new, share = step(q, *cached, prefix_valid, read=read, bias=bias, apart=True)
            out = value_map.forward(out, share.unsqueeze(-1)).add_(new)
        return out.view(q.shape[0], query_heads, steps, dim).to(dtype)
    if q.device.type == "cpu" and dtype != torch.float64:
        q, prefix_keys, prefix_values, new_keys, new_values = (
            t.float() for t in (q, prefix_keys, prefix_values, new_keys, new_values)
        )
    # a KV head's queries side by side; from here on prompts and KV heads are one axis, N
    q = (q * scaling).reshape(batch, heads, group * steps, dim)
    q = q.flatten(0, 1)
    read = q if key_map.is_identity else key_map.transpose(q)  # (N, G S, D)
    prefix_keys, prefix_values, new_keys, new_values = (
        t.flatten(0, 1) for t in (prefix_keys, prefix_values, new_keys, new_values)
    )
    prefix_scores = products.scores(read, prefix_keys)  # (N, G S, T)
    if key_map.bias is not None:  # q · c, the same at every position
        prefix_scores = prefix_scores + q @ key_map.bias.repeat(batch, 1).unsqueeze(-1)
    new_scores = torch.bmm(q, new_keys.mT)  # (N, G S, N')
    if prefix_valid is not None:
        padded = ~prefix_valid.repeat_interleave(heads, 0).unsqueeze(1)  # (N, 1, T)
        prefix_scores = prefix_scores.masked_fill(padded, float("-inf"))
    if steps > 1:
        length = new_keys.shape[1]
        causal = torch.ones(steps, length, dtype=torch.bool, device=q.device).tril(length - steps)
        new_scores = new_scores.masked_fill(~causal.repeat(group, 1), float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    p = torch.cat([prefix_scores, new_scores], -1).softmax(-1, dtype=wide).to(q.dtype)
    p_prefix, p_new = p.split([prefix_keys.shape[1], new_keys.shape[1]], -1)
    out = products.weighted_sum(p_prefix, prefix_values)  # (N, G S, D)
    if not value_map.is_identity:
        share = p_prefix.sum(-1, keepdim=True) if value_map.bias is not None else None
        out = value_map.forward(out, share)
    out = torch.baddbmm(out, p_new, new_values)
    return out.view(batch, query_heads, steps, dim).to(dtype)


def _in_query_chunks(
    q, prefix_keys, prefix_values, new_keys, new_values, scaling, key_map, value_map, valid, rows
):
    """Many queries at once: exact, in chunks along S; later chunks see the new positions before them."""
    steps, length = q.shape[2], new_keys.shape[2]
    parts = []
    for start in range(0, steps, rows):
        stop = min(start + rows, steps)
        seen = length - steps + stop
        parts.append(
            two_segment_attention(
                q[:, :, start:stop], prefix_keys, prefix_values, new_keys[:, :, :seen], new_values[:, :, :seen],
                scaling, key_map, value_map, valid,
            )
        )  # fmt: skip
    return torch.cat(parts, 2)
