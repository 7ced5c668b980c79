"""The layers of a frozen Llama as one differentiable function each: forward and backward by hand, for training on a CPU.

What a step pays beside its matrix products is many small passes over small tensors. Here queries, keys and values are
one product, gate and up another; a norm, a rotation or an activation is a few passes in each direction, and only what
the backward pass cannot do without is kept. The formulas are those of transformers' Llama; what that model rounds to
its own dtype between two passes stays float32 where it is not written out.
"""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from kvlib.packed import FrozenMatrix
from kvlib.ragged_attention import Kept, PrefixRead, Wanted, attend, attend_back


def is_plain_llama(model) -> bool:
    """Whether every layer is transformers' own Llama layer, with nothing exchanged inside it."""
    layers = getattr(model.base_model, "layers", None)
    return layers is not None and len(layers) > 0 and all(map(_is_plain, layers))


def _is_plain(layer) -> bool:
    parts = {"self_attn": LlamaAttention, "mlp": LlamaMLP}
    parts |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), LlamaRMSNorm)
    if type(layer) is not LlamaDecoderLayer or any(
        type(getattr(layer, n)) is not t for n, t in parts.items()
    ):
        return False
    linears = [m for m in layer.modules() if hasattr(m, "weight") and not isinstance(m, LlamaRMSNorm)]
    own = all(type(m) is nn.Linear for m in linears) and all(
        "forward" not in vars(m) for m in layer.modules()
    )
    return own and layer.self_attn.config.hidden_act == "silu" and not layer.training


def joined(linears: list[nn.Linear], rows: int) -> tuple[FrozenMatrix, torch.Tensor | None]:
    """Several layers over the same input as one: (their matrix, their bias or None)."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    return FrozenMatrix(weight, rows), bias


class FrozenLayer:
    """One decoder layer's weights as it multiplies by them. rows: prompts times forced steps of one pass."""

    def __init__(self, layer: LlamaDecoderLayer, rows: int):
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self.dim, self.scaling = attention.layer_idx, attention.head_dim, attention.scaling
        self.queries = attention.config.num_attention_heads
        self.heads = attention.config.num_key_value_heads
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], rows)
        self.out = joined([attention.o_proj], rows)
        self.gate_up, self.down = joined([mlp.gate_proj, mlp.up_proj], rows), joined([mlp.down_proj], rows)
        self.norms = layer.input_layernorm, layer.post_attention_layernorm

    def __call__(self, x: torch.Tensor, angles: tuple, prefix: PrefixRead) -> torch.Tensor:
        """x (B, S, C) through the layer; angles: cos and sin (B, S, D)."""
        return _Layer.apply(x, *prefix.learnt, self, angles, prefix)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, key_dense, value_dense, corrected, layer, angles, prefix):
        prefix = prefix.with_learnt((key_dense, value_dense, corrected))
        (batch, steps, width), wide = x.shape, prefix.dtype
        flat = x.reshape(-1, width)
        turn = [t.to(wide).unsqueeze(1) for t in angles]  # (B, 1, S, D)
        normed, inverse = norm(flat, layer.norms[0])
        qkv = layer.qkv[0].times(normed, layer.qkv[1]).view(batch, steps, -1, layer.dim).transpose(1, 2)
        qkv = torch.empty(qkv.shape, dtype=wide).copy_(qkv)  # (B, Q + 2 H, S, D), in one pass
        turned = rotated(qkv[:, : -layer.heads], *turn)
        q = (turned[:, : layer.queries] * layer.scaling).view(batch, layer.heads, -1, layer.dim)
        read, kept = attend(q, turned[:, layer.queries :], qkv[:, -layer.heads :], prefix)
        read = read.view(batch, layer.queries, steps, layer.dim).transpose(1, 2)
        read = torch.empty(read.shape, dtype=x.dtype).copy_(read).view(len(flat), -1)
        middle = layer.out[0].times(read, layer.out[1]).add_(flat)
        normed, inverse_middle = norm(middle, layer.norms[1])
        gate_up = layer.gate_up[0].times(normed, layer.gate_up[1])
        gate, up = gate_up.chunk(2, -1)
        out = layer.down[0].times(nn.functional.silu(gate).mul_(up), layer.down[1]).add_(middle)
        ctx.layer, ctx.prefix, ctx.turn = layer, prefix.with_learnt([None] * 3), turn
        ctx.save_for_backward(
            flat, inverse, middle, inverse_middle, gate_up, *prefix.learnt, *kept[:-1], *kept.p
        )
        return out.view(x.shape)

    @staticmethod
    def backward(ctx, upstream):
        flat, inverse, middle, inverse_middle, gate_up, *others = ctx.saved_tensors
        layer, prefix = ctx.layer, ctx.prefix.with_learnt(others[:3])
        kept = Kept(*others[3:10], others[10:])
        wants_input, *learnt = ctx.needs_input_grad[:4]
        (batch, steps, width), wide = upstream.shape, prefix.dtype
        d = upstream.reshape(-1, width)
        gate, up = gate_up.chunk(2, -1)
        d_active, d_gate_up = layer.down[0].back(d), torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, -1)
        torch.mul(d_active, nn.functional.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_active.mul_(up), gate, grad_input=d_gate)
        d = norm_back(layer.gate_up[0].back(d_gate_up), middle, inverse_middle, layer.norms[1]).add_(d)
        d_read = layer.out[0].back(d).view(batch, steps, layer.queries, layer.dim).transpose(1, 2)
        d_read = torch.empty(d_read.shape, dtype=wide).copy_(d_read).view(kept.q.shape)
        wanted = Wanted(wants_input, tuple(learnt))
        d_q, d_keys, d_values, found = attend_back(d_read, kept, prefix, wanted)
        if not wants_input:
            return None, *found, None, None, None
        d_turned = torch.cat([d_q.view(batch, -1, steps, layer.dim).mul_(layer.scaling), d_keys], 1)
        d_qkv = upstream.new_empty(batch, steps, layer.queries + 2 * layer.heads, layer.dim)
        d_qkv[:, :, : -layer.heads] = rotated_back(d_turned, *ctx.turn).transpose(1, 2)
        d_qkv[:, :, -layer.heads :] = d_values.transpose(1, 2)
        d = norm_back(layer.qkv[0].back(d_qkv.view(len(flat), -1)), flat, inverse, layer.norms[0]).add_(d)
        return d.view(upstream.shape), *found, None, None, None


def norm(x: torch.Tensor, module: LlamaRMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of x (R, C), 1 / rms (R, 1)), the latter in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    inverse = wide.square().mean(-1, keepdim=True).add_(module.variance_epsilon).rsqrt_()
    return wide.mul_(inverse).to(x.dtype).mul(module.weight), inverse


def norm_back(d: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, module: LlamaRMSNorm) -> torch.Tensor:
    """The gradient of x, from that of its norm: with n = x / rms and g = w d, (g − n mean(g n)) / rms."""
    normed = x.to(inverse.dtype) * inverse
    g = d.to(inverse.dtype, copy=True).mul_(module.weight)
    g.addcmul_(normed, (g * normed).mean(-1, keepdim=True), value=-1)
    return g.mul_(inverse).to(d.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotary embedding: (x₁, x₂) -> (x₁ c₁ − x₂ s₁, x₂ c₂ + x₁ s₂)."""
    (first, second), (sin_first, sin_second), out = x.chunk(2, -1), sin.chunk(2, -1), x * cos
    left, right = out.chunk(2, -1)
    left.addcmul_(second, sin_first, value=-1)
    right.addcmul_(first, sin_second)
    return out


def rotated_back(d: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The transpose of `rotated`: (d₁ c₁ + d₂ s₂, d₂ c₂ − d₁ s₁)."""
    (first, second), (sin_first, sin_second), out = d.chunk(2, -1), sin.chunk(2, -1), d * cos
    left, right = out.chunk(2, -1)
    left.addcmul_(second, sin_second)
    right.addcmul_(first, sin_first, value=-1)
    return out
