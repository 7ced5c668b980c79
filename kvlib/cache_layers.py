"""Layers of a transformers cache: one that reads a prefix where it lies, one that a prefill writes into place."""

from collections.abc import Callable
from functools import partial

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlib.errors import KvlibError


class _Layer(CacheLayerMixin):
    """What both have in common: every position is kept, there is no limit, and nothing to set up at the first update."""

    is_sliding = False
    is_croppable = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length, *args) -> tuple[int, int]:
        # transformers before 5.20 passes the query's positions, later ones its length
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + new, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # the name before transformers 5.20


class HandoffLayer(_Layer):
    """One layer's prefix, left where it is, and the target's own new positions beside it.

    `update` returns the new positions only: the attention function reads the prefix from here, so one more token
    never copies the prefix.
    """

    def __init__(self, prefix_keys: torch.Tensor, prefix_values: torch.Tensor):
        super().__init__()
        self.prefix_keys, self.prefix_values = prefix_keys, prefix_values  # (B, H, T, D)
        self.dtype, self.device = prefix_keys.dtype, prefix_keys.device
        self.keys = prefix_keys[:, :, :0]
        self.values = prefix_values[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if self.keys.shape[2] == 0:
            self.keys, self.values = key_states, value_states
        else:
            self.keys = torch.cat([self.keys, key_states], 2)
            self.values = torch.cat([self.values, value_states], 2)
        return self.keys, self.values

    def get_seq_length(self, *args) -> int:
        return self.prefix_keys.shape[2] + self.keys.shape[2]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.prefix_keys = self.prefix_keys.index_select(0, beam_idx)
        self.prefix_values = self.prefix_values.index_select(0, beam_idx)
        super().reorder_cache(beam_idx)


class CacheIsFull(Exception):
    """Every layer has what this pass was for: the last layer's attention and all that follows would be thrown away."""


class FilledLayer(_Layer):
    """One layer's keys and values for `tokens` positions, made once and written chunk by chunk.

    Args:
        keys, values: (B, H, T, D) to write into; made at the first update when None.
        after: called after each update; what it raises ends the model's pass.
    """

    def __init__(self, tokens: int, keys=None, values=None, after: Callable[[], None] = lambda: None):
        super().__init__()
        self.tokens, self.after, self.seen = tokens, after, 0
        self.whole_keys, self.whole_values = keys, values
        self.is_initialized = True  # not by `lazy_initialization`, which some callers skip

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if self.whole_keys is None:
            self.whole_keys, self.whole_values = (
                t.new_empty(*t.shape[:2], self.tokens, t.shape[3]) for t in (key_states, value_states)
            )
        part = slice(self.seen, self.seen + key_states.shape[2])
        for whole, new in ((self.whole_keys, key_states), (self.whole_values, value_states)):
            place = whole[:, :, part]
            if place.shape != new.shape or place.dtype != new.dtype:  # copying would broadcast, or cast
                raise KvlibError(
                    f"the model wrote {tuple(new.shape)} {new.dtype} into a cache with room for {tuple(place.shape)} {place.dtype}, "
                    "expected what its configuration says: choose another model"
                )
            place.copy_(new)
        self.seen = part.stop
        self.keys, self.values = self.whole_keys[:, :, : self.seen], self.whole_values[:, :, : self.seen]
        self.after()
        return self.keys, self.values

    def get_seq_length(self, *args) -> int:
        return self.seen


def filled_cache(
    layers: int,
    tokens: int,
    tensors: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    *,
    stop: bool,
    written: Callable[[int, bool], None] = lambda layer, whole: None,
) -> Cache:
    """A transformers cache of `FilledLayer`s for `tokens` positions.

    Args:
        tensors: (keys, values) per layer to write into, each (B, H, T, D); made as the model comes by when None.
        stop: raise `CacheIsFull` out of the model's pass as soon as it has written every layer.
        written: called after each update with the layer's index and whether all its positions are there now; the
            layer's attention is still to come. What it raises ends the pass.
    """

    def after(layer: int) -> None:
        seen = held[layer].seen
        written(layer, seen == tokens)
        if stop and all(one.seen == seen for one in held):
            raise CacheIsFull

    held = [
        FilledLayer(tokens, *(tensors[i] if tensors else ()), after=partial(after, i)) for i in range(layers)
    ]
    return Cache(layers=held)


def check_filled(cache) -> None:
    """Raises KvlibError unless every layer of a transformers cache holds all positions that it has seen, and some."""
    if not isinstance(getattr(cache, "layers", None), list) or not cache.layers:
        raise KvlibError(
            f"a {type(cache).__name__} without layers given, expected a transformers cache that a model has filled: "
            "prefill with a model that keeps keys and values, or pass tensors to PrefixCache"
        )
    for layer, held in enumerate(cache.layers):
        if getattr(held, "is_sliding", False):
            raise KvlibError(
                f"layer {layer} of the given cache is a sliding window, expected one that keeps every position: "
                "use a model with full attention in every layer"
            )
        keys = getattr(held, "keys", None)
        if keys is None or keys.numel() == 0:
            raise KvlibError(f"layer {layer} of the given cache is empty: run a prefill with it first")
        seen = int(held.get_seq_length())
        if keys.ndim == 4 and keys.shape[2] != seen:
            raise KvlibError(
                f"layer {layer} of the given cache ({type(held).__name__}) has seen {seen} positions and holds "
                f"{keys.shape[2]}, expected every one and no more: prefill with transformers' default cache"
            )
