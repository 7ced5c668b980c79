"""Two-segment attention: a cached prefix read through an affine map that never touches the cache.

For keys and values that are to be read as x' = x W + c + s x L R, attention being linear in K and in V,

    q · k' = (q Wᵀ + s (q Rᵀ) Lᵀ) · k + q · c        Σ p v' = o W + (Σ p) c + s (o L) R,   o = Σ p v

so the map acts on one query and one output instead of on T cached positions. The target's own new positions
are read as they are; one softmax covers both segments.
"""

from dataclasses import dataclass

import torch

from kvlib import products

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

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Map x (..., H, N, D); `weight` (..., H, N, 1) is the share of the bias that applies to each row."""
        y = x if self.dense is None else x @ self.dense
        if self.left is not None:
            y = y + (x @ self.left).mul(self.scale) @ self.right
        if self.bias is not None:
            bias = self.bias.unsqueeze(-2)  # (H, 1, D)
            y = y + (bias if weight is None else weight * bias)
        return y

    def transpose(self, q: torch.Tensor) -> torch.Tensor:
        """The adjoint of the linear part: q (..., H, N, D) -> the query that reads unmapped keys."""
        y = q if self.dense is None else q @ self.dense.transpose(-1, -2)
        if self.left is not None:
            y = y + (q @ self.right.transpose(-1, -2)).mul(self.scale) @ self.left.transpose(-1, -2)
        return y

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
) -> torch.Tensor:
    """Attention of S new queries over T prefix positions read through the maps, and over N >= S new ones as they are.

    Args:
        q: (B, Q, S, D), the last S of the N new positions. prefix_keys, prefix_values: (B, H, T, D).
        new_keys, new_values: (B, H, N, D). scaling: factor on the scores.
        key_map, value_map: in the dtype in which this function computes (float32 on a CPU, else q's).
        prefix_valid: bool (B, T), false at padding.

    Returns: (B, Q, S, D), dtype of q. The softmax is float32. On a CPU, half precision is computed in float32: the
    processor's half-precision matrix product rounds the scores to 8 bits.
    """
    batch, query_heads, steps, dim = q.shape
    heads, dtype = prefix_keys.shape[1], q.dtype
    group = query_heads // heads
    if steps > 1 and group * steps > QUERY_ROWS:
        return _in_query_chunks(
            q, prefix_keys, prefix_values, new_keys, new_values, scaling, key_map, value_map, prefix_valid,
            max(1, QUERY_ROWS // group),
        )  # fmt: skip
    if q.device.type == "cpu" and dtype != torch.float64:
        q, prefix_keys, prefix_values, new_keys, new_values = (
            t.float() for t in (q, prefix_keys, prefix_values, new_keys, new_values)
        )
    q = (q * scaling).reshape(batch, heads, group * steps, dim)  # a KV head's queries side by side
    read = key_map.transpose(q)
    prefix_scores = products.scores(read.flatten(0, 1), prefix_keys.flatten(0, 1)).unflatten(
        0, (batch, heads)
    )  # (B, H, G S, T)
    if key_map.bias is not None:
        prefix_scores = prefix_scores + (q @ key_map.bias.unsqueeze(-1))  # q · c, the same at every position
    new_scores = q @ new_keys.transpose(-1, -2)  # (B, H, G S, N)
    if prefix_valid is not None:
        prefix_scores = prefix_scores.masked_fill(~prefix_valid[:, None, None, :], float("-inf"))
    if steps > 1:
        length = new_keys.shape[2]
        causal = torch.ones(steps, length, dtype=torch.bool, device=q.device).tril(length - steps)
        new_scores = new_scores.masked_fill(~causal.repeat(group, 1), float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    p = torch.cat([prefix_scores, new_scores], -1).softmax(-1, dtype=wide).to(q.dtype)
    p_prefix, p_new = p.split([prefix_keys.shape[2], new_keys.shape[2]], -1)
    out = products.weighted_sum(p_prefix.flatten(0, 1), prefix_values.flatten(0, 1)).unflatten(
        0, (batch, heads)
    )  # (B, H, G S, D)
    if not value_map.is_identity:
        share = p_prefix.sum(-1, keepdim=True) if value_map.bias is not None else None
        out = value_map.forward(out, share)
    out = out + p_new @ new_values
    return out.reshape(batch, query_heads, steps, dim).to(dtype)


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
