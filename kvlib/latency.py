"""Time to first token: every path into the target, interleaved, the device synchronised around each clock.

On the clock. Native: the target reads all T tokens and keeps their cache. The other paths start from the
source's cache over the first T − 1 tokens, and the target reads the last one. For all of them the head on one
position, the argmax and its way to the host count, and so does all that a map does per prompt: weights cast
to the dtype in which they are applied, corrected caches, attention attached and taken away.

All paths multiply with weights by the same kernels (`kvlib.linear`), native and stock included.

Not on it. Weights of models and maps are loaded before. `PrefixCache.check_finite` reads the whole cache to
catch a broken model: that validates what was produced and is no part of handing it over, so it runs once per
cache before the clocks, which use `handoff(check=False)`. A map that works in place consumes the cache it is
given: `resident` repetitions get a fresh copy, made before their clock starts. Python's garbage collector
rests while a clock runs.

`cold` starts before the source's prefill and never stops the clock; a synchronisation at the source's end
gives `handoff_ms` within the same repetition.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from kvlib.cache import Geometry, PrefixCache, check_prompt, forward, prefill
from kvlib.clocks import clock
from kvlib.errors import KvlibError
from kvlib.handoff import handoff
from kvlib.linear import fast_linears
from kvlib.maps import CacheMap, DirectMap

WAYS = ("prefill", "stock", "handoff")


@dataclass(frozen=True, eq=False)  # a map holds tensors, which do not compare
class TargetPath:
    """One way to the target's first token.

    name: as in the records. way: "prefill" is native; "stock" is transformers' own attention on the source's
    cache; "handoff" goes through `kvlib.handoff` with `cache_map`, `mode` and `compiled` (None: as "auto" chooses).
    """

    name: str
    way: str
    cache_map: CacheMap | None = None
    mode: str = "auto"
    compiled: bool | None = None

    def __post_init__(self):
        if self.way not in WAYS or (self.way == "handoff") != (self.cache_map is not None):
            raise KvlibError(
                f"path {self.name} goes by {self.way!r} {'with' if self.cache_map else 'without'} a map, "
                f"expected one of {', '.join(WAYS)}, with a map for 'handoff' only"
            )

    @property
    def consumes_prefix(self) -> bool:
        """Whether the cache handed over cannot be used again."""
        if self.way != "handoff":
            return False
        return self.mode == "in_place" or (self.mode == "auto" and self.cache_map.why_not_affine is not None)


def standard_paths(maps: dict[str, CacheMap]) -> list[TargetPath]:
    """native, direct, direct_stock, then a handoff for each of `maps` (ridge, learned)."""
    fixed = [
        TargetPath("native", "prefill"),
        TargetPath("direct", "handoff", DirectMap()),
        TargetPath("direct_stock", "stock"),
    ]
    return fixed + [TargetPath(name, "handoff", cache_map) for name, cache_map in maps.items()]


@dataclass(frozen=True)
class FirstToken:
    """token: its id, on the host. mode: how it came about, compiled: by a compiled pass. cache: what decoding would go on with."""

    token: int
    mode: str
    cache: object
    compiled: bool = False


@dataclass(frozen=True)
class Sample:
    """One repetition. prompt: index of the prefix. order: place in the run, warm-ups left out.

    ms: the whole clock. handoff_ms: its part after the source's prefill, None where there was none in it.
    """

    prefix_tokens: int
    path: str
    residency: str
    repetition: int
    prompt: int
    order: int
    ms: float
    handoff_ms: float | None
    mode: str
    token: int
    compiled: bool = False


@torch.no_grad()
def first_token(target, path: TargetPath, prompt: torch.Tensor, prefix: PrefixCache | None) -> FirstToken:
    """The target's first token after `prompt` (1, T); prefix: the source's cache over T − 1, native has none.

    The stock path is "materialised": transformers' cache grows by concatenation, so that a second, whole
    cache is written beside the one handed over.
    """
    head, last, compiled = target.get_output_embeddings(), prompt[:, -1:], False
    if path.way == "prefill":
        cache, mode = DynamicCache(), "prefill"
        positions = torch.arange(prompt.shape[1], device=prompt.device).unsqueeze(0)
        with fast_linears(target):
            logits = head(forward(target, prompt, cache, positions)[:, -1:])
    elif path.way == "stock":
        cache, mode = prefix.to_dynamic(), "materialised"
        with fast_linears(target):
            logits = head(forward(target, last, cache, prefix.lengths.unsqueeze(1)))
    else:
        options = {"check": False, "compiled": path.compiled}
        with handoff(target, prefix, path.cache_map, path.mode, **options) as active:
            logits = active.logits(last, last=True)
        cache, mode, compiled = active.cache, active.mode, active.compiled
    return FirstToken(int(logits[0, -1].argmax()), mode, cache, compiled)


@dataclass(frozen=True, eq=False)
class Round:
    """Clocks to run one after the other on one prompt: (path, residency, repetition or None in a warm-up)."""

    prompt: int
    clocks: list[tuple[TargetPath, str, int | None]]


def schedule(
    paths: Sequence[TargetPath],
    prompts: int,
    *,
    warmups: int,
    repetitions: int,
    cold_repetitions: int,
    seed: int | str,
    resident_only: Sequence[TargetPath] = (),
    native_repetitions: int | None = None,
    native_warmups: int | None = None,
) -> list[Round]:
    """Rounds in which every path appears once, in an order drawn anew each time.

    Args:
        prompts: how many there are. The rounds are shared out among them one prompt after the other, so that
            only one resident cache (and a copy for a map in place) is in memory at a time.
        warmups: rounds of every resident path, first. Cold repetitions have none of their own: each of their
            two parts has run by then.
        repetitions: of each path, resident. cold_repetitions: of each handoff, evenly over the rounds.
        resident_only: more paths, in the same rounds, for which no source is read again.
        native_repetitions: of native prefill, evenly over the rounds: where it takes a thousand times as long as a
            handoff, the handoffs' medians need not rest on as few. None: as many as the others.
        native_warmups: how many of the warm-ups native has, the last ones. None: all.
    """
    native_repetitions = repetitions if native_repetitions is None else native_repetitions
    draw, number = random.Random(seed), max(repetitions, cold_repetitions, native_repetitions)
    handoffs = [path for path in paths if path.way == "handoff"]
    paths = [*paths, *resident_only]
    native = [path for path in paths if path.way == "prefill"]
    others = [path for path in paths if path.way != "prefill"]
    native_warmups = warmups if native_warmups is None else native_warmups
    rounds = []
    for i in range(warmups):
        warmed = paths if i >= warmups - native_warmups else others
        rounds.append(Round(0, [(path, "resident", None) for path in warmed]))
    rounds += [Round(n * min(prompts, number) // number, []) for n in range(number)]
    groups = ("resident", others, repetitions), ("resident", native, native_repetitions)
    for residency, group, count in (*groups, ("cold", handoffs, cold_repetitions)):
        for i in range(count):
            rounds[warmups + i * number // count].clocks.extend((path, residency, i) for path in group)
    for one in rounds:
        draw.shuffle(one.clocks)
    return rounds


@dataclass(frozen=True, eq=False)
class MadeCaches:
    """The source's caches, made once for all lengths; or before the target is loaded, where a device does not hold both models.

    caches: of each prompt, over the longest prefix, in the host's memory.
    """

    caches: list[PrefixCache]

    @classmethod
    def of(cls, source, prompts: torch.Tensor) -> "MadeCaches":
        """prompts: token ids (N, T); the caches are over the first T − 1."""
        made = (prefill(source, prompts[n : n + 1, :-1]) for n in range(len(prompts)))
        return cls([cache.check_finite("the source").to("cpu") for cache in made])

    def over(self, prompt: int, tokens: int, device: torch.device) -> PrefixCache:
        """Its first `tokens` positions: the cache of a shorter prefix, since a position sees none after it."""
        return self.caches[prompt].slice(tokens).clone().to(device)


@torch.no_grad()
def measure(
    target,
    source,
    rounds: Sequence[Round],
    prompts: torch.Tensor,
    progress: Callable[[str, str], None] | None = None,
    afterwards: Callable[[torch.Tensor, PrefixCache], None] | None = None,
    caches: MadeCaches | None = None,
) -> list[Sample]:
    """Time every path at one prefix length.

    Args:
        source: a model, or `MadeCaches` of these prompts where no round is cold.
        rounds: from `schedule`. prompts: token ids (N, T).
        progress: called after each clock, warm-ups included, with the path's name and its residency, and with
            ("source", "prefill") after a resident cache was made.
        afterwards: called once with the last prompt (1, T) and its resident cache, when all clocks have run.
        caches: of these prompts, or of what they begin, for the resident clocks. None: `source` makes them here.

    Raises: KvlibError when models, prompts and maps do not fit, or the source's cache is not finite.
    """
    check_prompt(target, prompts)
    made = source if isinstance(source, MadeCaches) else caches
    if not isinstance(source, MadeCaches):
        check_prompt(source, prompts)
    elif any(residency == "cold" for one in rounds for _, residency, _ in one.clocks):
        raise KvlibError(
            "cold rounds and caches made beforehand given, expected a source model: give one, or no cold rounds"
        )
    if prompts.shape[1] < 2:
        raise KvlibError("prompts of 1 token given, expected at least 2: the cache covers all but the last")
    for path in {path for one in rounds for path, _, _ in one.clocks if path.cache_map is not None}:
        path.cache_map.check_fits(Geometry.of(target))
    report = progress or (lambda name, residency: None)
    samples, prefix, held = [], None, None
    for one in rounds:
        prompt = prompts[one.prompt : one.prompt + 1]
        if one.prompt != held:
            prefix = None  # let the last one go before the next is made
            cached, held = prompt[:, :-1], one.prompt
            prefix = made.over(held, cached.shape[1], prompt.device) if made else prefill(source, cached)
            prefix.check_fits(target, "the source's cache").check_finite("the source")
            report("source", "prefill")
        for path, residency, repetition in one.clocks:
            if residency == "resident":
                result, ms, handoff_ms = _time_resident(target, path, prompt, prefix)
            else:
                result, ms, handoff_ms = _time_cold(target, source, path, prompt)
            if repetition is not None:
                samples.append(
                    Sample(
                        prompts.shape[1], path.name, residency, repetition, one.prompt, len(samples),
                        ms, handoff_ms, result.mode, result.token, result.compiled,
                    )
                )  # fmt: skip
            del result  # a whole cache: not to be kept while the next path runs
            report(path.name, residency)
    if afterwards is not None and prefix is not None:
        afterwards(prompt, prefix)
    return samples


def _time_resident(target, path, prompt, prefix):
    if path.consumes_prefix:
        prefix = prefix.clone()
    with clock(prompt.device) as read:
        result = first_token(target, path, prompt, prefix)
        ms = read()
    return result, ms, None


def _time_cold(target, source, path, prompt):
    with clock(prompt.device) as read:
        prefix = prefill(source, prompt[:, :-1])
        source_ms = read()
        result = first_token(target, path, prompt, prefix)
        ms = read()
    return result, ms, ms - source_ms
