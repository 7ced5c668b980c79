"""A frozen model's body reading a ragged prefix, differentiable in the map alone: for training on a CPU."""

import contextlib
from collections.abc import Callable

import torch

from kvlib.attaching import attention_of
from kvlib.frozen_layers import FrozenLayer, is_plain_llama
from kvlib.linear import replaced
from kvlib.packed import FrozenLinears
from kvlib.ragged_attention import Kept, PrefixRead, Wanted, attend, attend_back


class FrozenBody:
    """A model's layers as they run fastest: a Llama's by hand, others' own, over oneDNN's products and ours of attention.

    Args:
        model: its weights must not change while this is used. rows: prompts times forced steps of one pass.
    """

    def __init__(self, model, rows: int):
        self.model, self.layers, self.linears = model, {}, None
        if is_plain_llama(model):
            self.layers = {layer: FrozenLayer(layer, rows) for layer in model.base_model.layers}
        else:
            self.linears = FrozenLinears(model, rows)

    @contextlib.contextmanager
    def reading(self, layer_prefix: Callable[[int], PrefixRead]):
        """Within the block the model's attention reads a ragged prefix ahead of its new positions.

        layer_prefix: of a layer's index, called when the layer is reached.
        """

        def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
            prefix = layer_prefix(module.layer_idx)
            out = _Attention.apply(query, key, value, *prefix.learnt, scaling, prefix)
            return out.transpose(1, 2), None

        def forward_of(layer: FrozenLayer):
            def forward(hidden_states, *args, position_embeddings=None, **kwargs):
                return layer(hidden_states, position_embeddings, layer_prefix(layer.number))

            return forward

        with contextlib.ExitStack() as stack:
            stack.enter_context(attention_of(self.model, attention))
            stack.enter_context(replaced({own: forward_of(layer) for own, layer in self.layers.items()}))
            if self.linears is not None:
                stack.enter_context(self.linears.within())
            yield


class _Attention(torch.autograd.Function):
    """`attend` where the rest of the layer is the model's own: query (B, Q, S, D), keys and values (B, H, S, D)."""

    @staticmethod
    def forward(ctx, query, new_keys, new_values, key_dense, value_dense, corrected, scaling, prefix):
        prefix = prefix.with_learnt((key_dense, value_dense, corrected))
        wide, (batch, heads) = prefix.dtype, new_keys.shape[:2]
        q = (query.to(wide) * scaling).reshape(batch, heads, -1, query.shape[-1])
        out, kept = attend(q, new_keys.to(wide), new_values.to(wide), prefix)
        ctx.prefix, ctx.scaling = prefix.with_learnt([None] * 3), scaling
        ctx.save_for_backward(*prefix.learnt, *kept[:-1], *kept.p)
        return out.view(query.shape).to(query.dtype)

    @staticmethod
    def backward(ctx, upstream):
        saved = ctx.saved_tensors
        prefix, kept = ctx.prefix.with_learnt(saved[:3]), Kept(*saved[3:10], list(saved[10:]))
        new, learnt = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3:6]
        d = upstream.to(kept.q.dtype).reshape(kept.q.shape)
        d_q, d_keys, d_values, found = attend_back(d, kept, prefix, Wanted(new, tuple(learnt)))
        own = (None if t is None else t.to(upstream.dtype) for t in (d_keys, d_values))
        d_query = None if d_q is None else d_q.mul_(ctx.scaling).view(upstream.shape).to(upstream.dtype)
        return d_query, *own, *found, None, None
