"""Hand a source's cache through a map into a target model, and go on from there.

    with handoff(target, prefix, cache_map) as h:
        logits = h.logits(tokens)          # the prompt's held-back last token, then forced or chosen ones
        ids = h.generate(input_ids, max_new_tokens=32)

`prefix` covers all of the prompt but its last token. The chosen mode and the reason are on the result.
"""

import uuid

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlib.attention import IDENTITY, two_segment_attention
from kvlib.cache import Geometry, PrefixCache, cache_argument, forward, handoff_cache
from kvlib.errors import KvlibError
from kvlib.maps.base import CacheMap
from kvlib.pair import rotary_of

MODES = ("auto", "absorbed", "in_place", "materialised")


def handoff(
    model, prefix: PrefixCache, cache_map: CacheMap, mode: str = "auto", *, check: bool = True
) -> "Handoff":
    """Prepare a handoff; use it as a context manager (the model is restored on leaving).

    Args:
        model: the target. prefix: the source's cache over all but the prompt's last token.
        mode: "absorbed" leaves the cache alone and applies the map inside attention; "in_place" corrects the prefix's
            own tensors in chunks; "materialised" corrects a copy. "auto" takes absorbed where the map allows it, else
            in_place.
        check: geometry, dtype, length and finite values; leave it on unless the same prefix was checked before.

    Raises: KvlibError when the prefix or map does not fit, or the mode cannot be had (never another one in silence).
    """
    if mode not in MODES:
        raise KvlibError(f"handoff mode {mode!r} given, expected one of {', '.join(MODES)}")
    if not isinstance(prefix, PrefixCache):
        raise KvlibError(
            f"a {type(prefix).__name__} given as the prefix, expected a PrefixCache: make one with kvlib.prefill, or with "
            "PrefixCache.from_dynamic"
        )
    if not isinstance(cache_map, CacheMap):
        raise KvlibError(
            f"a {type(cache_map).__name__} given as the map, expected a CacheMap: DirectMap(), or kvlib.load_map(file)"
        )
    if check:
        prefix.check_fits(model).check_finite("the source")
        cache_map.check_fits(Geometry.of(model))
    obstacle = cache_map.why_not_affine
    if mode == "absorbed" and obstacle:
        raise KvlibError(
            f"mode 'absorbed' asked of a {cache_map.kind} map, but {obstacle}: use mode='in_place'"
        )
    if mode == "auto":
        mode = "in_place" if obstacle else "absorbed"
        reason = obstacle or "the map is affine in each head's own vector, so attention absorbs it"
    else:
        reason = "asked for by name"
    return Handoff(model, prefix, cache_map, mode, reason)


class Handoff:
    """An active handoff. `mode` and `reason` say what was chosen and why; `cache` is the transformers cache."""

    def __init__(self, model, prefix: PrefixCache, cache_map: CacheMap, mode: str, reason: str):
        self.model, self.prefix, self.map, self.mode, self.reason = model, prefix, cache_map, mode, reason
        self.cache = None
        self._restore = None

    def __enter__(self) -> "Handoff":
        device = next(self.model.parameters()).device
        cache_map = self.map.to(device, compute_dtype(self.model))
        rotary = rotary_of(self.model) if cache_map.needs_rotary else None
        if self.mode == "in_place":
            self.prefix = cache_map.apply_(self.prefix, rotary)
        elif self.mode == "materialised":
            self.prefix = cache_map.materialise(self.prefix, rotary)
        layers = range(len(self.prefix.keys))
        maps = [cache_map.affine(i) if self.mode == "absorbed" else (IDENTITY, IDENTITY) for i in layers]
        self.cache = handoff_cache(self.prefix)
        self._restore = attach(self.model, self.cache, maps, self.prefix.valid)
        return self

    def __exit__(self, *_) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None

    @property
    def seen(self) -> int:
        """Positions in the cache: the prefix and what was read since."""
        return self.prefix.tokens if self.cache is None else self.cache.get_seq_length()

    def _check_active(self) -> None:
        if self._restore is None:
            raise KvlibError("a handoff was used outside its `with` block: enter it first")

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read tokens (B, S): final hidden states (B, S, C)."""
        self._check_active()
        if tokens.ndim != 2 or tokens.shape[0] != self.prefix.batch or tokens.shape[1] == 0:
            raise KvlibError(
                f"tokens {tuple(tokens.shape)} given, expected ({self.prefix.batch}, S): one row per cached prompt, S at least 1"
            )
        if tokens.is_floating_point():
            raise KvlibError(f"tokens of {tokens.dtype} given, expected token ids: whole numbers")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and self.seen + tokens.shape[1] > limit:
            raise KvlibError(
                f"{tokens.shape[1]} tokens given after {self.seen} positions, the model has {limit}: read fewer tokens"
            )
        new = self.seen - self.prefix.tokens
        offsets = torch.arange(tokens.shape[1], device=tokens.device) + new
        positions = self.prefix.lengths.to(tokens.device).unsqueeze(1) + offsets  # (B, S)
        return forward(self.model, tokens, self.cache, positions)

    def logits(self, tokens: torch.Tensor, last: bool = False) -> torch.Tensor:
        """Read tokens (B, S): logits (B, S, V), of the last position only (B, 1, V) when `last`."""
        hidden = self.hidden(tokens)
        return self.model.get_output_embeddings()(hidden[:, -1:] if last else hidden)

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **kwargs) -> torch.Tensor:
        """transformers' `generate` on the handed-over cache.

        Args:
            input_ids: the whole prompt (B, T + 1), the held-back last token included. kwargs: as for `generate`.
        """
        self._check_active()
        if self.seen != self.prefix.tokens:
            raise KvlibError(
                f"this handoff has read {self.seen - self.prefix.tokens} tokens already, expected none before `generate`: "
                "begin a new handoff of the same prefix"
            )
        if input_ids.shape != (self.prefix.batch, self.prefix.tokens + 1):
            raise KvlibError(
                f"a prompt {tuple(input_ids.shape)} given, expected {(self.prefix.batch, self.prefix.tokens + 1)}: the cached "
                "positions and the one token that was held back"
            )
        valid = self.prefix.valid
        mask = torch.ones_like(input_ids)
        if valid is not None:
            mask[:, :-1] = valid.long()
        return self.model.generate(
            input_ids, attention_mask=mask, **{cache_argument(self.model): self.cache}, **kwargs
        )


def compute_dtype(model) -> torch.dtype:
    """The dtype in which attention applies a map: float32 on a CPU (see `two_segment_attention`), else the model's."""
    weight = next(model.parameters())
    return torch.float32 if weight.device.type == "cpu" and weight.dtype != torch.float64 else weight.dtype


def attach(model, cache, maps, valid):
    """Give `model` an attention function of its own that reads the prefix of `cache` through `maps`.

    Args:
        maps: (key, value) `Affine` per layer. valid: bool (B, T) or None.

    Returns: a function that takes it away again.
    """
    name = f"kvlib-handoff-{uuid.uuid4().hex}"

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer = cache.layers[module.layer_idx]
        key_map, value_map = maps[module.layer_idx]
        out = two_segment_attention(
            query, layer.prefix_keys, layer.prefix_values, key, value, scaling, key_map, value_map, valid
        )
        return out.transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = name

    def restore():
        model.config._attn_implementation = before
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)

    return restore
