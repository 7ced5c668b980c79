"""Hand a source's layers over as they are produced: the target reads layer by layer while the source goes on.

    with pipelined(source, target, input_ids, cache_map) as h:
        logits = h.logits(input_ids[:, -1:])      # or h.generate(input_ids, max_new_tokens=32)

A layer of the target needs the same layer of the source and the target's layer before, no more. So its first pass may
begin as soon as the source's first layer has the whole prompt, and ends soon after the source's last.
"""

import torch

from kvlib import guards
from kvlib.arrivals import arrivals_for
from kvlib.cache import PrefixCache, fill
from kvlib.errors import KvlibError
from kvlib.filled import filled_cache
from kvlib.geometry import Geometry, check_full_attention, name_or_type
from kvlib.handoff import Handoff, check_target, handoff
from kvlib.maps import CacheMap
from kvlib.origin import Origin


def pipelined(
    source,
    target,
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
    check_full_attention(source)
    guards.check_chunk(chunk_tokens)
    if input_ids.shape[1] < 2:
        raise KvlibError("a prompt of 1 token given, expected at least 2: the cache covers all but the last")
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
    """A `Handoff` whose prefix is still being written when it is entered."""

    def __init__(self, source, chosen: Handoff, chunk_tokens: int | None, check: bool):
        super().__init__(chosen.model, chosen.prefix, chosen.map, chosen.mode, chosen.reason, check)
        self.source, self.chunk_tokens = source, chunk_tokens
        self._arrivals = arrivals_for(self.prefix.device, len(self.prefix.keys))
        self._sums: dict[int, torch.Tensor] = {}  # of layers that were read: finite where all their entries are
        self._told = False  # the source's failure

    def __enter__(self) -> "PipelinedHandoff":
        super().__enter__()
        prefix, arrivals = self.prefix, self._arrivals
        tensors = list(zip(prefix.keys, prefix.values))
        cache = filled_cache(len(tensors), prefix.tokens, tensors, stop=True, written=arrivals.written)
        arrivals.start(lambda: fill(self.source, prefix.input_ids, cache, self.chunk_tokens))
        return self

    def __exit__(self, kind, error, trace) -> None:
        arrivals = self._arrivals
        arrivals.finish(stop=kind is not None)
        if not arrivals.whole:
            self.prefix.corrected_by = "half-finished"  # no handoff takes it
            self.folding = None  # and nothing is left to correct
        super().__exit__(kind, error, trace)
        if arrivals.failure is not None and kind is None and not self._told:
            raise self._failed() from arrivals.failure

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

    def _before_read(self, layer: int) -> None:
        try:
            self._arrivals.wait(layer)
        except BaseException as error:
            if error is not self._arrivals.failure:
                raise
            raise self._failed() from error
        if self.check and layer not in self._sums:
            held = (self.prefix.keys[layer], self.prefix.values[layer])
            self._sums[layer] = torch.stack([t.sum(dtype=torch.float32) for t in held])
        super()._before_read(layer)
