"""Hand a source's cache through a map into a target model, and go on from there.

    with handoff(target, prefix, cache_map) as h:
        logits = h.logits(tokens)          # the prompt's held-back last token, then forced or chosen ones
        ids = h.generate(input_ids, max_new_tokens=32)

`prefix` covers all of the prompt but its last token. The chosen mode and the reason are on the result.
"""

import contextlib

import torch

from kvlib import guards
from kvlib.attaching import attach, compute_dtype
from kvlib.attention import IDENTITY
from kvlib.cache import PrefixCache, cache_argument, forward, handoff_cache, prefill
from kvlib.errors import KvlibError
from kvlib.geometry import Geometry, name_or_type, rotary_of
from kvlib.maps import CacheMap, DirectMap

OURS = ("attention_mask", "position_ids", "inputs_embeds", "cache", "past_key_values", "use_cache")
# Kinds of model that the tests hold against native prefill; any other is held against it here, before it is used.
PROVEN = ("gemma", "llama", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
MODES = ("auto", "absorbed", "in_place", "materialised")


def handoff(
    model,
    prefix: PrefixCache,
    cache_map: CacheMap,
    mode: str = "auto",
    *,
    check: bool = True,
    source=None,
) -> "Handoff":
    """Prepare a handoff; use it as a context manager (the model is restored on leaving).

    Args:
        model: the target. prefix: the source's cache over all but the prompt's last token.
        mode: "absorbed" leaves the cache alone and applies the map inside attention; "in_place" corrects the prefix's
            own tensors in chunks; "materialised" corrects a copy. "auto" takes absorbed where the map allows it, else
            in_place.
        check: geometry, dtype, device, length and finite values; vocabulary and rotary embedding where the prefix's
            origin is known; finite logits. Leave it on unless the same prefix was checked before.
        source: the model, or its `Origin.identity`, that must have computed the prefix. None: any whose cache fits.

    Raises: KvlibError when the prefix or map does not fit, or the mode cannot be had (never another one in silence).
    """
    check_arguments(model, prefix, cache_map, mode)
    if check:
        prefix.check_fits(model)
        check_target(model)
        if source is not None:
            _check_source(prefix, source)
        prefix.check_finite("the source")
        cache_map.check_fits(Geometry.of(model))
        if prefix.corrected_by and cache_map.kind != "direct":
            raise KvlibError(
                f"a cache that a {prefix.corrected_by} map has corrected already was given with a {cache_map.kind} map, expected "
                "the source's own: prefill again (an in-place handoff uses its cache up), or hand it over with DirectMap()"
            )
    elif source is not None:
        raise KvlibError(
            "source= given with check=False, expected one of the two: source= asks for a check, so leave check on"
        )
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
    if mode == "in_place" and check:
        guards.check_writable(prefix)
    return Handoff(model, prefix, cache_map, mode, reason, check)


def check_arguments(model, prefix, cache_map, mode) -> None:
    """Raises KvlibError unless each is of its kind."""
    if mode not in MODES:
        raise KvlibError(f"handoff mode {mode!r} given, expected one of {', '.join(MODES)}")
    if not callable(getattr(model, "get_output_embeddings", None)):
        raise KvlibError(
            f"a {type(model).__name__} given as the target, expected a language model: pass a loaded one, such as pair.target"
        )
    if not isinstance(prefix, PrefixCache):
        raise KvlibError(
            f"a {type(prefix).__name__} given as the prefix, expected a PrefixCache: make one with kvlib.prefill, or with "
            "PrefixCache.from_dynamic"
        )
    if not isinstance(cache_map, CacheMap):
        raise KvlibError(
            f"a {type(cache_map).__name__} given as the map, expected a CacheMap: DirectMap(), or kvlib.load_map(file)"
        )


def _check_source(prefix: PrefixCache, source) -> None:
    if prefix.origin is None:
        raise KvlibError(
            "a cache of unknown origin given with source=, expected one that says which model computed it: make it with "
            "kvlib.prefill, or tell PrefixCache.from_dynamic model= and input_ids="
        )
    prefix.origin.check_source(source)


@torch.no_grad()
def check_target(model) -> None:
    """Raises KvlibError unless `model` reads its own cache, handed back, as it reads the prompt; four tokens are tried.

    Attention of its own making, an output head that does more than one matrix, and layers that look ahead all pass
    without an error and give other logits. Kinds of model that the tests cover are not tried again.
    """
    if model.config.model_type in PROVEN:
        return
    remedy = "expected one that reads it as its own: choose another model"
    ids = torch.arange(1, 5, device=next(model.parameters()).device).unsqueeze(0) % model.config.vocab_size
    try:
        native = model(ids).logits[:, 2:]
        with handoff(model, prefill(model, ids[:, :2]), DirectMap(), check=False) as active:
            logits = active.logits(ids[:, 2:])
    except (KvlibError, RuntimeError, AttributeError, TypeError, ValueError, IndexError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = reason.partition(", expected")[0].partition(". ")[0]  # one sentence out of two
        raise KvlibError(
            f"the model {name_or_type(model)} cannot read a handed-over cache ({reason}), {remedy}"
        ) from error
    scale = float(native.abs().max())
    gap = float((logits - native).abs().max())
    if gap > scale * (0.1 if native.element_size() < 4 else 1e-3):
        raise KvlibError(
            f"the model {name_or_type(model)} given its own cache back moves its logits by {gap:.2g} of {scale:.2g}, {remedy}"
        )


class Handoff:
    """An active handoff. `mode` and `reason` say what was chosen and why; `cache` is the transformers cache."""

    def __init__(
        self, model, prefix: PrefixCache, cache_map: CacheMap, mode: str, reason: str, check: bool = True
    ):
        self.model, self.prefix, self.map, self.mode, self.reason = model, prefix, cache_map, mode, reason
        self.check, self.cache = check, None
        self._restore = None

    def __enter__(self) -> "Handoff":
        if self.cache is not None:
            raise KvlibError("a handoff was entered a second time, expected once: begin a new one")
        device = next(self.model.parameters()).device
        cache_map = self.map.to(device, compute_dtype(self.model))
        rotary = rotary_of(self.model) if cache_map.needs_rotary else None
        if self.mode == "in_place":
            self.prefix = cache_map.apply_(self.prefix, rotary)
        elif self.mode == "materialised":
            self.prefix = cache_map.materialise(self.prefix, rotary)
        if self.check and self.mode != "absorbed":
            self.prefix.check_finite("the corrected source")  # half precision overflows
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
        if self.model.config._attn_implementation != self._restore.name:
            raise KvlibError(
                f"another handoff into {name_or_type(self.model)} was begun within this one, expected one at a time: leave it first"
            )

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read tokens (B, S): final hidden states (B, S, C)."""
        self._check_active()
        self._check_tokens(tokens)
        new = self.seen - self.prefix.tokens
        offsets = torch.arange(tokens.shape[1], device=tokens.device) + new
        positions = self.prefix.lengths.to(tokens.device).unsqueeze(1) + offsets  # (B, S)
        states = forward(self.model, tokens, self.cache, positions)
        self._check_read()
        return states

    def _check_read(self) -> None:
        if self._restore.calls == 0:
            raise KvlibError(
                f"the model {name_or_type(self.model)} did not read the handed-over cache, expected one whose attention goes "
                "through transformers' AttentionInterface: choose another model"
            )

    def _check_tokens(self, tokens) -> None:
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in guards.TOKEN_DTYPES:
            raise KvlibError(
                f"tokens {guards.kind_of(tokens)} given, expected token ids: whole numbers, as an int64 tensor ({self.prefix.batch}, S)"
            )
        if tokens.ndim != 2 or tokens.shape[0] != self.prefix.batch or tokens.shape[1] == 0:
            raise KvlibError(
                f"tokens {tuple(tokens.shape)} given, expected ({self.prefix.batch}, S): one row per cached prompt, S at least 1"
            )
        limit = guards.position_limit(self.model)
        if limit is not None and self.seen + tokens.shape[1] > limit:
            raise KvlibError(
                f"{tokens.shape[1]} tokens given after {self.seen} positions, the model has {limit}: read fewer tokens"
            )
        if self.check:
            guards.check_vocabulary(self.model, tokens)

    def logits(self, tokens: torch.Tensor, last: bool = False) -> torch.Tensor:
        """Read tokens (B, S): logits (B, S, V), of the last position only (B, 1, V) when `last`."""
        hidden = self.hidden(tokens)
        logits = self.model.get_output_embeddings()(hidden[:, -1:] if last else hidden)
        if self.check:
            self._check_logits(logits)
        return logits

    def _check_logits(self, logits: torch.Tensor) -> None:
        if not guards.all_finite(logits):
            raise KvlibError(
                f"the logits of {name_or_type(self.model)} over the handed-over cache hold NaN or infinity, expected finite values: "
                "check the target's weights, the map and the dtype"
            )

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
        self._check_prompt(input_ids, kwargs)
        valid = self.prefix.valid
        mask = torch.ones_like(input_ids)
        if valid is not None:
            mask[:, :-1] = valid.long()
        arguments = {cache_argument(self.model): self.cache, "attention_mask": mask, **kwargs}
        with self._finite_logits():
            generated = self.model.generate(input_ids, **arguments)
        self._check_read()
        return generated

    @contextlib.contextmanager
    def _finite_logits(self):
        """Look at all logits within: `argmax` of NaN is 0, so that a broken cache would decode to token 0 unnoticed."""
        if not self.check:
            yield
            return
        head = self.model.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, given, logits: self._check_logits(logits))
        try:
            yield
        finally:
            hook.remove()

    def _check_prompt(self, input_ids, kwargs: dict) -> None:
        if taken := sorted(set(kwargs) & set(OURS)):
            raise KvlibError(
                f"{taken[0]}= given to `generate`, expected the handoff to set it from the cache: leave it out"
            )
        guards.check_prompt(self.model, input_ids)
        batch, tokens = self.prefix.batch, self.prefix.tokens
        if input_ids.shape == (batch, tokens):
            raise KvlibError(
                f"the cache covers all {tokens} tokens of the prompt, expected all but the last, which the target reads itself: "
                f"prefill input_ids[:, :-1], or hand over prefix.slice({tokens - 1})"
            )
        if input_ids.shape != (batch, tokens + 1):
            raise KvlibError(
                f"a prompt {tuple(input_ids.shape)} given, expected {(batch, tokens + 1)}: the cached "
                "positions and the one token that was held back"
            )
        if self.check and self.prefix.origin is not None:
            self.prefix.origin.check_prompt(input_ids, self.prefix.valid)
        limit, new = guards.position_limit(self.model), kwargs.get("max_new_tokens") or 1
        if limit is not None and tokens + new > limit:
            raise KvlibError(
                f"{new} new tokens asked after {tokens} positions, the model has {limit}: ask for fewer, or cut the prompt"
            )
