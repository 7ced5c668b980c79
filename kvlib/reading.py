"""The target at work on a handed-over cache: what a `with handoff(...)` block offers, and the model restored after it."""

import contextlib

import torch

from kvlib import guards
from kvlib.attaching import PREFIX, attach, compute_dtype
from kvlib.attention import IDENTITY
from kvlib.cache import PrefixCache, cache_argument, forward, handoff_cache
from kvlib.compiled import compiled_correction
from kvlib.errors import KvlibError
from kvlib.folding import Folding
from kvlib.generating import check_asked, keeping_cache
from kvlib.geometry import name_or_type, queries_per_head, rotary_of
from kvlib.maps import CacheMap
from kvlib.marks import check_uncorrected

CORRECTING = ("in_place", "background")
NOTICED_S = 0.05  # compiling takes longer than this, finding what was compiled before does not


class Handoff:
    """An active handoff. `mode` and `reason` say what was chosen and why; `cache` is the transformers cache.

    `compiled`: whether in-place corrections are; `compile_seconds`: what that took on entering, None where nothing was.
    `may_be_plain`: whether the plain pass takes over, and `reason` says so, where the compiler refuses. `keys_only`:
    whether that compiled pass corrects the keys alone, with the values' part absorbed into attention.
    """

    def __init__(
        self,
        model,
        prefix: PrefixCache,
        cache_map: CacheMap,
        mode: str,
        reason: str,
        check=True,
        compiled=False,
        may_be_plain=False,
        keys_only=False,
    ):
        self.model, self.prefix, self.map, self.mode, self.reason = model, prefix, cache_map, mode, reason
        self.check, self.compiled, self.compile_seconds, self.cache = check, compiled, None, None
        self.may_be_plain, self.keys_only = may_be_plain, keys_only
        self.folding, self._restore, self._found = None, None, None

    def __enter__(self) -> "Handoff":
        if self.cache is not None:
            raise KvlibError("a handoff was entered a second time, expected once: begin a new one")
        if self.check:
            check_uncorrected(
                self.prefix, self.map
            )  # once more: another handoff may have used the cache up since
        device = next(self.model.parameters()).device
        cache_map = self.map.to(device, compute_dtype(self.model))
        rotary = rotary_of(self.model) if cache_map.needs_rotary else None
        if self.mode == "materialised":
            self.prefix = cache_map.materialise(self.prefix, rotary)
            if self.check:
                self.prefix.check_finite("the corrected source")  # half precision overflows
        absorbs = self.mode in ("absorbed", "background")
        maps = [(IDENTITY, IDENTITY)] * len(self.prefix.keys)
        if absorbs and cache_map.kind != "direct":
            maps = list(cache_map.affines)
        self.cache = handoff_cache(self.prefix)
        if self.mode in CORRECTING and cache_map.kind != "direct":
            angles = cache_map.angles(rotary, self.prefix)
            correct_ = self._compiled(cache_map, angles) if self.compiled else cache_map.correct_
            if self.keys_only:
                maps = [(IDENTITY, values) for values in cache_map.value_affines]
            self.folding = Folding(
                self.prefix,
                self.cache,
                cache_map,
                angles,
                maps,
                correct_,
                background=absorbs,
                check=self.check,
                keys_only=self.keys_only,
            )
        self._found = self.prefix.corrected_by
        after = None if self.folding is None else self.folding.done
        self._restore = attach(self.model, self.cache, maps, self.prefix.valid, self._before(), after)
        if self.folding is not None:
            self.folding.start()
        return self

    def _compiled(self, cache_map: CacheMap, angles):
        """The correction compiled; `reason` says how long that took, or why the plain one has taken over."""
        try:
            correct_, self.compile_seconds = compiled_correction(
                cache_map, self.prefix, angles, self.keys_only, queries_per_head(self.model)
            )
        except KvlibError as error:
            if not self.may_be_plain:
                raise
            self.compiled = self.keys_only = False
            why = str(error.__cause__ or error).partition(", expected")[0]
            self.reason += f", which failed ({why}): the plain pass takes over"
            return cache_map.correct_
        if self.compile_seconds >= NOTICED_S:
            self.reason += f" (in {self.compile_seconds:.1f} s)"
        return correct_

    def _before(self):
        """What is called with a layer's index ahead of every read of its prefix, None for nothing."""
        return None if self.folding is None else self.folding.before

    def __exit__(self, *_) -> None:
        if self._restore is not None:
            self._restore()
            self._restore = None
            if self.folding is not None:
                self.folding.finish()

    @property
    def folded(self) -> int:
        """How many layers of the prefix hold corrected keys and values by now (0 where the mode leaves it alone)."""
        return 0 if self.folding is None else self.folding.folded

    @property
    def seen(self) -> int:
        """Positions in the cache: the prefix and what was read since."""
        return self.prefix.tokens if self.cache is None else self.cache.get_seq_length()

    def _check_active(self) -> None:
        if self._restore is None:
            raise KvlibError("a handoff was used outside its `with` block: enter it first")
        attends = self.model.config._attn_implementation
        if attends != self._restore.name:
            self._refuse_other_attention(attends)
        if self.prefix.corrected_by != self._found and not (self.folding and self.folding.begun):
            raise KvlibError(
                f"a {self.prefix.corrected_by} map has corrected this handoff's cache since it was begun, expected it as it was: hand "
                "over prefix.clone() where two handoffs read one prefix at a time"
            )

    def _refuse_other_attention(self, attends) -> None:
        name = name_or_type(self.model)
        if str(attends).startswith(PREFIX):
            raise KvlibError(
                f"another handoff into {name} was begun within this one, expected one at a time: leave it first"
            )
        raise KvlibError(
            f"the model {name} was set to {attends!r} attention within a handoff, expected the handoff's own until it is left: "
            "choose before or after the `with` block"
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
            input_ids: the whole prompt (B, T + 1), the held-back last token included. kwargs: as for `generate`, one
                token at a time from this cache: no beams, no assistant, no cache of another kind. A `use_cache` of a
                generation configuration counts for nothing.

        Raises: KvlibError for what a handed-over cache cannot do, more positions than the model has among it.
        """
        self._check_active()
        if self.seen != self.prefix.tokens:
            raise KvlibError(
                f"this handoff has read {self.seen - self.prefix.tokens} tokens already, expected none before `generate`: "
                "begin a new handoff of the same prefix"
            )
        check_asked(self.model, self.prefix.tokens, kwargs)
        self._check_prompt(input_ids)
        valid = self.prefix.valid
        mask = torch.ones_like(input_ids)
        if valid is not None:
            mask[:, :-1] = valid.long()
        ours = {cache_argument(self.model): self.cache, "attention_mask": mask}
        with self._finite_logits():
            generated = self.model.generate(input_ids, **ours, **keeping_cache(kwargs))
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

    def _check_prompt(self, input_ids) -> None:
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
