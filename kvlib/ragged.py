"""Prefixes of unequal length, and two-segment attention over them without padding: for training a map on a CPU.

The same attention as `kvlib.attention`, differentiable by hand: every prompt's scores are as long as its own prefix, a
frozen prefix gets no gradient, and the backward pass finds the probabilities and nothing else kept.
"""

from dataclasses import dataclass

import torch

from kvlib.attaching import attention_of
from kvlib.attention import IDENTITY, Affine
from kvlib.cache import PrefixCache


@dataclass(frozen=True)
class RaggedPrefix:
    """The caches of B prompts, each as long as it is: rows are (L, 2, H, T, D), keys before values, views allowed."""

    rows: list[torch.Tensor]

    @property
    def batch(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> list[int]:
        return [row.shape[3] for row in self.rows]

    @property
    def layers(self) -> int:
        return self.rows[0].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype

    @property
    def device(self) -> torch.device:
        return self.rows[0].device

    def select(self, prompts: slice) -> "RaggedPrefix":
        return RaggedPrefix(self.rows[prompts])

    def every(self, step: int) -> "RaggedPrefix":
        """Every `step`-th position, from the first, as views."""
        return RaggedPrefix([row[..., ::step, :] for row in self.rows])

    def positions(self) -> torch.Tensor:
        """Rotary position of every packed entry, (1, N)."""
        return torch.cat([torch.arange(n, device=self.device) for n in self.lengths]).unsqueeze(0)

    def layer(self, number: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of one layer, packed: (H, N, D), the prompts one after the other, N the sum of `lengths`."""
        _, _, heads, _, dim = self.rows[0].shape
        both = torch.empty(2, heads, sum(self.lengths), dim, dtype=dtype, device=self.device)
        for row, part in zip(self.rows, parts(self.lengths)):
            both[:, :, part].copy_(row[number])
        return both[0], both[1]

    def padded(self) -> PrefixCache:
        """As a cache with padding on the right."""
        lengths = torch.tensor(self.lengths, device=self.device)
        longest = int(lengths.max())
        layers, _, heads, _, dim = self.rows[0].shape
        whole = torch.zeros(
            layers, 2, len(self.rows), heads, longest, dim, dtype=self.dtype, device=self.device
        )
        for n, row in enumerate(self.rows):
            whole[:, :, n, :, : row.shape[3]] = row
        valid = torch.arange(longest, device=self.device) < lengths[:, None]
        return PrefixCache(list(whole[:, 0]), list(whole[:, 1]), valid)


def parts(lengths: list[int]) -> list[slice]:
    """Where each prompt lies among packed positions."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths)]


def ragged_attention(
    q: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    lengths: list[int],
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    scaling: float,
    key_map: Affine = IDENTITY,
    value_map: Affine = IDENTITY,
) -> torch.Tensor:
    """Attention of S new positions over each prompt's own prefix, read through the maps, and causally over each other.

    Args:
        q: (B, Q, S, D). prefix_keys, prefix_values: (H, N, D), packed, in the dtype in which to compute.
        lengths: of the B prefixes. new_keys, new_values: (B, H, S, D). scaling: factor on the scores.
        key_map, value_map: of a dense matrix and a bias at most, in the dtype in which to compute.

    Returns: (B, Q, S, D), dtype of q.
    """
    return _Ragged.apply(
        q, prefix_keys, prefix_values, new_keys, new_values,
        key_map.dense, key_map.bias, value_map.dense, value_map.bias, scaling, lengths,
    )  # fmt: skip


def ahead(steps: int, group: int, device: torch.device) -> torch.Tensor:
    """(G S, S), true where a new position would look ahead."""
    return torch.ones(steps, steps, dtype=torch.bool, device=device).triu(1).repeat(group, 1)


class _Ragged(torch.autograd.Function):
    """R = G S rows for each KV head: a KV head's queries side by side."""

    @staticmethod
    def forward(
        ctx,
        query,
        keys,
        values,
        new_keys,
        new_values,
        key_dense,
        key_bias,
        value_dense,
        value_bias,
        scaling,
        lengths,
    ):
        wide, (batch, query_heads, steps, dim) = keys.dtype, query.shape
        heads = keys.shape[0]
        rows = query_heads // heads * steps
        q = (query.to(wide) * scaling).reshape(batch, heads, rows, dim)
        new_keys, new_values = new_keys.to(wide), new_values.to(wide)
        to_prefix = q if key_dense is None else q @ key_dense.mT  # the query that reads unmapped keys
        shift = None if key_bias is None else q @ key_bias.unsqueeze(-1)  # q · c, the same at every position
        new_scores = (q @ new_keys.mT).masked_fill_(ahead(steps, rows // steps, q.device), float("-inf"))
        out, p_new, kept = torch.empty_like(q), torch.empty_like(new_scores), []
        for n, part in enumerate(parts(lengths)):
            scores = q.new_empty(heads, rows, steps + lengths[n])
            scores[..., :steps] = new_scores[n]
            torch.bmm(to_prefix[n], keys[:, part].mT, out=scores[..., steps:])
            if shift is not None:
                scores[..., steps:] += shift[n]
            p = scores.softmax(-1)
            torch.bmm(p[..., steps:], values[:, part], out=out[n])
            p_new[n] = p[..., :steps]
            kept.append(p)
        mapped = out if value_dense is None else out @ value_dense
        share = None if value_bias is None else 1 - p_new.sum(-1, keepdim=True)
        if share is not None:
            mapped = mapped + share * value_bias.unsqueeze(-2)
        mapped = mapped + p_new @ new_values
        ctx.lengths, ctx.scaling, ctx.dtype = lengths, scaling, query.dtype
        ctx.save_for_backward(
            q, to_prefix, keys, values, new_keys, new_values, key_dense, key_bias, value_dense, value_bias,
            out, share, p_new, *kept,
        )  # fmt: skip
        return mapped.view(batch, query_heads, steps, dim).to(query.dtype)

    @staticmethod
    def backward(ctx, upstream):
        (
            q, to_prefix, keys, values, new_keys, new_values, key_dense, key_bias, value_dense, value_bias,
            out, share, p_new, *kept,
        ) = ctx.saved_tensors  # fmt: skip
        wants = dict(
            zip(
                ("query", "keys", "values", "new_keys", "new_values", "key_dense", "key_bias", "value_dense"),
                ctx.needs_input_grad,
            )
        )
        steps = new_keys.shape[2]
        d = upstream.to(q.dtype).reshape(q.shape)  # (B, H, R, D)
        d_out = d if value_dense is None else d @ value_dense.mT
        of_new = d @ new_values.mT
        d_new_scores, d_to_prefix = torch.empty_like(of_new), torch.empty_like(to_prefix)
        of_share = None if share is None else d @ value_bias.unsqueeze(-1)
        d_shift = None if key_bias is None else torch.empty_like(of_new[..., :1])
        d_keys, d_values = (
            torch.empty_like(t) if wants[n] else None for n, t in (("keys", keys), ("values", values))
        )
        for n, (part, p) in enumerate(zip(parts(ctx.lengths), kept)):
            d_p = torch.empty_like(p)
            d_p[..., :steps] = of_new[n]
            torch.bmm(d_out[n], values[:, part].mT, out=d_p[..., steps:])
            if of_share is not None:
                d_p[..., steps:] += of_share[n]
            d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
            d_new_scores[n], d_scores = d_scores[..., :steps], d_scores[..., steps:]
            torch.bmm(d_scores, keys[:, part], out=d_to_prefix[n])
            if d_shift is not None:
                torch.sum(d_scores, -1, keepdim=True, out=d_shift[n])
            if d_keys is not None:
                torch.bmm(d_scores.mT, to_prefix[n], out=d_keys[:, part])
            if d_values is not None:
                torch.bmm(p[..., steps:].mT, d_out[n], out=d_values[:, part])
        found = dict.fromkeys(wants)
        found["keys"], found["values"] = d_keys, d_values
        if wants["key_dense"]:
            found["key_dense"] = (d_to_prefix.mT @ q).sum(0)
        if wants["value_dense"]:
            found["value_dense"] = (out.mT @ d).sum(0)
        if wants["query"]:
            d_q = (d_to_prefix if key_dense is None else d_to_prefix @ key_dense).add_(
                d_new_scores @ new_keys
            )
            if d_shift is not None:
                d_q += d_shift * key_bias.unsqueeze(-2)
            found["query"] = d_q.mul_(ctx.scaling).view(upstream.shape).to(ctx.dtype)
        if wants["new_keys"]:
            found["new_keys"] = (d_new_scores.mT @ q).to(ctx.dtype)
        if wants["new_values"]:
            found["new_values"] = (p_new.mT @ d).to(ctx.dtype)
        return *found.values(), None, None, None


def reading(model, layer_prefix):
    """A context manager: within it the model's attention reads a ragged prefix.

    layer_prefix: layer index -> (packed keys, packed values, lengths, key map, value map), called when a layer is reached.
    """

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        keys, values, lengths, *maps = layer_prefix(module.layer_idx)
        out = ragged_attention(query, keys, values, lengths, key, value, scaling, *maps)
        return out.transpose(1, 2), None

    return attention_of(model, attention)
