"""Hand a source's cache through a map into a target model, and go on from there.

    with handoff(target, prefix, cache_map) as h:
        logits = h.logits(tokens)          # the prompt's held-back last token, then forced or chosen ones
        ids = h.generate(input_ids, max_new_tokens=32)

`prefix` covers all of the prompt but its last token. The chosen mode and the reason are on the result.
"""

import torch
from transformers import PreTrainedModel

from kvlib import guards
from kvlib.cache import PrefixCache, prefill
from kvlib.compiled import compiled_by, why_not_by_itself, why_not_compiled
from kvlib.errors import KvlibError
from kvlib.geometry import Geometry, name_or_type
from kvlib.maps import CacheMap, DirectMap
from kvlib.marks import check_uncorrected
from kvlib.reading import CORRECTING, Handoff

# Kinds of model that the tests hold against native prefill; any other is held against it here, before it is used.
PROVEN = ("gemma", "llama", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2")
MODES = ("auto", "absorbed", "in_place", "materialised", "background")


def handoff(
    model: PreTrainedModel,
    prefix: PrefixCache,
    cache_map: CacheMap,
    mode: str = "auto",
    *,
    check: bool = True,
    source: PreTrainedModel | None = None,
    compiled: bool | None = None,
) -> Handoff:
    """Prepare a handoff; use it as a context manager (the model is restored on leaving).

    Args:
        model: the target. prefix: the source's cache over all but the prompt's last token.
        mode: "absorbed" leaves the cache alone and applies the map inside attention; "in_place" corrects the prefix's
            own tensors, each layer right before it is first read; "background" begins absorbed and corrects them over
            the calls after the first; "materialised" corrects a copy. "auto" takes absorbed where the map allows it,
            else in_place, on a processor by the compiled pass where there is one; of a map whose values are affine that pass
            corrects the keys alone, and attention absorbs the rest: such a cache is used up for good. None of these leaves
            a cache corrected in some layers only.
        check: geometry, dtype, device, length and finite values; vocabulary and rotary embedding where the prefix's
            origin is known; finite logits. Leave it on unless the same prefix was checked before.
        source: the model, or its `Origin.identity`, that must have computed the prefix. None: any whose cache fits.
        compiled: correct in place by one compiled pass: on a processor C, about a second the first time and kept for later,
            on a GPU torch.compile, most of a minute once per process. `reason` says by what. With "auto" that comes to
            absorbed there is nothing to compile, and `reason` says that. None: "auto" does so by itself on a processor with
            a C compiler, for a map that can be compiled, and else `reason` says why not; modes asked for by name do not.

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
        check_uncorrected(prefix, cache_map)
    elif source is not None:
        raise KvlibError(
            "source= given with check=False, expected one of the two: source= asks for a check, so leave check on"
        )
    obstacle = cache_map.why_not_affine
    if mode in ("absorbed", "background") and obstacle:
        raise KvlibError(
            f"mode {mode!r} asked of a {cache_map.kind} map, but {obstacle}: use mode='in_place'"
        )
    reason, asked = "asked for by name", mode
    if mode == "auto":
        mode = "in_place" if obstacle else "absorbed"
        reason = obstacle or "the map is affine in each head's own vector, so attention absorbs it"
    chosen = compiled is None
    if chosen and asked == "auto" and mode == "in_place":
        why = why_not_by_itself(cache_map, prefix.device)
        compiled = why is None
        if why:
            reason = f"{reason}; corrected in place by the plain pass ({why})"
    elif compiled and asked == "auto" and mode == "absorbed":
        compiled, reason = False, f"{reason}; nothing is corrected in place, so nothing was compiled"
    keys_only = bool(chosen and compiled and cache_map.value_affines is not None)
    if compiled:
        _check_compilable(cache_map, mode)
        what = "values absorbed, keys corrected" if keys_only else "corrected"
        reason = f"{reason}; {what} in place by a pass compiled by {compiled_by(prefix.device)}"
    if mode in CORRECTING and check:
        guards.check_writable(prefix)
    return Handoff(model, prefix, cache_map, mode, reason, check, bool(compiled), chosen, keys_only)


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


def _check_compilable(cache_map, mode: str) -> None:
    why = why_not_compiled(cache_map) if mode in CORRECTING else "which corrects nothing in place"
    if why:
        raise KvlibError(
            f"compiled=True given with mode {mode!r} of a {cache_map.kind} map ({why}): leave compiled out"
        )


def _check_source(prefix: PrefixCache, source) -> None:
    if not isinstance(source, str) and not callable(getattr(source, "parameters", None)):
        raise KvlibError(
            f"source= {guards.kind_of(source)} given, expected the model that computed the cache, or its Origin.identity: "
            "pass one of them, such as pair.source"
        )
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
