"""Train a residual map: KV-MSE warm-up, then KL along forced text, through a frozen target."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvlib.attaching import attach, compute_dtype
from kvlib.attention import IDENTITY
from kvlib.cache import PrefixCache, forward, handoff_cache
from kvlib.maps.residual import WEIGHTS, ResidualMap
from kvlib.pair import rotary_of

MSE_POSITIONS = 128  # per prompt of a warm-up step


@dataclass(frozen=True)
class Batch:
    """One step's data, cut from longer windows at a position of each prompt's own.

    source: the source's cache (B prompts, right-padded, `valid` set). target: the target's over the same positions,
    for the warm-up. inputs: (B, S) tokens read at the forced steps. hidden: (B, S, C) native's final hidden states.
    """

    source: PrefixCache
    target: PrefixCache
    inputs: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class Step:
    """What one step did. `phase` is "warmup" (loss: KV-MSE relative to the target's energy) or "kl" (nats)."""

    number: int
    phase: str
    loss: float
    map: ResidualMap


def train(
    target,
    initial: ResidualMap,
    batches: Callable[[int, bool], Batch],
    *,
    steps: int,
    warmup_steps: int,
    learning_rate: float,
    head_weight: torch.Tensor,
    micro_batch: int | None = None,
) -> Iterator[Step]:
    """Yield after every step; only the map's four weights change. Stops after yielding a loss that is not finite.

    Args:
        target: frozen model, in the dtype to compute in. initial: float32 map.
        batches: step number from 0 and whether target caches are needed -> `Batch`.
        steps: in all, `warmup_steps` of KV-MSE included. learning_rate: Adam's, with a cosine decay to a tenth.
        head_weight: the target's output embedding (V, C), float32: logits in half precision would be noise.
        micro_batch: prompts per forward and backward pass; gradients add up to the whole batch's.
    """
    weights = {name: getattr(initial, name).detach().clone().requires_grad_(True) for name in WEIGHTS}
    current = replace(initial, **weights)
    optimiser = torch.optim.Adam(weights.values(), lr=learning_rate, betas=(0.9, 0.95))
    rotary = rotary_of(target) if current.needs_rotary else None
    for number in range(steps):
        warm = number < warmup_steps
        for group in optimiser.param_groups:
            group["lr"] = learning_rate * (0.55 + 0.45 * math.cos(math.pi * number / steps))
        batch = batches(number, warm)
        optimiser.zero_grad(set_to_none=True)
        size = micro_batch or batch.source.batch
        loss = 0.0
        for start in range(0, batch.source.batch, size):
            part = slice(start, start + size)
            share = len(range(*part.indices(batch.source.batch))) / batch.source.batch
            piece = Batch(batch.source.select(part), batch.target.select(part) if warm else batch.target,
                          batch.inputs[part], batch.hidden[part])  # fmt: skip
            value = (
                kv_mse(current, piece, rotary)
                if warm
                else forced_kl(target, current, piece, head_weight, rotary)
            )
            (value * share).backward()
            loss += float(value.detach()) * share
        if math.isfinite(loss):
            optimiser.step()
        snapshot = replace(initial, **{name: weight.detach().clone() for name, weight in weights.items()})
        yield Step(number + 1, "warmup" if warm else "kl", loss, snapshot)
        if not math.isfinite(loss):
            return


def kv_mse(cache_map: ResidualMap, batch: Batch, rotary=None) -> torch.Tensor:
    """Mean over prompts, layers, heads, K and V of |x' − y|² / |y|², y the target's cached vectors.

    Over evenly spaced positions, about `MSE_POSITIONS` of them: neighbours say much the same.
    """
    some = slice(None, None, max(1, batch.source.tokens // MSE_POSITIONS))
    valid = batch.source.valid[:, None, some, None]  # (B, 1, T, 1)
    angles = tuple(t[:, some] for t in rotary(batch.source.positions)) if rotary else None
    total = 0.0
    for layer, (keys, values) in enumerate(zip(batch.source.keys, batch.source.values)):
        corrected = cache_map.correct(layer, keys[:, :, some].float(), values[:, :, some].float(), angles)
        targets = (batch.target.keys[layer], batch.target.values[layer])
        for ours, theirs in zip(corrected, (t[:, :, some].float() for t in targets)):
            error = ((ours - theirs) * valid).pow(2).sum((2, 3))  # (B, H)
            total = total + (error / (theirs * valid).pow(2).sum((2, 3))).mean()
    return total / (2 * len(batch.source.keys))


def forced_kl(
    target, cache_map: ResidualMap, batch: Batch, head_weight: torch.Tensor, rotary=None
) -> torch.Tensor:
    """Mean over prompts and steps of KL(native ‖ path), differentiable in the map's weights."""
    prefix = batch.source
    layers = range(len(prefix.keys))
    if cache_map.why_not_affine:
        angles = rotary(prefix.positions) if rotary else None
        pairs = [
            cache_map.correct(i, prefix.keys[i].float(), prefix.values[i].float(), angles) for i in layers
        ]
        dtype = prefix.dtype
        prefix = PrefixCache([k.to(dtype) for k, _ in pairs], [v.to(dtype) for _, v in pairs], prefix.valid)
        maps = [(IDENTITY, IDENTITY)] * len(pairs)
    else:
        dtype = compute_dtype(target)
        maps = [tuple(m.to(dtype) for m in cache_map.affine(i)) for i in layers]
    cache = handoff_cache(prefix)
    offsets = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
    restore = attach(target, cache, maps, prefix.valid)
    try:
        hidden = forward(target, batch.inputs, cache, prefix.lengths.unsqueeze(1) + offsets)
    finally:
        restore()
    return HeadKL.apply(hidden.flatten(0, 1), batch.hidden.flatten(0, 1), head_weight)


class HeadKL(torch.autograd.Function):
    """mean KL(softmax(n Wᵀ) ‖ softmax(h Wᵀ)) over rows; its gradient (softmax(h Wᵀ) − softmax(n Wᵀ)) W / rows.

    Computed at once in the forward pass, so that no logits are kept: at V = 128,256 they are the largest tensors.
    """

    @staticmethod
    def forward(ctx, hidden, native_hidden, head_weight):  # (R, C), (R, C), (V, C)
        path = hidden.float() @ head_weight.T
        native = native_hidden.float() @ head_weight.T
        path_norm, native_norm = path.logsumexp(-1, keepdim=True), native.logsumexp(-1, keepdim=True)
        p = (native - native_norm).exp_()
        # Σ p (log p − log q), without keeping either logarithm
        kl = (p * native.sub_(path)).sum(-1, keepdim=True) - native_norm + path_norm
        gradient = path.sub_(path_norm).exp_().sub_(p)
        ctx.save_for_backward((gradient @ head_weight / len(hidden)).to(hidden.dtype))
        return kl.mean()

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None
