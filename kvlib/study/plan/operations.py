"""What a computation costs, by formula: floating-point operations, bytes that it must read, layers that it goes through.

A product of (m, k) and (k, n) is 2 m k n operations. A prefill's causal attention counts the half of the square that it
looks at, a handoff's the whole square of its few new positions, which it masks. Norms, rotations and softmaxes are left
out: they are no products.
"""

from dataclasses import dataclass, fields

from kvlib.study.plan.shapes import SIZES, ModelShape


@dataclass(frozen=True)
class Cost:
    """half, single: operations in a 16-bit format and in float32 or wider. read: bytes of weights and caches from the device's
    memory. layers: passes through one layer. link: bytes from the host's memory to the device's. disk: bytes from the disk."""

    half: float = 0.0
    single: float = 0.0
    read: float = 0.0
    layers: float = 0.0
    link: float = 0.0
    disk: float = 0.0

    @property
    def flop(self) -> float:
        return self.half + self.single

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Cost)))

    def __mul__(self, times: float) -> "Cost":
        return Cost(*(getattr(self, f.name) * times for f in fields(Cost)))

    __rmul__ = __mul__


@dataclass(frozen=True)
class Runner:
    """A model in the number format that it computes in."""

    shape: ModelShape
    dtype: str

    @property
    def size(self) -> int:
        return SIZES[self.dtype]

    def flop(self, count: float, **rest) -> Cost:
        """`count` operations in the model's format."""
        kind = "half" if self.size == 2 else "single"
        return Cost(**{kind: count}, **rest)

    def body(self, batch: int, new: int, seen: int = 0, *, stop: bool = False) -> Cost:
        """`new` positions of `batch` prompts after `seen` cached ones. stop: ends with the last layer's keys and values."""
        s, whole = self.shape, self.shape.layers - stop
        products = 2 * batch * new * (whole * s.layer + stop * s.qkv)
        scores = 4 * batch * s.heads * s.head_dim * new * (seen + (new + 1) / 2) * whole
        read = (whole * s.layer + stop * s.qkv) * self.size + s.cache_bytes(batch, seen, self.dtype)
        return self.flop(products + scores, read=read, layers=s.layers)

    def head(self, rows: int) -> Cost:
        return self.flop(2 * rows * self.shape.head, read=self.shape.head * self.size)

    def prefill(self, batch: int, tokens: int, *, hidden: bool = False) -> Cost:
        """`kvlib.cache.prefill`: no logits, and nothing after the last layer's keys and values unless hidden states are wanted."""
        return self.body(batch, tokens, stop=not hidden)

    def oracle(self, batch: int, tokens: int, steps: int) -> Cost:
        """`kvlib.divergence.oracle_reference`: a prefill, then `steps` − 1 tokens one by one, the head on each."""
        more = steps - 1
        one = self.body(batch, 1, tokens) + self.head(batch)
        growing = 4 * batch * self.shape.heads * self.shape.head_dim * self.shape.layers * more * more / 2
        grown = self.shape.cache_bytes(batch, 1, self.dtype) * more * more / 2
        first = self.body(batch, tokens) + self.head(batch)
        return first + more * one + self.flop(growing, read=grown)

    def text(self, batch: int, tokens: int, steps: int) -> Cost:
        """`kvlib.divergence.text_reference`: one pass, no head."""
        return self.body(batch, tokens + steps - 1)

    def forced(self, batch: int, cached: int, steps: int, *, per_head: int | None = None) -> Cost:
        """A handoff over `cached` positions that reads `steps` tokens, the head on each.

        per_head: numbers of a map's matrices for one head's keys (as many for values); D² when None, what a dense one has.
        """
        s = self.shape
        numbers = s.head_dim**2 if per_head is None else per_head
        applied = 4 * batch * s.heads * steps * numbers * s.layers
        return self.body(batch, steps, cached) + self.flop(applied) + self.head(batch * steps)

    def corrected(self, batch: int, cached: int, per_head: int) -> Cost:
        """Every cached vector through a map of `per_head` numbers, for keys as for values."""
        s = self.shape
        products = 4 * batch * s.kv_heads * cached * per_head * s.layers
        return self.flop(products, read=2 * s.cache_bytes(batch, cached, self.dtype), layers=s.layers)

    def training_step(
        self, batch: int, cached: int, steps: int, *, per_head: int | None = None, again: bool = False
    ) -> Cost:
        """Forward and backward of `kvlib.training.forced_kl`; the head in float32.

        Weights and prefixes are frozen, so that backward has one product where training them would have two: only the new
        positions' keys and values, and the map's matrices, get a second. What comes before layer 0's attention gets none.
        again: the layers' forward pass once more (activation checkpointing), but for the MLP's last product, which backward
        does not ask for.
        """
        s, rows = self.shape, batch * steps
        numbers = s.head_dim**2 if per_head is None else per_head
        width = s.heads * s.head_dim
        products = 2 * rows * s.layer * s.layers
        prefix = 4 * rows * width * cached * s.layers
        new = 4 * rows * width * steps * s.layers
        applied = 4 * rows * s.heads * numbers * s.layers
        forward = products + prefix + new + applied
        backward = products - 2 * rows * s.qkv + prefix + new * (2 * s.layers - 1.5) / s.layers + 2 * applied
        once_more = forward - 2 * rows * s.hidden * s.mlp * s.layers
        passes = 3 if again else 2
        weights = s.layer * s.layers * self.size + s.cache_bytes(batch, cached, self.dtype)
        body = self.flop(
            forward + backward + again * once_more, read=passes * weights, layers=passes * s.layers
        )
        return body + Cost(single=6 * rows * s.head, read=3 * s.head * SIZES["float32"])

    def warmup_step(self, batch: int, positions: int, per_head: int) -> Cost:
        """Forward and backward of `kvlib.training.kv_mse` over so many positions of each prompt."""
        s = self.shape
        products = 3 * 4 * batch * s.kv_heads * positions * per_head * s.layers
        return Cost(single=products, layers=s.layers)

    def ridge(self, windows: int, tokens: int) -> Cost:
        """The sums XᵀX and XᵀY of every head, for keys and values, in float64."""
        s = self.shape
        return Cost(single=8 * windows * tokens * s.layers * s.kv_heads * s.head_dim**2)

    def pruning(self, windows: int, tokens: int, source: ModelShape) -> Cost:
        """`kvlib.pruning.prune_width`: a survey of the target, then target and source side by side, with the refits' sums."""
        s, rows = self.shape, windows * tokens
        moments = 2 * rows * s.hidden**2 * (2 * s.layers + 1)
        attention = 2 * rows * s.heads * s.head_dim * tokens * s.layers
        survey = 2 * rows * s.layer * s.layers + attention + moments
        rotated = 2 * rows * s.hidden * source.hidden
        width = source.heads * source.head_dim
        sums = width * (width + source.hidden) + source.mlp * (source.mlp + source.hidden)
        own = (
            2 * rows * source.layers * (source.layer + 2 * 3 * source.hidden * source.mlp / 3 * 2 + sums)
            + attention
        )
        beside = 2 * rows * s.layer * s.layers + attention + 2 * rotated * s.layers
        ends = 2 * rows * (source.hidden**2 + 3 * source.hidden * s.hidden) + 2 * s.head * source.hidden * 2
        return Cost(single=survey + beside + own + ends, layers=4 * s.layers)
