"""Train a residual map: KV-MSE warm-up, then KL along forced text, through a frozen target."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvlib.attaching import attach, compute_dtype
from kvlib.attention import IDENTITY
from kvlib.cache import forward, handoff_cache
from kvlib.frozen_body import FrozenBody
from kvlib.kernels.kl import c_kl
from kvlib.learnt_prefix import prefix_reads
from kvlib.maps.residual import WEIGHTS, ResidualMap
from kvlib.packed import FrozenMatrix
from kvlib.pair import rotary_of
from kvlib.ragged import RaggedPrefix
from kvlib.recomputing import recomputed
from kvlib.room import Room
from kvlib.streaming import ahead
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
    """What one step did. `phase` is "warmup" (loss: KV-MSE relative to the target's energy) or "kl" (nats).

    micro_batch: how many prompts went through at once.
    """

    number: int
    phase: str
    loss: float
    map: ResidualMap
    micro_batch: int = 0


def train(
    target,
    initial: ResidualMap,
    batches: Callable[[int, bool], Batch],
    *,
    steps: int,
    warmup_steps: int,
    learning_rate: float,
    head_weight: torch.Tensor,
    micro_batch: "int | Room | None" = None,
    frozen: "Frozen | None" = None,
) -> Iterator[Step]:
    """Yield after every step; only the map's four weights change. Stops after yielding a loss that is not finite.

    A step for which memory runs out is done again with half as many prompts at once, and those after it like it.

    Args:
        target: frozen model, in the dtype to compute in. initial: float32 map, on the target's device.
        batches: step number from 0 and whether target caches are needed -> `Batch`.
        steps: in all, `warmup_steps` of KV-MSE included. learning_rate: Adam's, with a cosine decay to a tenth.
        head_weight: the target's output embedding (V, C), float32: logits in half precision would be noise.
        micro_batch: prompts per forward and backward pass; gradients add up to the whole batch's. A `Room` where the
            caller wants to know what memory sufficed for.
        frozen: the target and its head as `Frozen.of` makes them, for several trainings; made here when None.
    """
    weights = {name: getattr(initial, name).detach().clone().requires_grad_(True) for name in WEIGHTS}
    current = replace(initial, **weights)
    rotary = rotary_of(target) if current.needs_rotary else None
    device, room = next(target.parameters()).device, micro_batch
    fused = device.type == "cpu" or None  # one pass over a weight; elsewhere torch chooses
    optimiser = torch.optim.Adam(weights.values(), lr=learning_rate, betas=(0.9, 0.95), fused=fused)
    if not isinstance(room, Room):
        room = Room("step's prompts", micro_batch or sys.maxsize, "shorten the prompts or the windows")
    with ahead(((n, n < warmup_steps) for n in range(steps)), lambda of: batches(*of), device) as stream:
        for number, batch in enumerate(stream):
            warm = number < warmup_steps
            for group in optimiser.param_groups:
                group["lr"] = learning_rate * (0.55 + 0.45 * math.cos(math.pi * number / steps))
            if not warm and frozen is None:
                frozen = Frozen.of(
                    target, head_weight, min(room.most, batch.source.batch) * batch.inputs.shape[1]
                )

            def gradients(most: int, batch=batch, warm=warm, frozen=frozen) -> float:
                optimiser.zero_grad(set_to_none=True)
                loss = 0.0
                for start in range(0, batch.source.batch, most):
                    piece = batch.select(slice(start, start + most))
                    share = piece.source.batch / batch.source.batch
                    source, target_cache = piece.source, piece.target
                    value = (
                        kv_mse(current, source, target_cache, rotary)
                        if warm
                        else forced_kl(frozen, current, piece, rotary)
                    )
                    (value * share).backward()
                    loss += float(value.detach()) * share
                return loss

            room.most = min(room.most, batch.source.batch)
            loss = room.whole(gradients)
            if math.isfinite(loss):
                optimiser.step()
            snapshot = {name: weight.detach().clone() for name, weight in weights.items()}
            phase = "warmup" if warm else "kl"
            yield Step(number + 1, phase, loss, replace(initial, **snapshot), room.most)
            if not math.isfinite(loss):
                return


@dataclass(frozen=True)
class Frozen:
    """What training reads and never changes.

    body: the target's layers as they run fastest on a CPU; None for the model as it is over one padded batch, which
    other devices do best with. head: (V, C). recompute: whether the target's layers are computed again in the backward
    pass instead of keeping what they computed; always over one padded batch.
    """

    target: object
    body: FrozenBody | None
    head: FrozenMatrix
    recompute: bool = False

    @classmethod
    def of(cls, target, head_weight: torch.Tensor, rows: int | None, recompute: bool = False) -> "Frozen":
        """rows: prompts times forced steps of one pass; None for torch's own products everywhere."""
        fast = rows is not None and head_weight.device.type == "cpu"
        body = FrozenBody(target, rows) if fast and not recompute else None
        return cls(target, body, FrozenMatrix(head_weight, rows), recompute)


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
    wide, angles = compute_dtype(target), rotary(prefix.positions) if rotary else None
    affine = cache_map.why_not_affine is None
    maps = [(IDENTITY, IDENTITY)] * len(prefix.keys)
    if affine:
        maps = [tuple(m.to(wide) for m in cache_map.affine(n)) for n in range(len(prefix.keys))]
    cache = handoff_cache(prefix)

    def correct(layer: int) -> None:
        held = cache.layers[layer]
        pair = prefix.keys[layer].to(wide), prefix.values[layer].to(wide)
        # rounded to the cache's dtype, as a handoff writes it there
        new = (t.to(prefix.dtype) for t in cache_map.correct(layer, *pair, angles))
        held.prefix_keys, held.prefix_values = new

    offsets = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)

    @contextlib.contextmanager
    def attached():
        restore = attach(target, cache, maps, prefix.valid, None if affine else correct)
        try:
            yield
        finally:
            restore()

    with (
        attached(),
        recomputed(target, cache, prefix, attached) if frozen.recompute else contextlib.nullcontext(),
    ):
        return forward(target, batch.inputs, cache, prefix.lengths.unsqueeze(1) + offsets)


class HeadKL(torch.autograd.Function):
    """mean KL(softmax(n Wᵀ) ‖ softmax(h Wᵀ)) over rows; its gradient (softmax(h Wᵀ) − softmax(n Wᵀ)) W / rows.

    Computed at once in the forward pass, so that no logits are kept: at V = 128,256 they are the largest tensors.
    """

    @staticmethod
    def forward(ctx, hidden, native_hidden, head: FrozenMatrix):  # (R, C), (R, C), (V, C)
        path, native = (head.times(t.to(head.dtype)) for t in (hidden, native_hidden))  # (R, V)
        kl = kl_and_gradient(path, native)
        ctx.save_for_backward(head.back(path).to(hidden.dtype))
        return kl.mean()

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None


def kl_and_gradient(path: torch.Tensor, native: torch.Tensor) -> torch.Tensor:
    """KL(softmax(native) ‖ softmax(path)) of each row (R,), logits (R, V); the gradient of its mean takes the path's place.

    On a CPU in C where there is a compiler, else over a few rows at a time, which stay in the processor's cache.
    """
    on_cpu = path.device.type == "cpu"
    if on_cpu and path.dtype == torch.float32 and (compiled := c_kl()) is not None:
        return compiled(path, native)
    kl = path.new_empty(len(path))
    size = KL_ROWS if on_cpu else len(path)
    for start in range(0, len(path), size):
        rows = slice(start, start + size)
        log_p, log_q = native[rows].log_softmax(-1), path[rows].log_softmax(-1)
        p = log_p.exp()
        torch.sum(log_p.sub_(log_q).mul_(p), -1, out=kl[rows])
        torch.sub(log_q.exp_(), p, out=path[rows]).div_(len(path))
    return kl
