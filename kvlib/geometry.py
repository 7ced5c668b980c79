"""What two models must share before one can read the other's cache: shape, full attention, rotary embedding."""

from dataclasses import dataclass

import torch

from kvlib.errors import KvlibError

ROTARY_TOLERANCE = 1e-5  # cos and sin of two float32 models that agree differ by rounding only,
ANGLE_TOLERANCE = 2.0**-22  # and their angles, per position, by units in the last place of a frequency


@dataclass(frozen=True)
class Geometry:
    """What two models must share before one can read the other's cache."""

    layers: int
    heads: int
    head_dim: int

    @classmethod
    def of(cls, model) -> "Geometry":
        """Read from the configuration: `head_dim` need not be hidden size / heads (Minitron: 128, not 96)."""
        config = model.config
        try:
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            return cls(config.num_hidden_layers, heads, head_dim)
        except AttributeError as error:
            raise KvlibError(
                f"{name_or_type(model)} given, whose configuration names no {error.name}, expected a decoder-only language "
                "model: give the language model itself if this one wraps it"
            ) from error


def queries_per_head(model) -> int:
    """Query heads that share one KV head."""
    return model.config.num_attention_heads // Geometry.of(model).heads


def name_or_type(model) -> str:
    return model.config.name_or_path or f"a {model.config.model_type} model"


def windowed_layers(model) -> str | None:
    """What keeps a layer from attending to every position ("a sliding window", …); None when every layer does."""
    config = model.config
    kinds = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
    if kinds:
        return kinds[0]
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return "a sliding window" if sliding else None


def check_full_attention(model) -> None:
    """Raises KvlibError when a layer of `model` does not attend to every position."""
    if kind := windowed_layers(model):
        raise KvlibError(
            f"the model {name_or_type(model)} has layers with {kind}, expected full attention in every layer: "
            "choose another model"
        )


def rope_settings(config) -> dict:
    return dict(getattr(config, "rope_parameters", None) or {})


def rope_difference(given: dict, wanted: dict) -> str:
    """Which settings differ, in words; equal settings can still rotate differently."""
    differ = [name for name in sorted(given.keys() | wanted.keys()) if given.get(name) != wanted.get(name)]
    if differ:
        return ", ".join(f"{name} {given.get(name)} against {wanted.get(name)}" for name in differ)
    return "the settings are the same, but one model's frequencies were rounded or changed (load with dtype= rather than convert)"


def rotary_of(model):
    """A callable: positions (B, T) -> cos, sin (B, T, D) in float32, as the model itself computes them."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    if embedding is None:
        raise KvlibError(
            f"the model {name_or_type(model)} has no rotary embedding of its own (`rotary_emb`), expected one as Llama has: "
            "choose another model"
        )
    device = next(model.parameters()).device

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return embedding(torch.zeros((), dtype=torch.float32, device=device), positions.to(device))

    return rotary


@dataclass(frozen=True, eq=False)
class RotarySample:
    """A model's own cos and sin, (2, P, D) float32, at a few positions. A wrong theta cannot hide from them."""

    positions: tuple[int, ...]
    cos_sin: torch.Tensor

    @classmethod
    def of(cls, model, positions: tuple[int, ...] | None = None) -> "RotarySample | None":
        """At positions up to the model's last; None for a model without a rotary embedding."""
        if getattr(model.base_model, "rotary_emb", None) is None:
            return None
        if positions is None:
            furthest = (getattr(model.config, "max_position_embeddings", None) or 2048) - 1
            positions = tuple(sorted({min(p, furthest) for p in (0, 1, 2, 63, furthest // 2, furthest)}))
        with torch.no_grad():
            cos, sin = rotary_of(model)(torch.tensor([positions]))
        return cls(positions, torch.stack([cos[0], sin[0]]).float())

    def gap(self, other: "RotarySample") -> float:
        """The largest difference from another sample at the same positions, 0 where only rounding differs."""
        if self.cos_sin.shape != other.cos_sin.shape:
            return float("inf")
        difference = (self.cos_sin.cpu() - other.cos_sin.cpu()).abs()
        allowed = ROTARY_TOLERANCE + ANGLE_TOLERANCE * torch.tensor(self.positions, dtype=torch.float32)
        # "not below" and not "above": NaN is a difference too
        return 0.0 if bool((difference <= allowed[:, None]).all()) else float(difference.max())


def rotary_gap(model, known: RotarySample | None) -> float:
    """How far `model`'s cos and sin are from a sample of another's; 0 when they agree or neither has any."""
    own = RotarySample.of(model, known.positions if known is not None else None)
    if own is None or known is None:
        return 0.0 if own is known else float("inf")
    return own.gap(known)
