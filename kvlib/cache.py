"""A prompt's key-value cache as plain tensors; the only file that touches transformers' cache classes."""

import inspect
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from kvlib.errors import KvlibError


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
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, config.num_key_value_heads, head_dim)


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


class PrefixCache:
    """Keys (after RoPE) and values of a prompt's first `T` positions.

    Args:
        keys, values: one tensor (B, H, T, D) per layer.
        valid: bool (B, T), false at padding; None when nothing is padded.

    Tensors are shared, never copied; `clone` makes a copy.
    """

    def __init__(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], valid: torch.Tensor | None = None
    ):
        if len(keys) == 0 or len(keys) != len(values):
            raise KvlibError(
                f"a cache needs as many key as value layers and at least one; got {len(keys)} key and "
                f"{len(values)} value layers: pass one tensor of each per layer"
            )
        shape, dtype = keys[0].shape, keys[0].dtype
        for name, tensors in (("key", keys), ("value", values)):
            for layer, tensor in enumerate(tensors):
                if tensor.ndim != 4 or tensor.shape != shape or tensor.dtype != dtype:
                    raise KvlibError(
                        f"{name} layer {layer} of the cache is {tuple(tensor.shape)} {tensor.dtype}, expected "
                        f"{tuple(shape)} {dtype} like key layer 0, as (B, H, T, D): rebuild the cache from one prefill"
                    )
        if shape[2] == 0 or shape[0] == 0:
            raise KvlibError(
                "the cache is empty (0 positions or prompts), expected at least 1: prefill a prompt of 2 tokens or more"
            )
        if valid is not None and (
            valid.shape != (shape[0], shape[2]) or valid.dtype != torch.bool or not valid.any(-1).all()
        ):
            raise KvlibError(
                f"the cache's validity mask is {tuple(valid.shape)} {valid.dtype}, expected {(shape[0], shape[2])} torch.bool, one "
                "entry per prompt and position and at least one valid position per prompt"
            )
        self.keys, self.values, self.valid = list(keys), list(values), valid

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
    def geometry(self) -> Geometry:
        return Geometry(len(self.keys), self.keys[0].shape[1], self.keys[0].shape[3])

    @property
    def positions(self) -> torch.Tensor:
        """Rotary position of every entry, (B, T); padded entries count from zero at the first valid one."""
        device = self.keys[0].device
        if self.valid is None:
            return torch.arange(self.tokens, device=device).expand(self.batch, -1)
        return (self.valid.long().cumsum(-1) - 1).clamp(min=0)

    @property
    def lengths(self) -> torch.Tensor:
        """Number of valid positions per prompt, (B,): the position of the next token."""
        if self.valid is None:
            return torch.full((self.batch,), self.tokens, device=self.keys[0].device)
        return self.valid.sum(-1)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self.keys, *self.values])

    def slice(self, tokens: int) -> "PrefixCache":
        """The first `tokens` positions, as views."""
        if not 0 < tokens <= self.tokens:
            raise KvlibError(
                f"{tokens} positions asked of a cache that has {self.tokens}: ask for 1 to {self.tokens}"
            )
        valid = None if self.valid is None else self.valid[:, :tokens]
        return PrefixCache(
            [k[:, :, :tokens] for k in self.keys], [v[:, :, :tokens] for v in self.values], valid
        )

    def select(self, prompts) -> "PrefixCache":
        """The prompts at these indices of the batch (a list, a slice or a tensor)."""
        valid = None if self.valid is None else self.valid[prompts]
        return PrefixCache([k[prompts] for k in self.keys], [v[prompts] for v in self.values], valid)

    def clone(self) -> "PrefixCache":
        return PrefixCache([k.clone() for k in self.keys], [v.clone() for v in self.values], self.valid)

    def to(self, *args, **kwargs) -> "PrefixCache":
        """Every tensor through `Tensor.to` (a device or a dtype)."""
        device = torch.empty(0).to(*args, **kwargs).device
        valid = None if self.valid is None else self.valid.to(device)
        return PrefixCache(
            [k.to(*args, **kwargs) for k in self.keys], [v.to(*args, **kwargs) for v in self.values], valid
        )

    def check_finite(self, owner: str) -> "PrefixCache":
        """Raises KvlibError at the first layer that holds NaN or infinity; returns itself."""
        for layer, (k, v) in enumerate(zip(self.keys, self.values)):
            for name, tensor in (("keys", k), ("values", v)):
                # A sum is one pass without a mask in memory; it is finite unless an entry is not or it overflows.
                if not torch.isfinite(tensor.sum(dtype=torch.float32)) and not torch.isfinite(tensor).all():
                    raise KvlibError(
                        f"the {name} of layer {layer} of {owner}'s cache hold NaN or infinity, expected finite values: "
                        "check the model's weights and dtype"
                    )
        return self

    def check_fits(self, model, owner: str = "the cache") -> "PrefixCache":
        """Raises KvlibError unless `model` can read this cache: geometry, dtype, positions; returns itself."""
        wanted, given = Geometry.of(model), self.geometry
        for what, field in (("layers", "layers"), ("KV heads", "heads"), ("head_dim", "head_dim")):
            if getattr(given, field) != getattr(wanted, field):
                raise KvlibError(
                    f"{owner} has {getattr(given, field)} {what}, the model {name_or_type(model)} "
                    f"has {getattr(wanted, field)}: hand over a cache of a model with the same layers, KV heads and head_dim"
                )
        if kind := windowed_layers(model):
            raise KvlibError(
                f"the model {name_or_type(model)} has layers with {kind}, expected full attention in every layer: "
                "choose another model"
            )
        dtype = next(model.parameters()).dtype
        if self.dtype != dtype:
            raise KvlibError(
                f"{owner} is {self.dtype}, the model {dtype}: convert one of them with .to({dtype})"
            )
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.tokens >= limit:
            raise KvlibError(
                f"{owner} covers {self.tokens} positions and the model has {limit}: leave room for at least one new token"
            )
        return self

    def to_dynamic(self) -> DynamicCache:
        """A transformers cache over the same tensors (appending concatenates, so they are not changed)."""
        return DynamicCache(list(zip(self.keys, self.values)))

    @classmethod
    def from_dynamic(cls, cache: Cache) -> "PrefixCache":
        """Take the tensors out of a transformers cache whose layers all keep every position."""
        for layer, held in enumerate(cache.layers):
            if getattr(held, "is_sliding", False):
                raise KvlibError(
                    f"layer {layer} of the given cache is a sliding window, expected one that keeps every position: "
                    "use a model with full attention in every layer"
                )
            if held.keys is None:
                raise KvlibError(f"layer {layer} of the given cache is empty: run a prefill with it first")
        return cls([held.keys for held in cache.layers], [held.values for held in cache.layers])


class HandoffLayer(CacheLayerMixin):
    """One layer's prefix, left where it is, and the target's own new positions beside it.

    `update` returns the new positions only: the attention function reads the prefix from here, so one more token
    never copies the prefix.
    """

    is_sliding = False
    is_croppable = False

    def __init__(self, prefix_keys: torch.Tensor, prefix_values: torch.Tensor):
        super().__init__()
        self.prefix_keys, self.prefix_values = prefix_keys, prefix_values  # (B, H, T, D)
        self.dtype, self.device = prefix_keys.dtype, prefix_keys.device
        self.keys = prefix_keys[:, :, :0]
        self.values = prefix_values[:, :, :0]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if self.keys.shape[2] == 0:
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        return self.keys, self.values

    def get_seq_length(self, *args) -> int:
        return self.prefix_keys.shape[2] + self.keys.shape[2]

    def get_mask_sizes(self, query_length, *args) -> tuple[int, int]:
        # transformers before 5.20 passes the query's positions, later ones its length
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.prefix_keys = self.prefix_keys.index_select(0, beam_idx)
        self.prefix_values = self.prefix_values.index_select(0, beam_idx)
        super().reorder_cache(beam_idx)


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


@torch.no_grad()
def prefill(
    model, input_ids: torch.Tensor, *, chunk_tokens: int | None = None, return_hidden: bool = False
) -> "PrefixCache | tuple[PrefixCache, torch.Tensor]":
    """A model's cache over `input_ids` (B, T), without computing any logits.

    Args:
        chunk_tokens: positions per forward pass; the whole prompt at once when None.
        return_hidden: also return the final hidden states (B, T, C), the head's input.
    """
    check_prompt(model, input_ids)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise KvlibError(
            f"chunk_tokens is {chunk_tokens}, expected 1 or more, or None for the whole prompt at once"
        )
    tokens = input_ids.shape[1]
    step = chunk_tokens or tokens
    cache, hidden = DynamicCache(), []
    for start in range(0, tokens, step):
        part = input_ids[:, start : start + step]
        positions = torch.arange(start, start + part.shape[1], device=part.device).unsqueeze(0)
        states = forward(model, part, cache, positions)
        if return_hidden:
            hidden.append(states)
    prefix = PrefixCache.from_dynamic(cache)
    return (prefix, torch.cat(hidden, 1)) if return_hidden else prefix


def check_prompt(model, input_ids: torch.Tensor) -> None:
    """Raises KvlibError unless `input_ids` is (B, T) with ids in the vocabulary and T within the positions."""
    if input_ids.ndim != 2 or input_ids.numel() == 0 or input_ids.is_floating_point():
        raise KvlibError(
            f"token ids {tuple(input_ids.shape)} {input_ids.dtype} given, expected whole numbers (B, T), at least one token"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and input_ids.shape[1] > limit:
        raise KvlibError(
            f"a prompt of {input_ids.shape[1]} tokens given, the model has {limit} positions: shorten the prompt"
        )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= model.config.vocab_size:
        raise KvlibError(
            f"token ids from {low} to {high} given, the vocabulary has {model.config.vocab_size}: tokenise with the pair's tokenizer"
        )
