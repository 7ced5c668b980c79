"""Hand a source's layers over as they are produced: the target reads layer by layer while the source goes on.

    with pipelined(source, target, input_ids, cache_map) as h:
        logits = h.logits(input_ids[:, -1:])      # or h.generate(input_ids, max_new_tokens=32)

A layer of the target needs the same layer of the source and the target's layer before, no more. So its first pass may
begin as soon as the source's first layer has the whole prompt, and ends soon after the source's last.
"""

import torch
from transformers import PreTrainedModel

from kvlib import guards
from kvlib.arrivals import arrivals_for
from kvlib.cache import PrefixCache, fill, prefill
from kvlib.cache_layers import filled_cache
from kvlib.errors import KvlibError
from kvlib.geometry import Geometry, check_full_attention, name_or_type
from kvlib.handoff import check_target, handoff
from kvlib.maps import CacheMap
from kvlib.marks import PARTLY
from kvlib.origin import Origin
from kvlib.reading import Handoff

WAYS = ("auto", "serial", "pipelined")


def pipelined(
    source: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    cache_map: CacheMap,
    mode: str = "auto",
    *,
    chunk_tokens: int | None = None,
    check: bool = True,
) -> "PipelinedHandoff":
    """Prefill with `source` and hand over to `target` at the same time; use it as a context manager.

    Entering begins the source's prefill over `input_ids[:, :-1]` and does not wait for it. What comes out is a
    `kvlib.Handoff`, and `logits`, `hidden` and `generate` mean what they mean there: the first call reads the prompt's
    last token (and any after it), each of its layers right after the source's, and returns when both are done; later
    calls have the whole cache. The logits are those of `prefill` with the same `chunk_tokens` and `handoff`. Leaving
    waits for the source, read or not; after an error it stops the source at its next layer. Either way no thread
    is left and both models are as they were.

    Args:
        input_ids: whole prompts (B, T), no padding, T at least 2.
        mode: as for `handoff`, but "materialised", which makes a copy of the whole cache before anything is read.
        chunk_tokens: positions per forward pass of the source; the target follows the last one. None: all at once.
        check: as for `handoff`; finite values are looked for in each layer as it arrives.

    Raises: KvlibError as `prefill` and `handoff` do; and where a layer is waited for, or on leaving, when the source
    fails: one error, whose `__cause__` is the source's own.
    """
    if source is target:
        raise KvlibError(
            "one model given as source and as target, expected two: while it prefills it cannot read; use kvlib.prefill and "
            "kvlib.handoff one after the other"
        )
    if mode == "materialised":
        raise KvlibError(
            "mode 'materialised' asked of a pipeline, expected one that needs no copy of the whole cache: use mode='in_place', or "
            "kvlib.handoff"
        )
    guards.check_prompt(source, input_ids)
    guards.check_prompt(target, input_ids)
    guards.check_held_back(input_ids)
    guards.check_chunk(chunk_tokens)
    check_full_attention(source)
    prefix = _room(source, input_ids[:, :-1])
    chosen = handoff(target, prefix, cache_map, mode, check=False)  # arguments, and the mode with its reason
    if check:
        prefix.check_fits(target, "the source's cache")
        check_target(target)
        cache_map.check_fits(Geometry.of(target))
    return PipelinedHandoff(source, chosen, chunk_tokens, check)


def _room(source, input_ids: torch.Tensor) -> PrefixCache:
    """A cache over `input_ids` (B, T) with nothing in it yet, as `source` would make it."""
    weight, shape = next(source.parameters()), Geometry.of(source)
    size = (input_ids.shape[0], shape.heads, input_ids.shape[1], shape.head_dim)
    keys, values = (
        [torch.empty(size, dtype=weight.dtype, device=weight.device) for _ in range(shape.layers)]
        for _ in range(2)
    )
    return PrefixCache(keys, values, origin=Origin.of(source, input_ids))


class PipelinedHandoff(Handoff):
    """A `Handoff` whose prefix is still being written when it is entered; whole after the first call, or on leaving."""

    def __init__(self, source, chosen: Handoff, chunk_tokens: int | None, check: bool):
        super().__init__(
            chosen.model, chosen.prefix, chosen.map, chosen.mode, chosen.reason, check,
            chosen.compiled, chosen.may_be_plain, chosen.keys_only,
        )  # fmt: skip
        self.source, self.chunk_tokens = source, chunk_tokens
        self._arrivals = arrivals_for(self.prefix.device, len(self.prefix.keys))
        self._looked_at: set[int] = set()
        self._told = False  # of the source's failure

    def __enter__(self) -> "PipelinedHandoff":
        super().__enter__()
        prefix, arrivals = self.prefix, self._arrivals
        tensors = list(zip(prefix.keys, prefix.values))
        written = _once_read(arrivals.written, len(tensors)) if self.mode == "in_place" else arrivals.written
        cache = filled_cache(len(tensors), prefix.tokens, tensors, stop=True, written=written)
        try:
            arrivals.start(lambda: fill(self.source, prefix.input_ids, cache, self.chunk_tokens))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._arrivals.finish(stop=kind is not None)
        self._leave()
        if self._arrivals.failure is not None and kind is None and not self._told:
            raise self._failed() from self._arrivals.failure

    def _leave(self) -> None:
        if not self._arrivals.whole:
            self.folding = None  # nothing is left to correct
            self.prefix.corrected_by = (
                f"{PARTLY} (the source was stopped) {self.map.kind}"  # no handoff takes it
            )
        super().__exit__(None, None, None)

    def _failed(self) -> KvlibError:
        self._told = True
        failure = self._arrivals.failure
        if isinstance(failure, KvlibError):
            return failure
        reason = (str(failure) or type(failure).__name__).splitlines()[0]
        return KvlibError(
            f"the source {name_or_type(self.source)} failed while its layers were handed over ({reason}), expected a whole "
            "prefill: try kvlib.prefill on the same prompt"
        )

    def _before(self):
        return self._await

    def _await(self, layer: int):
        """Returns when the source has written a layer; a map that corrects it does so right after, as it is read: it is returned
        where the read does it."""
        if not self._arrivals.wait(layer):
            raise self._failed() from self._arrivals.failure
        if self.check and layer not in self._looked_at:
            guards.check_layer_finite(layer, self.prefix.keys[layer], self.prefix.values[layer], "the source")
            self._looked_at.add(layer)
        return None if self.folding is None else self.folding.before(layer)


def _once_read(written, layers: int):
    """`written`, with a layer told of only when the source has read it too: what is corrected in place is the cache
    that the source's own attention reads right after writing. The last layer's attention is left out of a prefill."""

    def tell(layer: int, whole: bool) -> None:
        if layer == 0:
            written(0, False)
        else:
            written(layer - 1, whole)
        if layer == layers - 1:
            written(layer, whole)

    return tell


def cold_handoff(
    source: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    cache_map: CacheMap,
    mode: str = "auto",
    *,
    way: str = "auto",
    chunk_tokens: int | None = None,
    check: bool = True,
) -> Handoff:
    """From a prompt to a handoff, the source's prefill included, by the way that suits the device.

    Args: as for `pipelined`, and
        way: "serial" prefills here and hands over on entering; "pipelined" is `pipelined`. "auto" is pipelined on CUDA
            for every mode that allows it and serial elsewhere: two teams of threads on one processor cost more than a
            pipeline can save (measured, see `book/method.md`).

    Returns: a `Handoff` to enter. Its `way` is the one taken, its `way_reason` why.
    """
    if way not in WAYS:
        raise KvlibError(f"way {way!r} given, expected one of {', '.join(WAYS)}: name one, or leave it out")
    reason = "asked for by name"
    if way == "auto":
        kind = next(source.parameters()).device.type
        way = "pipelined" if kind == "cuda" and mode != "materialised" else "serial"
        if mode == "materialised":
            reason = "materialised copies a whole cache"
        elif way == "pipelined":
            reason = "on cuda the source has a stream of its own beside the target's"
        elif kind == "cpu":
            reason = "on cpu source and target would compete for the same cores"
        else:
            reason = f"there is no pipeline on {kind}"
    if way == "pipelined":
        ready = pipelined(source, target, input_ids, cache_map, mode, chunk_tokens=chunk_tokens, check=check)
    else:
        guards.check_prompt(target, input_ids)
        guards.check_held_back(input_ids)
        prefix = prefill(source, input_ids[:, :-1], chunk_tokens=chunk_tokens)
        ready = handoff(target, prefix, cache_map, mode, check=check)
    ready.way, ready.way_reason = way, reason
    return ready
