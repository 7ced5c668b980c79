"""A prompt's key-value cache as plain tensors; with `cache_layers`, all that touches transformers' cache classes."""

import contextlib
import inspect
import operator
from typing import Literal, overload

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvlib import guards
from kvlib.cache_layers import CacheIsFull, HandoffLayer, check_filled, filled_cache
from kvlib.errors import KvlibError
from kvlib.geometry import Geometry, check_full_attention
from kvlib.guards import check_prompt
from kvlib.linear import fast_linears
from kvlib.marks import Mark, share_memory
from kvlib.origin import Origin


class PrefixCache:
    """Keys (after RoPE) and values of a prompt's first `T` positions.

    Args:
        keys, values: one tensor (B, H, T, D) per layer.
        valid: bool (B, T), false at padding; None when nothing is padded.
        origin: who computed them, over which tokens; None when that is not known.
        corrected_by: the kind of map that was applied to the tensors, None for a model's own cache. Every cache that
            `slice`, `select` or `to` made of the same memory says the same, whichever of them is corrected.

    Tensors are shared, never copied; `clone` makes a copy.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        valid: torch.Tensor | None = None,
        *,
        origin: Origin | None = None,
        corrected_by: str | None = None,
    ):
        keys, values = guards.check_layers(keys, values)
        guards.check_padding(valid, keys[0])
        ids = None if origin is None else origin.input_ids
        if ids is not None and ids.shape != (keys[0].shape[0], keys[0].shape[2]):
            raise KvlibError(
                f"the cache is over {(keys[0].shape[0], keys[0].shape[2])} positions as (B, T) and is said to be of token ids "
                f"{tuple(ids.shape)}, expected as many: pass the ids that were prefilled"
            )
        self.keys, self.values, self.valid = keys, values, valid
        self.origin, self._mark = origin, Mark(corrected_by)

    def like(self, keys, values, valid, input_ids=None) -> "PrefixCache":
        """The same cache with other tensors, or views of its own; input_ids: the origin's, cut as they are."""
        origin = None if self.origin is None else self.origin.over(input_ids)
        made = PrefixCache(keys, values, valid, origin=origin, corrected_by=self.corrected_by)
        if share_memory(made.keys + made.values, self.keys + self.values):
            made._mark = self._mark
        return made

    @property
    def corrected_by(self) -> str | None:
        return self._mark.kind

    @corrected_by.setter
    def corrected_by(self, kind: str | None) -> None:
        self._mark.kind = kind

    @property
    def input_ids(self) -> torch.Tensor | None:
        """The tokens that it covers, (B, T), where they are known."""
        return None if self.origin is None else self.origin.input_ids

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def geometry(self) -> Geometry:
        return Geometry(len(self.keys), self.keys[0].shape[1], self.keys[0].shape[3])

    @property
    def positions(self) -> torch.Tensor:
        """Rotary position of every entry, (B, T); padded entries count from zero at the first valid one."""
        if self.valid is None:
            return torch.arange(self.tokens, device=self.device).expand(self.batch, -1)
        return (self.valid.long().cumsum(-1) - 1).clamp(min=0)

    @property
    def lengths(self) -> torch.Tensor:
        """Number of valid positions per prompt, (B,), which is the position of the next token."""
        if self.valid is None:
            return torch.full((self.batch,), self.tokens, device=self.device)
        return self.valid.sum(-1)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self.keys, *self.values])

    def slice(self, tokens: int) -> "PrefixCache":
        """The first `tokens` positions, as views."""
        try:
            wanted = operator.index(tokens)
        except TypeError:
            wanted = 0
        if not 0 < wanted <= self.tokens:
            raise KvlibError(
                f"{tokens} positions asked of a cache that has {self.tokens}: ask for 1 to {self.tokens}"
            )
        valid, ids = (None if t is None else t[:, :wanted] for t in (self.valid, self.input_ids))
        return self.like(
            [k[:, :, :wanted] for k in self.keys], [v[:, :, :wanted] for v in self.values], valid, ids
        )

    def select(self, prompts) -> "PrefixCache":
        """The prompts at these indices of the batch (a list, a slice or a tensor)."""
        rows = guards.chosen_rows(prompts, self.batch)
        valid, ids = (None if t is None else t[rows.to(t.device)] for t in (self.valid, self.input_ids))
        part = prompts if isinstance(prompts, slice) else rows.to(self.device)  # a slice gives views
        return self.like([k[part] for k in self.keys], [v[part] for v in self.values], valid, ids)

    def clone(self) -> "PrefixCache":
        valid = None if self.valid is None else self.valid.clone()
        return self.like(
            [k.clone() for k in self.keys], [v.clone() for v in self.values], valid, self.input_ids
        )

    def to(self, *args, **kwargs) -> "PrefixCache":
        """Every tensor through `Tensor.to` (a device or a dtype)."""
        keys, values = (guards.converted(tensors, *args, **kwargs) for tensors in (self.keys, self.values))
        valid, ids = (None if t is None else t.to(keys[0].device) for t in (self.valid, self.input_ids))
        return self.like(keys, values, valid, ids)

    def check_finite(self, owner: str) -> "PrefixCache":
        """Raises KvlibError at the first layer that holds NaN or infinity; returns itself."""
        guards.check_finite(self, owner)
        return self

    def check_fits(self, model, owner: str = "the cache") -> "PrefixCache":
        """Raises KvlibError unless `model` can read this cache: geometry, dtype, device, positions, and, where the
        origin is known, vocabulary and rotary embedding; returns itself."""
        guards.check_fits(self, model, owner)
        return self

    def to_dynamic(self) -> DynamicCache:
        """A transformers cache over the same tensors (appending concatenates, so they are not changed)."""
        if self.valid is not None and not bool(self.valid.all()):
            raise KvlibError(
                "a padded cache given, expected none: a transformers cache has no place for the mask; take the prompts one by "
                "one with `select` and cut their padding"
            )
        return DynamicCache(list(zip(self.keys, self.values)))

    @classmethod
    def from_dynamic(cls, cache: Cache, model=None, input_ids: torch.Tensor | None = None) -> "PrefixCache":
        """Take the tensors out of a transformers cache whose layers all keep every position.

        Args:
            model: which computed it. input_ids: (B, T) over which tokens. Say both where they are known: a handoff can
                then tell a cache of another model or prompt.
        """
        check_filled(cache)
        layers = [held.keys for held in cache.layers], [held.values for held in cache.layers]
        if model is None and input_ids is None:
            return cls(*layers)
        guards.check_computed_by(cls(*layers), model, input_ids)
        return cls(*layers, origin=Origin.of(model, input_ids))


def branch(cache: DynamicCache) -> DynamicCache:
    """A cache of its own that goes on from here: it shares the tensors, and appending to it copies them first."""
    return DynamicCache([(layer.keys, layer.values) for layer in cache.layers])


def handoff_cache(prefix: PrefixCache) -> Cache:
    """A transformers cache whose layers are `HandoffLayer`s over the prefix's tensors."""
    return Cache(layers=[HandoffLayer(k, v) for k, v in zip(prefix.keys, prefix.values)])


def cache_argument(module) -> str:
    """The name under which a model's forward takes its cache: `cache` since transformers 5.2x, else the old one."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def forward(
    model, input_ids: torch.Tensor, cache: Cache | None, position_ids: torch.Tensor, attention_mask=None
):
    """The model's body over new tokens: final hidden states (B, S, C). Positions are always explicit.

    Args:
        input_ids: (B, S). position_ids: (B, S) or (1, S).
        attention_mask: (B, T + S) or 4D as transformers takes it; all positions when None.
    """
    body = model.base_model
    if attention_mask is None:
        seen = cache.get_seq_length() if cache is not None else 0
        attention_mask = torch.ones(
            input_ids.shape[0], seen + input_ids.shape[1], dtype=torch.long, device=input_ids.device
        )
    arguments = {cache_argument(body): cache} if cache is not None else {}
    return body(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=cache is not None,
        **arguments,
    )[0]


@overload
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    return_hidden: Literal[False] = False,
    attention_mask: torch.Tensor | None = None,
) -> "PrefixCache": ...


@overload
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    return_hidden: Literal[True],
    attention_mask: torch.Tensor | None = None,
) -> "tuple[PrefixCache, torch.Tensor]": ...


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    chunk_tokens: int | None = None,
    return_hidden: bool = False,
    attention_mask: torch.Tensor | None = None,
) -> "PrefixCache | tuple[PrefixCache, torch.Tensor]":
    """A model's cache over `input_ids` (B, T), without computing any logits, nor what follows the last layer's keys
    and values when the hidden states are not asked for.

    Args:
        chunk_tokens: positions per forward pass, written into place: less memory for a few per cent more time. The
            whole prompt at once when None.
        return_hidden: also return the final hidden states (B, T, C), the head's input.
        attention_mask: as a tokenizer returns it, (B, T) and all ones; one that marks padding is refused.
    """
    check_prompt(model, input_ids)
    guards.check_no_padding(attention_mask)
    check_full_attention(model)
    guards.check_chunk(chunk_tokens)
    cache = filled_cache(Geometry.of(model).layers, input_ids.shape[1], stop=not return_hidden)
    hidden = fill(model, input_ids, cache, chunk_tokens)
    prefix = PrefixCache.from_dynamic(cache)
    prefix.origin = Origin.of(model, input_ids)
    return (prefix, torch.cat(hidden, 1)) if return_hidden else prefix


@torch.no_grad()
def fill(model, input_ids: torch.Tensor, cache: Cache, chunk_tokens: int | None = None) -> list[torch.Tensor]:
    """Run the model's body over `input_ids` (B, T) after what `cache` holds, in chunks.

    Returns: the final hidden states (B, chunk, C) of the chunks that ran to the end, none where `filled_cache` stops.
    """
    seen, tokens, hidden = cache.get_seq_length(), input_ids.shape[1], []
    step = chunk_tokens or tokens
    with fast_linears(model):
        for start in range(0, tokens, step):
            part = input_ids[:, start : start + step]
            positions = torch.arange(start, start + part.shape[1], device=part.device).unsqueeze(0) + seen
            with contextlib.suppress(CacheIsFull):
                hidden.append(forward(model, part, cache, positions))
    return hidden
