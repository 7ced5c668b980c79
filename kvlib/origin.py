"""Who computed a cache and over which tokens: what the tensors themselves cannot tell.

A cache of another model with the same shape, of another rope base or of another prompt loads without a word and
gives other text. An `Origin` travels with the cache so that a handoff can refuse it.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kvlib.errors import KvlibError
from kvlib.geometry import RotarySample, name_or_type, rope_difference, rope_settings, rotary_gap

SAMPLED = 16  # neighbouring values out of the middle of every weight


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a cache comes from.

    model: its name. vocabulary: the size of its vocabulary. rope: its rotary settings, for messages; rotary: its own
    cos and sin, which decide. weights: a sample of them, see `sample_weights`. input_ids: (B, T) whole numbers, the
    tokens that the cache covers; None when they are not known.
    """

    model: str
    vocabulary: int
    rope: dict
    rotary: RotarySample | None
    weights: torch.Tensor
    input_ids: torch.Tensor | None = None

    @classmethod
    def of(cls, model, input_ids: torch.Tensor | None = None) -> "Origin":
        """Costs about 1 ms on a model of 272 weight tensors, whatever their size, and waits for no device."""
        config = model.config
        ids = None if input_ids is None else input_ids.detach().clone()
        return cls(
            name_or_type(model),
            config.vocab_size,
            rope_settings(config),
            RotarySample.of(model),
            sample_weights(model),
            ids,
        )

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the sampled weights: the same for a model loaded twice, and in every dtype that holds bfloat16.

        It tells models apart that were trained, pruned or merged differently. It does not see a change that spares
        all sampled values; `kvlib.fingerprint` hashes every weight, and takes as long as that takes.
        """
        return hashlib.sha256(self.weights.cpu().view(torch.int16).numpy().tobytes()).hexdigest()

    def over(self, input_ids: torch.Tensor | None) -> "Origin":
        """The same model, over other tokens."""
        return replace(self, input_ids=input_ids)

    def check_source(self, source) -> None:
        """Raises KvlibError unless `source`, a model or an identity, is the model that computed the cache."""
        wanted, name = (
            (source, source[:12]) if isinstance(source, str) else (identity_of(source), name_or_type(source))
        )
        if self.identity != wanted:
            raise KvlibError(
                f"the cache was computed by {self.model} (weights {self.identity[:12]}), expected the source {name} "
                f"(weights {wanted[:12]}): prefill with that source, or use the map and pair that the cache is for"
            )

    def check_reader(self, model) -> None:
        """Raises KvlibError unless `model` rotates keys and numbers tokens as the cache's model does."""
        if model.config.vocab_size != self.vocabulary:
            raise KvlibError(
                f"the cache is of {self.model} with a vocabulary of {self.vocabulary}, the model {name_or_type(model)} has "
                f"{model.config.vocab_size}: hand over between models with one tokenizer"
            )
        gap = rotary_gap(model, self.rotary)
        if gap > 0:
            raise KvlibError(
                f"the cache's keys were rotated by {self.model} otherwise than {name_or_type(model)} rotates them: "
                f"{rope_difference(self.rope, rope_settings(model.config))}, cos and sin up to {gap:.2g} apart; hand over between "
                "models with one rotary embedding"
            )

    def check_prompt(self, prompt: torch.Tensor, valid: torch.Tensor | None) -> None:
        """Raises KvlibError unless `prompt` (B, T or more) begins with the tokens that the cache covers.

        valid: bool (B, T); padding is not compared.
        """
        if self.input_ids is None:
            return
        ids = self.input_ids.to(prompt.device)
        differs = ids != prompt[:, : ids.shape[1]]
        if valid is not None:
            differs = differs & valid.to(prompt.device)
        if bool(differs.any()):
            row, at = (int(n) for n in differs.nonzero()[0])
            raise KvlibError(
                f"the prompt has token {int(prompt[row, at])} at place {at} of row {row}, the cache was computed over token "
                f"{int(ids[row, at])} there: pass the prompt that was prefilled, tokenised once for both models (an added BOS "
                "shifts it)"
            )


@torch.no_grad()
def sample_weights(model) -> torch.Tensor:
    """`SAMPLED` neighbouring values out of the middle of every weight, bfloat16, in the model's own order."""
    parts = []
    for weight in model.parameters():
        if weight.is_meta or weight.numel() == 0:
            continue
        count = min(SAMPLED, weight.numel())
        start = (weight.numel() - count) // 2
        if weight.is_contiguous():  # one view: short and contiguous pieces are joined by a single kernel
            part = weight.as_strided((count,), (1,), weight.storage_offset() + start)
        else:
            part = weight.flatten()[start : start + count]
        if parts and (part.dtype != parts[0].dtype or part.device != parts[0].device):
            part = part.to(parts[0])
        parts.append(part)
    if not parts:
        raise KvlibError(
            f"the model {name_or_type(model)} holds no weights in memory, expected a loaded one: load it first"
        )
    return torch.cat(parts).bfloat16()


def identity_of(model) -> str:
    """`Origin.identity` of what `model` would compute; see there for what it can tell apart."""
    return Origin.of(model).identity
