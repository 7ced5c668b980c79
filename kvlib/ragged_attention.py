"""Two-segment attention over prefixes of unequal length, without padding: forward and backward by hand.

The same attention as `kvlib.attention`, for training a map on a CPU: every prompt's scores are as long as its own
prefix, a frozen prefix gets no gradient, and the backward pass finds the probabilities and nothing else kept.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvlib.ragged import parts


@dataclass(frozen=True)
class PrefixRead:
    """What one layer's attention reads of B packed prefixes: k' = [x z] W + c, and values alike.

    keys, values: (H, N, E), x first; packed, in the dtype in which to compute. key_latent, value_latent: z (H, N, r),
    which depends on the map's weights, or None; the last r columns of keys or values are for it, and filled by
    `attend`. key_dense, value_dense: W (H, E, D); None for the identity. key_bias, value_bias: c (H, D) or None.
    lengths: of the prefixes, N their sum.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: list[int]
    key_dense: torch.Tensor | None = None
    value_dense: torch.Tensor | None = None
    key_latent: torch.Tensor | None = None
    value_latent: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None

    LEARNT = ("key_dense", "value_dense", "key_latent", "value_latent")

    @property
    def learnt(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors that may want a gradient, in the order of `LEARNT`."""
        return tuple(getattr(self, name) for name in self.LEARNT)

    def with_learnt(self, tensors) -> "PrefixRead":
        return replace(self, **dict(zip(self.LEARNT, tensors)))


class Kept(NamedTuple):
    """What the backward pass needs; R = G S rows for each KV head, a KV head's queries side by side."""

    q: torch.Tensor  # (B, H, R, D), scaled
    to_prefix: torch.Tensor  # (B, H, R, E): the query that reads [x z]
    new_keys: torch.Tensor  # (B, H, S, D)
    new_values: torch.Tensor
    out: torch.Tensor  # (B, H, R, E): what was read of [x z]
    share: torch.Tensor | None  # (B, H, R, 1): the prefix's part of the probabilities
    p_new: torch.Tensor  # (B, H, R, S)
    p: list[torch.Tensor]  # of each prompt: (H, R, S + its length)


class Wanted(NamedTuple):
    """Which gradients are asked for: of the queries, keys and values of the new positions, and of `PrefixRead.learnt`."""

    query: bool
    new: bool
    learnt: tuple[bool, ...]


def attend(
    q: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, prefix: PrefixRead
) -> tuple[torch.Tensor, Kept]:
    """Attention of S new positions over each prompt's own prefix, and causally over each other.

    q: (B, H, R, D), scaled, in the prefix's dtype, as are new_keys, new_values: (B, H, S, D). Returns: (B, H, R, D).
    """
    heads, rows, steps = *q.shape[1:3], new_keys.shape[2]
    keys, values = prefix.keys, prefix.values
    for whole, latent in ((keys, prefix.key_latent), (values, prefix.value_latent)):
        if latent is not None:
            whole[..., -latent.shape[-1] :] = latent
    to_prefix = q if prefix.key_dense is None else q @ prefix.key_dense.mT
    shift = (
        None if prefix.key_bias is None else q @ prefix.key_bias.unsqueeze(-1)
    )  # q · c, the same at every position
    new_scores = (q @ new_keys.mT).masked_fill_(ahead(steps, rows // steps, q.device), float("-inf"))
    out, p_new = q.new_empty(*q.shape[:3], values.shape[-1]), torch.empty_like(new_scores)
    kept = []
    for n, part in enumerate(parts(prefix.lengths)):
        scores = q.new_empty(heads, rows, steps + prefix.lengths[n])
        scores[..., :steps] = new_scores[n]
        torch.bmm(to_prefix[n], keys[:, part].mT, out=scores[..., steps:])
        if shift is not None:
            scores[..., steps:] += shift[n]
        p = torch.softmax(scores, -1, out=scores)
        torch.bmm(p[..., steps:], values[:, part], out=out[n])
        p_new[n] = p[..., :steps]
        kept.append(p)
    mapped = out if prefix.value_dense is None else out @ prefix.value_dense
    share = None if prefix.value_bias is None else 1 - p_new.sum(-1, keepdim=True)
    if share is not None:
        mapped = mapped + share * prefix.value_bias.unsqueeze(-2)
    mapped = mapped + p_new @ new_values
    return mapped, Kept(q, to_prefix, new_keys, new_values, out, share, p_new, kept)


def attend_back(d: torch.Tensor, kept: Kept, prefix: PrefixRead, wanted: Wanted):
    """The gradients (of q, of new keys, of new values, those of `prefix.learnt`), None where not wanted.

    d: (B, H, R, D), the gradient of what `attend` returned.
    """
    steps, learnt = kept.new_keys.shape[2], dict(zip(PrefixRead.LEARNT, wanted.learnt))
    d_out = d if prefix.value_dense is None else d @ prefix.value_dense.mT
    of_new = d @ kept.new_values.mT
    d_new_scores, d_to_prefix = torch.empty_like(of_new), torch.empty_like(kept.to_prefix)
    of_share = None if kept.share is None else d @ prefix.value_bias.unsqueeze(-1)
    d_shift = None if prefix.key_bias is None else torch.empty_like(of_new[..., :1])
    d_key_latent, d_value_latent = (
        torch.empty_like(t) if learnt[name] else None
        for name, t in (("key_latent", prefix.key_latent), ("value_latent", prefix.value_latent))
    )
    for n, (part, p) in enumerate(zip(parts(prefix.lengths), kept.p)):
        d_p = torch.empty_like(p)
        d_p[..., :steps] = of_new[n]
        torch.bmm(d_out[n], prefix.values[:, part].mT, out=d_p[..., steps:])
        if of_share is not None:
            d_p[..., steps:] += of_share[n]
        d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
        d_new_scores[n], d_scores = d_scores[..., :steps], d_scores[..., steps:]
        torch.bmm(d_scores, prefix.keys[:, part], out=d_to_prefix[n])
        if d_shift is not None:
            torch.sum(d_scores, -1, keepdim=True, out=d_shift[n])
        if d_key_latent is not None:
            d_key_latent[:, part] = d_scores.mT @ kept.to_prefix[n, ..., -d_key_latent.shape[-1] :]
        if d_value_latent is not None:
            d_value_latent[:, part] = p[..., steps:].mT @ d_out[n, ..., -d_value_latent.shape[-1] :]
    d_q = d_new_keys = d_new_values = None
    if wanted.query:
        d_q = d_to_prefix if prefix.key_dense is None else d_to_prefix @ prefix.key_dense
        d_q = d_q.add_(d_new_scores @ kept.new_keys)
        if d_shift is not None:
            d_q += d_shift * prefix.key_bias.unsqueeze(-2)
    if wanted.new:
        d_new_keys, d_new_values = d_new_scores.mT @ kept.q, kept.p_new.mT @ d
    found = {"key_latent": d_key_latent, "value_latent": d_value_latent}
    found["key_dense"] = (d_to_prefix.mT @ kept.q).sum(0) if learnt["key_dense"] else None
    found["value_dense"] = (kept.out.mT @ d).sum(0) if learnt["value_dense"] else None
    return d_q, d_new_keys, d_new_values, tuple(found[name] for name in PrefixRead.LEARNT)


def ahead(steps: int, group: int, device: torch.device) -> torch.Tensor:
    """(G S, S), true where a new position would look ahead."""
    return torch.ones(steps, steps, dtype=torch.bool, device=device).triu(1).repeat(group, 1)
