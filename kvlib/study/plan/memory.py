"""How many bytes of device memory are in use at the peak of a computation, by formula, from shapes and counts.

R is the number of positions that go through the model together, in units of one number of the model's format. What is
counted is what a decoder with gated MLPs has alive at once: the embedding's output, the layer's input, the residual
stream and its norm, and either the MLP's gate, up and product or the attention's rotated queries.
"""

from dataclasses import dataclass

from kvlib.divergence import ROWS_AT_ONCE
from kvlib.study.plan.operations import Runner
from kvlib.study.plan.shapes import SIZES
from kvlib.training import KL_ROWS

FLOAT32 = SIZES["float32"]
QUERY_ROWS = 4096  # of `kvlib.attention`: more queries per KV head than this are taken in parts


@dataclass(frozen=True)
class Peak:
    """Bytes in use at the worst moment of one phase, by what they are for."""

    phase: str
    weights: float = 0.0
    caches: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    optimiser: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.caches + self.activations + self.logits + self.optimiser


def prefill_activations(runner: Runner, batch: int, tokens: int) -> float:
    """Beside weights and caches, in a pass over `tokens` positions of `batch` prompts."""
    s, rows = runner.shape, batch * tokens
    return rows * max(3 * s.mlp + 4 * s.hidden, 3 * s.hidden + 4 * s.heads * s.head_dim) * runner.size


def scores_numbers(runner: Runner, batch: int, cached: int, steps: int) -> float:
    """Scores of one layer of two-segment attention, at most as many as are made at a time."""
    s = runner.shape
    return min(s.heads // s.kv_heads * steps, QUERY_ROWS) * s.kv_heads * batch * (cached + steps)


def forced_activations(runner: Runner, batch: int, cached: int, steps: int) -> float:
    """Of a handoff that reads `steps` tokens over `cached` positions: the MLP's, or the prefix's scores, those of both
    segments and their float32 softmax."""
    s, size = runner.shape, runner.size
    scores = scores_numbers(runner, batch, cached, steps) * (2 * size + max(size, FLOAT32))
    beside = batch * steps * (4 * s.hidden + 4 * s.heads * s.head_dim) * size
    return max(prefill_activations(runner, batch, steps), scores + beside)


def divergence_logits(runner: Runner, batch: int, steps: int, on_cpu: bool) -> float:
    """Of `kvlib.divergence.divergence`: both logits; and both as log-probabilities in float32 with three terms of the sum, of
    all rows at once on a card, of a few on a processor."""
    rows, wide = batch * steps, max(runner.size, FLOAT32)
    at_once = min(rows, ROWS_AT_ONCE) if on_cpu else rows
    return runner.shape.vocabulary * (rows * 2 * runner.size + at_once * 5 * wide)


def prefill(runner: Runner, batch: int, tokens: int, *, hidden: bool = False) -> Peak:
    """`kvlib.cache.prefill`. Without hidden states the last layer has no MLP, and its cache comes after the last one's."""
    s = runner.shape
    whole = s.cache_bytes(batch, tokens, runner.dtype)
    rows = batch * tokens * runner.size
    in_mlp = rows * (3 * s.mlp + 4 * s.hidden) + whole * (1 if hidden else (s.layers - 1) / s.layers)
    in_attention = rows * (3 * s.hidden + 4 * s.heads * s.head_dim) + whole
    peak = max(in_mlp, in_attention)
    return Peak("prefill", s.weight_bytes(runner.dtype), whole, peak - whole)


def oracle(runner: Runner, batch: int, tokens: int, steps: int) -> Peak:
    """`kvlib.divergence.oracle_reference`: the prompt's pass; afterwards a cache that grows one layer at a time by copying."""
    s = runner.shape
    cache = s.cache_bytes(batch, tokens + steps - 1, runner.dtype)
    first = s.cache_bytes(batch, tokens, runner.dtype) + prefill_activations(runner, batch, tokens)
    growing = cache * (1 + 1 / s.layers)
    logits = batch * s.vocabulary * runner.size
    return Peak("oracle", s.weight_bytes(runner.dtype), cache, max(first, growing) - cache, logits)


def kept_per_row(runner: Runner, cached: int, steps: int) -> float:
    """Bytes that backward needs of one layer for one position: MLP, norms, queries, new keys and values, probabilities."""
    s, size = runner.shape, runner.size
    width = s.heads * s.head_dim
    norms = 2 * s.hidden * (FLOAT32 if size == 2 else size)
    probabilities = s.heads * (cached + steps) * (FLOAT32 if size == FLOAT32 else FLOAT32 + size)
    return (3 * s.mlp + 2 * width + 2 * s.kv_heads * s.head_dim) * size + norms + probabilities


def training(
    runner: Runner, batch: int, cached: int, steps: int, parameters: int, *, features: int = 0, again: bool = False,
    on_their_way: int = 0, on_cpu: bool = False,
) -> Peak:  # fmt: skip
    """A step of `kvlib.training.train` through the frozen target, over one padded micro-batch.

    parameters: of the map. features: numbers that the map makes of each cached one and keeps for backward: none where
    attention absorbs it, one where it cannot, two for a quadratic map; until the last layer is read, the cache is then
    there as it was and corrected. again: activations are computed again, layer by layer. on_their_way: prompts whose caches
    are on the device unpadded, those of the step and of the next one. on_cpu: the head's softmax goes over a few rows at a
    time.
    """
    s, rows, size = runner.shape, batch * steps, runner.size
    # every prompt gets the map's matrices of its own, or there would be no one product over all heads of all prompts
    layer = rows * kept_per_row(runner, cached, steps) + batch * parameters / s.layers * size
    made = features * s.cache_bytes(batch, cached, "float32")
    corrected = s.cache_bytes(batch, cached, runner.dtype) if features else 0
    scores = 2 * scores_numbers(runner, batch, cached, steps) * size
    logits = rows * s.vocabulary * FLOAT32 * (2 + 3 * (min(rows, KL_ROWS) / rows if on_cpu else 1))
    at_the_head = rows * 2 * s.hidden * size
    if again:  # what enters each layer and its new keys and values; then one layer at a time, when the logits are gone
        kept = s.layers * rows * (s.hidden + 2 * s.kv_heads * s.head_dim) * size
        in_attention = layer + scores + (made + corrected) / s.layers
    else:
        kept = s.layers * layer + made
        in_attention = scores - rows * 3 * s.mlp * size + corrected
    return Peak(
        "training",
        s.weight_bytes(runner.dtype) + s.head * FLOAT32,
        s.cache_bytes(batch + on_their_way, cached, runner.dtype),
        kept + max(at_the_head, in_attention - logits),
        logits,
        parameters * FLOAT32 * 5,  # weights, gradients, two moments, the snapshot that a step hands out
    )


def scoring(
    runner: Runner, batch: int, cached: int, steps: int, *, copies: int = 2, on_cpu: bool = False
) -> Peak:
    """A path over one batch of stored prompts, the new positions' own keys and values beside the prefix.

    copies: of the prefix, an in-place map's own among them.
    """
    activations = forced_activations(runner, batch, cached, steps)
    logits = divergence_logits(runner, batch, steps, on_cpu)  # by then the activations are gone
    return Peak(
        "scoring",
        runner.shape.weight_bytes(runner.dtype),
        runner.shape.cache_bytes(batch, copies * cached + steps, runner.dtype),
        max(0.0, activations - logits),
        logits,
    )
