"""Train a residual map: KV-MSE warm-up, then KL along forced text, through a frozen target."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvlib.attaching import attach, compute_dtype
from kvlib.attention import IDENTITY
from kvlib.cache import PrefixCache, forward, handoff_cache
from kvlib.frozen_body import FrozenBody
from kvlib.learnt_prefix import prefix_reads
from kvlib.maps.residual import WEIGHTS, ResidualMap
from kvlib.packed import FrozenMatrix
from kvlib.pair import rotary_of
from kvlib.ragged import RaggedPrefix
from kvlib.warmup import kv_mse

KL_ROWS = 16  # of logits at a time


@dataclass(frozen=True)
class Batch:
    """One step's data, cut from longer windows at a position of each prompt's own.

    source: the source's cache of B prompts. target: the target's over the same positions, for the warm-up; None where it
    was not asked for. inputs: (B, S) tokens read at the forced steps. hidden: (B, S, C) native's final hidden states.
    """

    source: RaggedPrefix
    target: RaggedPrefix | None
    inputs: torch.Tensor
    hidden: torch.Tensor

    def select(self, prompts: slice) -> "Batch":
        target = None if self.target is None else self.target.select(prompts)
        return Batch(self.source.select(prompts), target, self.inputs[prompts], self.hidden[prompts])


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
    frozen: "Frozen | None" = None,
) -> Iterator[Step]:
    """Yield after every step; only the map's four weights change. Stops after yielding a loss that is not finite.

    Args:
        target: frozen model, in the dtype to compute in. initial: float32 map.
        batches: step number from 0 and whether target caches are needed -> `Batch`.
        steps: in all, `warmup_steps` of KV-MSE included. learning_rate: Adam's, with a cosine decay to a tenth.
        head_weight: the target's output embedding (V, C), float32: logits in half precision would be noise.
        micro_batch: prompts per forward and backward pass; gradients add up to the whole batch's.
        frozen: the target and its head as `Frozen.of` makes them, for several trainings; made here when None.
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
            piece = batch.select(slice(start, start + size))
            share = piece.source.batch / batch.source.batch
            if warm:
                value = kv_mse(current, piece.source, piece.target, rotary)
            else:
                frozen = frozen or Frozen.of(target, head_weight, piece.inputs.numel())
                value = forced_kl(frozen, current, piece, rotary)
            (value * share).backward()
            loss += float(value.detach()) * share
        if math.isfinite(loss):
            optimiser.step()
        snapshot = replace(initial, **{name: weight.detach().clone() for name, weight in weights.items()})
        yield Step(number + 1, "warmup" if warm else "kl", loss, snapshot)
        if not math.isfinite(loss):
            return


@dataclass(frozen=True)
class Frozen:
    """What training reads and never changes.

    body: the target's layers as they run fastest on a CPU; None for the model as it is over one padded batch, which
    other devices do best with. head: (V, C).
    """

    target: object
    body: FrozenBody | None
    head: FrozenMatrix

    @classmethod
    def of(cls, target, head_weight: torch.Tensor, rows: int | None) -> "Frozen":
        """rows: prompts times forced steps of one pass; None for torch's own products everywhere."""
        fast = rows is not None and head_weight.device.type == "cpu"
        return cls(target, FrozenBody(target, rows) if fast else None, FrozenMatrix(head_weight, rows))


def forced_kl(frozen: Frozen, cache_map: ResidualMap, batch: Batch, rotary=None) -> torch.Tensor:
    """Mean over prompts and steps of KL(native ‖ path), differentiable in the map's weights."""
    read = _read_padded if frozen.body is None else _read_ragged
    hidden = read(frozen, cache_map, batch, rotary)
    return HeadKL.apply(hidden.flatten(0, 1), batch.hidden.flatten(0, 1), frozen.head)


def _read_ragged(frozen: Frozen, cache_map: ResidualMap, batch: Batch, rotary=None) -> torch.Tensor:
    """The target's final hidden states (B, S, C) over the prefix as the map corrects it."""
    prefix = batch.source
    angles = rotary(prefix.positions(roomy=True)) if rotary else None
    offsets = torch.arange(batch.inputs.shape[1], device=prefix.device)
    positions = torch.tensor(prefix.lengths, device=prefix.device).unsqueeze(1) + offsets
    with frozen.body.reading(prefix_reads(cache_map, prefix, compute_dtype(frozen.target), angles)):
        return forward(frozen.target, batch.inputs, None, positions)


def _read_padded(frozen: Frozen, cache_map: ResidualMap, batch: Batch, rotary=None) -> torch.Tensor:
    """As `_read_ragged`, by the attention of a handoff and in torch's own products."""
    target, prefix = frozen.target, batch.source.padded()
    if cache_map.why_not_affine:
        angles, dtype, wide = (
            rotary(prefix.positions) if rotary else None,
            prefix.dtype,
            compute_dtype(target),
        )
        pairs = [
            cache_map.correct(n, k.to(wide), v.to(wide), angles)
            for n, (k, v) in enumerate(zip(prefix.keys, prefix.values))
        ]
        prefix = PrefixCache([k.to(dtype) for k, _ in pairs], [v.to(dtype) for _, v in pairs], prefix.valid)
        maps = [(IDENTITY, IDENTITY)] * len(pairs)
    else:
        dtype = compute_dtype(target)
        maps = [tuple(m.to(dtype) for m in cache_map.affine(n)) for n in range(len(prefix.keys))]
    cache = handoff_cache(prefix)
    offsets = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
    restore = attach(target, cache, maps, prefix.valid)
    try:
        return forward(target, batch.inputs, cache, prefix.lengths.unsqueeze(1) + offsets)
    finally:
        restore()


class HeadKL(torch.autograd.Function):
    """mean KL(softmax(n Wᵀ) ‖ softmax(h Wᵀ)) over rows; its gradient (softmax(h Wᵀ) − softmax(n Wᵀ)) W / rows.

    Computed at once in the forward pass, so that no logits are kept: at V = 128,256 they are the largest tensors. What
    comes between the products goes over a few rows at a time, which stay in the processor's cache.
    """

    @staticmethod
    def forward(ctx, hidden, native_hidden, head: FrozenMatrix):  # (R, C), (R, C), (V, C)
        path, native = (head.times(t.to(head.dtype)) for t in (hidden, native_hidden))  # (R, V)
        kl = path.new_empty(len(path))
        size = KL_ROWS if path.device.type == "cpu" else len(path)
        for start in range(0, len(path), size):
            rows = slice(start, start + size)
            log_p, log_q = native[rows].log_softmax(-1), path[rows].log_softmax(-1)
            p = log_p.exp()
            torch.sum(log_p.sub_(log_q).mul_(p), -1, out=kl[rows])
            torch.sub(log_q.exp_(), p, out=path[rows])  # the gradient of these rows' logits
        ctx.save_for_backward((head.back(path) / len(hidden)).to(hidden.dtype))
        return kl.mean()

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None
