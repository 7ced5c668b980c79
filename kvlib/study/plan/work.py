"""What each stage of a profile computes: its parts, each with a cost and how often it comes."""

from dataclasses import dataclass, replace

from kvlib.study.arms import Arm
from kvlib.study.controls import CONTROLS, NOISE
from kvlib.study.gate import GATE_PROMPTS
from kvlib.study.plan.bench import GATE_HANDOFFS, LOSS_PROMPTS, Bench
from kvlib.study.plan.operations import Cost
from kvlib.study.screening import GATE_WINDOWS
from kvlib.study.store import WINDOWS_AT_ONCE
from kvlib.study.timing import BREAKDOWN_REPETITIONS, BROKEN_DOWN, broken_down, native_repetitions
from kvlib.warmup import POSITIONS

HANDOFFS = 3  # direct, ridge and learned; the fourth resident path is stock attention's direct


@dataclass(frozen=True)
class Part:
    """Something that a stage does `times` times, each time at `cost`."""

    what: str
    cost: Cost
    times: float = 1


def parts_of(bench: Bench) -> dict[str, list[Part]]:
    """Stage -> what it does, in its order."""
    return {
        "pair": _pair(bench), "screening": _screening(bench), "confirmation": _confirmation(bench),
        "frozen_evaluation": _final(bench), "latency": _latency(bench),
    }  # fmt: skip


def _gate(bench: Bench, prompts: int, length: int, steps: int, *, prefill: bool = True) -> Cost:
    """`kvlib.study.gate.gate`; prefill: whether its length is the longest, whose pass serves all."""
    target = bench.runner("target")
    cost = target.head(prompts * (steps + 1)) + GATE_HANDOFFS * target.forced(prompts, length - 1, steps + 1)
    return cost + target.prefill(prompts, length + steps, hidden=True) if prefill else cost


def _pair(bench: Bench) -> list[Part]:
    profile, prompt = bench.profile, bench.profile.prompt
    parts = []
    if bench.has_pruning:
        windows, wide = profile.partitions.build.items, bench.runner("target", "float32")
        cost = wide.pruning(windows, profile.partitions.window_tokens, bench.source)
        parts.append(Part("pruning the target", cost))
    parts.append(Part("reading both models", bench.load("target") + bench.load("source")))
    prompts = profile.partitions.screen_validate.items
    for length in profile.evaluation.gate_prefix_tokens:
        parts.append(
            Part(
                f"gate over {length} tokens",
                _gate(bench, min(prompts, GATE_PROMPTS), length, prompt.forced_steps),
            )
        )
    tokens = prompt.prefix_tokens + prompt.forced_steps
    for role in ("target", "source"):
        runner = bench.runner(role)
        cost = runner.body(LOSS_PROMPTS, tokens - 1) + runner.head(LOSS_PROMPTS * (tokens - 1))
        parts.append(Part(f"loss of the {role} on held-out text", cost, prompts / LOSS_PROMPTS))
    return parts


def _caches(bench: Bench, windows: int, prompts: int) -> list[Part]:
    """Windows and prompts of a training stage, read by both models, and the ridge map."""
    profile, dtype = bench.profile, bench.training_dtype
    tokens, prompt, at_once = profile.partitions.window_tokens, profile.prompt, WINDOWS_AT_ONCE
    batch = min(profile.evaluation.batch_prompts, prompts)
    source, target = bench.runner("source", dtype), bench.runner("target", dtype)
    back = Cost(link=target.shape.cache_bytes(at_once, tokens, profile.training.cache_dtype))
    own_source, own_target = bench.runner("source"), bench.runner("target")
    reading = bench.load("source") + bench.load("target")
    if bench.is_mixed:
        reading = reading + bench.load("source", dtype) + bench.load("target", dtype)
    gated = (profile.training.min_prefix_tokens, prompt.prefix_tokens, tokens - prompt.forced_steps)
    return [
        Part("reading both models", reading),
        Part("validation prompts, source", own_source.prefill(batch, bench.cached), prompts / batch),
        Part(
            "validation prompts, target",
            own_target.oracle(batch, prompt.prefix_tokens, prompt.forced_steps),
            prompts / batch,
        ),
        Part("windows, source", source.prefill(at_once, tokens) + back, windows / at_once),
        Part("windows, target", target.prefill(at_once, tokens, hidden=True) + back, windows / at_once),
        Part("ridge map", target.ridge(windows, tokens)),
        *(
            Part(f"gate over {n} tokens", _gate(bench, GATE_WINDOWS, n, prompt.forced_steps))
            for n in sorted({*gated})
        ),
    ]


def _training(bench: Bench, arm: Arm, steps: int) -> list[Part]:
    profile, target = bench.profile, bench.runner("target", bench.training_dtype)
    size, whole = bench.micro_batch, bench.step_prompts
    cached, forced = bench.mean_cut - 1, profile.prompt.forced_steps
    moved = target.shape.cache_bytes(1, cached, profile.training.cache_dtype)
    numbers = bench.numbers(arm)
    step = target.training_step(
        size, cached, forced, per_head=None if arm.absorbable and bench.on_cpu else numbers,
        again=profile.training.checkpoint_activations,
    )  # fmt: skip
    if not arm.absorbable:
        step = step + 3 * target.corrected(size, cached, numbers)
    positions = min(POSITIONS, cached)
    warm = target.warmup_step(whole, positions, numbers) + Cost(link=2 * whole * moved)
    warmups = min(arm.warmup_steps, steps)
    return [
        Part("training, warm-up", warm, warmups),
        Part("training, divergence", step + Cost(link=size * moved), (steps - warmups) * whole / size),
    ]


def _scored(bench: Bench, prompts: int, tables: float) -> list[Part]:
    profile, target = bench.profile, bench.runner("target")
    batch, steps = min(profile.evaluation.batch_prompts, prompts), profile.prompt.forced_steps
    cost = target.forced(batch, bench.cached, steps) + target.head(batch * steps)
    cost = cost + Cost(link=target.shape.cache_bytes(batch, bench.cached, profile.pair.dtype))
    return [Part("scoring maps on validation prompts", cost, tables * prompts / batch)]


def unit_flop(bench: Bench, arm: Arm, steps: int, prompts: int, tables: int) -> float:
    """Operations of a training of so many steps, and of scoring so many maps on so many prompts."""
    parts = [*_training(bench, arm, steps), *_scored(bench, prompts, tables)]
    return sum(part.times * part.cost.flop for part in parts)


def _screening(bench: Bench) -> list[Part]:
    profile, settings = bench.profile, bench.profile.screening
    windows, prompts = profile.partitions.screen_train.items, profile.partitions.screen_validate.items
    grid = settings.select * len(settings.checkpoints) * len(settings.scales)
    found = profile.training.steps in settings.checkpoints and 1.0 in settings.scales
    tables = 2 + len(bench.arms) + grid - found * settings.select
    trainings = [part for arm in bench.arms for part in _training(bench, arm, profile.training.steps)]
    return [*_caches(bench, windows, prompts), *_together(trainings), *_scored(bench, prompts, tables)]


def _confirmation(bench: Bench) -> list[Part]:
    """The finalists are not known: centre arms stand in for them, to the last checkpoint."""
    profile, settings = bench.profile, bench.profile.screening
    windows, prompts = profile.partitions.confirm_train.items, profile.partitions.confirm_validate.items
    runs = settings.finalists * len(profile.confirmation.seeds)
    steps = max(settings.checkpoints)
    trainings = [
        replace(part, times=part.times * (runs + 1)) for part in _training(bench, bench.arms[0], steps)
    ]
    return [*_caches(bench, windows, prompts), *trainings, *_scored(bench, prompts, 2 + runs)]


def _together(parts: list[Part]) -> list[Part]:
    """Parts of one name as one, at their mean cost."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.what, []).append(part)
    merged = []
    for what, same in found.items():
        times = sum(part.times for part in same)
        total = sum((part.times * part.cost for part in same), Cost())
        merged.append(Part(what, total * (1 / times) if times else Cost(), times))
    return merged


def _final(bench: Bench) -> list[Part]:
    profile, prompt = bench.profile, bench.profile.prompt
    count, settings = profile.partitions.final.items, profile.evaluation
    batch, steps = min(settings.batch_prompts, count), prompt.forced_steps
    source, target = bench.runner("source"), bench.runner("target")
    references = {"oracle": target.oracle, "text": target.text}
    native = sum((references[name](batch, prompt.prefix_tokens, steps) for name in settings.forcings), Cost())
    rough = bench.is_mixed
    forced = target.forced(batch, bench.cached, steps) + target.head(batch * steps)
    tables = len(CONTROLS) + len(NOISE) - (not rough)
    own = 2 * target.prefill(batch, bench.cached)
    if rough:
        own = own + bench.runner("target", bench.training_dtype).prefill(batch, bench.cached)
    loads = bench.load("source") + bench.load("target")
    if rough:
        loads = loads + bench.load("target", bench.training_dtype)
    times = count / batch
    return [
        Part("reading both models", loads),
        Part("gate", _gate(bench, min(count, GATE_PROMPTS), prompt.prefix_tokens, steps)),
        Part("final prompts, source", source.prefill(batch, bench.cached), times),
        Part("final prompts, target", native, times),
        Part("paths", HANDOFFS * forced + 2 * target.head(batch * steps), times * len(settings.forcings)),
        Part("native for controls", own, times),
        Part("controls", forced, times * len(settings.forcings) * tables),
    ]


def _latency(bench: Bench) -> list[Part]:
    profile, config = bench.profile, bench.profile.latency
    source, target = bench.runner("source"), bench.runner("target")
    prompts = profile.partitions.latency.items
    parts = [Part("reading both models", bench.load("source") + bench.load("target"))]
    ways = HANDOFFS + 1 + len(config.modes)
    for index, tokens in enumerate(config.prefix_tokens):
        warm, repetitions, cold = (
            getattr(config, name)[index] for name in ("warmups", "repetitions", "cold_repetitions")
        )
        native = native_repetitions(config)[index]
        piped = (
            config.pipeline_repetitions[index] + 1
            if any(config.pipeline_repetitions[index : index + 1])
            else 0
        )
        step = target.forced(1, tokens - 1, 1)
        apart = len(BROKEN_DOWN) * (BREAKDOWN_REPETITIONS + 1) * (tokens in broken_down(config))
        steps = ways * (warm + repetitions) + HANDOFFS * cold + apart + 3 * piped + (ways + 1) * config.memory
        longest = tokens == max(config.prefix_tokens)
        reads = prompts * longest + HANDOFFS * cold + 2 * piped + (piped > 0)
        parts += [
            Part(
                f"{tokens:,} tokens, native",
                target.body(1, tokens) + target.head(1),
                max(warm - longest, 0) + native + config.memory,
            ),
            Part(f"{tokens:,} tokens, source", source.prefill(1, tokens - 1), reads),
            Part(f"{tokens:,} tokens, handoffs", step, steps),
            Part(f"{tokens:,} tokens, gate", _gate(bench, 1, tokens, 0, prefill=longest)),
        ]
    return parts
