"""What each stage holds in device memory at its worst moments: weights that must be there, caches in flight, the rest."""

from dataclasses import replace

from kvlib.study.controls import CONTROLS
from kvlib.study.gate import GATE_PROMPTS
from kvlib.study.plan import memory
from kvlib.study.plan.bench import LOSS_PROMPTS, Bench
from kvlib.study.plan.memory import FLOAT32, Peak
from kvlib.study.store import WINDOWS_AT_ONCE
from kvlib.study.timing import times_the_source

PRUNING_CHUNK = 4  # windows that go through a layer together


def peaks_of(bench: Bench) -> dict[str, list[Peak]]:
    """Stage -> its worst moments, by phase."""
    training = _training_peaks(bench)
    return {
        "pair": _pair_peaks(bench), "screening": training, "confirmation": training,
        "frozen_evaluation": _final_peaks(bench), "latency": _latency_peaks(bench),
    }  # fmt: skip


def _pair_peaks(bench: Bench) -> list[Peak]:
    """One model at a time."""
    profile, prompt = bench.profile, bench.profile.prompt
    prompts = min(profile.partitions.screen_validate.items, GATE_PROMPTS)
    peaks = [
        _gate_peak(bench, prompts, length, prompt.forced_steps)
        for length in profile.evaluation.gate_prefix_tokens
    ]
    tokens = prompt.prefix_tokens + prompt.forced_steps - 1
    for role in ("target", "source"):
        runner = bench.runner(role)
        numbers = LOSS_PROMPTS * tokens * runner.shape.vocabulary
        logits = numbers * (runner.size + 2 * FLOAT32)  # as they come, in float32, and as log-probabilities
        peaks.append(
            Peak(f"loss of the {role}", runner.shape.weight_bytes(runner.dtype), 0,
                 max(0.0, memory.prefill_activations(runner, LOSS_PROMPTS, tokens) - logits), logits)
        )  # fmt: skip
    if bench.has_pruning:
        rows = profile.partitions.build.items * profile.partitions.window_tokens
        wide, small = bench.target, bench.source
        streams = rows * (wide.hidden + 2 * small.hidden + wide.heads * wide.head_dim) * FLOAT32
        chunk = PRUNING_CHUNK * profile.partitions.window_tokens * 3 * wide.mlp * FLOAT32
        weights = wide.weight_bytes("float32") + small.weight_bytes("float32") + wide.head * FLOAT32
        peaks.append(Peak("pruning", weights, 0, streams + chunk))
    return peaks


def _gate_peak(bench: Bench, prompts: int, length: int, steps: int) -> Peak:
    """A prefill, or a handoff of its cache: its own, the one handed back, and a corrected copy."""
    target = bench.runner("target")
    cache = target.shape.cache_bytes(prompts, length + steps, target.dtype)
    logits = (
        4 * prompts * (steps + 1) * target.shape.vocabulary * target.size
    )  # native's, a path's, their difference
    handed = memory.forced_activations(target, prompts, length, steps + 1)
    first = memory.prefill_activations(target, prompts, length + steps)
    return Peak(
        f"gate over {length:,} tokens", target.shape.weight_bytes(target.dtype), 3 * cache,
        max(handed, first - 2 * cache), logits,
    )  # fmt: skip


def _training_peaks(bench: Bench) -> list[Peak]:
    profile, dtype = bench.profile, bench.training_dtype
    tokens, prompt = profile.partitions.window_tokens, profile.prompt
    batch = profile.evaluation.batch_prompts
    target = bench.runner("target", dtype)
    peaks = [
        replace(
            memory.prefill(bench.runner("source", dtype), WINDOWS_AT_ONCE, tokens), phase="windows, source"
        ),
        replace(memory.prefill(target, WINDOWS_AT_ONCE, tokens, hidden=True), phase="windows, target"),
        replace(
            memory.oracle(bench.runner("target"), batch, prompt.prefix_tokens, prompt.forced_steps),
            phase="validation prompts, target",
        ),
    ]
    worst = max(
        (
            memory.training(
                target, bench.micro_batch, bench.longest_cut, prompt.forced_steps, bench.parameters(arm),
                features=0 if arm.absorbable else bench.features(arm), again=profile.training.checkpoint_activations,
                on_their_way=0 if bench.on_cpu else 2 * bench.step_prompts, on_cpu=bench.on_cpu,
            )
            for arm in bench.arms
        ),
        key=lambda peak: peak.total,
    )  # fmt: skip
    scoring = memory.scoring(
        bench.runner("target"), batch, bench.cached, prompt.forced_steps, on_cpu=bench.on_cpu
    )
    beside = bench.target.weight_bytes(profile.pair.dtype) if bench.is_mixed else 0
    kept = target.shape.head * FLOAT32 + (target.shape.weight_bytes(dtype) if bench.is_mixed else 0)
    return [
        *peaks,
        replace(worst, weights=worst.weights + beside),
        replace(scoring, weights=scoring.weights + kept),
    ]


def _final_peaks(bench: Bench) -> list[Peak]:
    profile, prompt = bench.profile, bench.profile.prompt
    batch, steps = min(profile.evaluation.batch_prompts, profile.partitions.final.items), prompt.forced_steps
    target = bench.runner("target")
    low = bench.target.weight_bytes(bench.training_dtype) if bench.is_mixed else 0
    kinds = len({kind for kind, _, _ in CONTROLS.values()})
    controls = memory.scoring(
        target, batch, bench.cached, steps, copies=kinds + 3, on_cpu=bench.on_cpu
    )  # native's two, and one to correct
    return [
        replace(memory.prefill(bench.runner("source"), batch, bench.cached), phase="final prompts, source"),
        replace(memory.oracle(target, batch, prompt.prefix_tokens, steps), phase="final prompts, target"),
        replace(controls, phase="controls", weights=controls.weights + low),
    ]


def _latency_peaks(bench: Bench) -> list[Peak]:
    """Both models, where the source is timed too, and the longest source cache are there before any clock starts."""
    longest = max(bench.profile.latency.prefix_tokens)
    target, source = bench.runner("target"), bench.runner("source")
    both = target.shape.weight_bytes(target.dtype)
    alone = []
    if times_the_source(bench.profile.latency):
        both += source.shape.weight_bytes(source.dtype)
    else:
        alone = [memory.prefill(source, 1, longest, hidden=False)]
    cache = target.shape.cache_bytes(1, longest, target.dtype)
    native = memory.prefill(target, 1, longest, hidden=True)
    return [
        *alone,
        replace(_gate_peak(bench, 1, longest, 0), weights=both),
        replace(native, phase=f"native, {longest:,} tokens", weights=both, caches=native.caches + cache),
        # stock attention grows its cache by copying it, other ways write a corrected one
        Peak(
            f"handoff, {longest:,} tokens", both, 2 * cache, memory.forced_activations(target, 1, longest, 1)
        ),
    ]
