"""Sentences of the latency chapter about what the correction costs: the moved point, its ways, the floor, the limits."""

from kvlib.breakdown import MAP, PYTHON
from kvlib.report.palette import path_label
from kvlib.report.speed import (
    Target,
    floor_of,
    mode_of,
    parts_of,
    ratio_at,
    row_of,
    share,
    way_of,
)
from kvlib.report.summaries import headline, prefix_lengths
from kvlib.report.wording import (
    bytes_text,
    count,
    factor,
    gigabytes_per_second,
    join,
    milliseconds,
    number,
    of,
    percent,
    plural,
)

SAME = 0.05  # peaks that are closer than this share are the same: memory comes in pages
UNMOVED = "The learned map was not written out in this run, so the point that the study calls a trade-off is not in the chart."


def speed_facts(final: dict, latency: dict, targets: list[Target]) -> dict[str, str]:
    """targets: `kvlib.report.speed.targets` of this run."""
    longest = prefix_lengths(latency)[-1]
    limit = next(one.at_least for one in targets if one.id == "learned_direct")
    return {
        "moved": moved_sentence(final, latency, longest, limit),
        "stock": _against(latency, "learned_stock", longest, "direct reuse in the model's own attention"),
        "native_ratio": native_sentence(latency, longest),
        "memory_ratios": memory_sentence(latency, longest),
        "ways": ways_sentence(latency, longest),
        "left_out": left_out_sentence(latency),
        "floor": floor_sentence(latency, longest),
        "parts": parts_sentence(latency),
        "profiler": profiler_sentence(latency),
        "pipeline": pipeline_sentence(latency),
        "reached": reached_sentence(targets),
    }


def price_sentence(latency: dict, tokens: int, limit: float) -> str:
    """What the learned correction costs over direct reuse at one length; limit: up to which ratio it counts as nothing."""
    ratio, direct = ratio_at(latency, "learned_direct", tokens), row_of(latency, tokens, "direct")
    if ratio is None:
        return "This run has no pair of times to compare the learned correction with direct reuse."
    said = f"Direct reuse takes {milliseconds(direct['p50_ms'])}"
    if ratio <= limit:
        return f"{said}: the better fidelity costs next to no time."
    return f"{said}: the better fidelity has its price, {factor(ratio)} the time."


def moved_sentence(final: dict, latency: dict, tokens: int, limit: float) -> str:
    """Whether the point that the study calls a trade-off has moved to direct's latency, at one fidelity."""
    learned, written = row_of(latency, tokens, "learned"), mode_of(latency, tokens, "materialised")
    direct, ratio = row_of(latency, tokens, "direct"), ratio_at(latency, "learned_direct", tokens)
    if written is None or ratio is None:
        return UNMOVED
    kl = headline(final)["paths"]["learned"]["kl32"]["mean"]
    how = way_of(learned)
    text = (
        f"At {tokens:,} tokens the learned correction, with its KL32 of {number(kl)} nats, gives the first token after "
        f"{milliseconds(written['p50_ms'])} when it is written out into a second cache, which is {factor(share(written, direct))} "
        f"direct reuse's {milliseconds(direct['p50_ms'])}; {how}, as it is handed over, it takes "
        f"{milliseconds(learned['p50_ms'])}, {factor(ratio)} direct reuse{_over_all(latency, 'learned_direct')}."
    )
    if ratio <= limit:
        return f"{text} The point that the study calls a trade-off has moved: the same fidelity, at direct's latency."
    if learned["p50_ms"] < written["p50_ms"]:
        return (
            f"{text} The point has moved at the same fidelity, but not as far as direct's latency: the limit set beforehand was "
            f"{limit:g} times direct reuse."
        )
    return f"{text} Here the point has not moved: the way that is handed over is no faster than writing out."


def _over_all(latency: dict, name: str) -> str:
    """The range of a ratio over all lengths that were measured, in brackets."""
    found = [r for r in (ratio_at(latency, name, t) for t in prefix_lengths(latency)) if r is not None]
    return f" ({min(found):.2f} to {max(found):.2f} over all lengths)" if len(found) > 1 else ""


def _against(latency: dict, name: str, tokens: int, what: str) -> str:
    if ratio_at(latency, name, tokens) is None:
        return f"This run has no times to set against {what}."
    ratios = {t: ratio_at(latency, name, t) for t in prefix_lengths(latency)}
    slower = [f"{t:,}" for t, ratio in ratios.items() if ratio is not None and ratio > 1]
    text = (
        f"Against {what} the learned correction takes {factor(ratios[tokens])} the time at {tokens:,} tokens"
        f"{_over_all(latency, name)}"
    )
    return f"{text}; at {join(slower)} tokens it is the slower one." if slower else f"{text}."


def native_sentence(latency: dict, tokens: int) -> str:
    ratio = ratio_at(latency, "native_learned", tokens)
    if ratio is None:
        return "This run has no pair of times to set against native prefill."
    said = factor(ratio) if ratio >= 1 else f"only {factor(ratio)}"
    return f"Native prefill takes {said} as long as the learned handoff at {tokens:,} tokens."


def memory_sentence(latency: dict, tokens: int) -> str:
    learned, direct = row_of(latency, tokens, "learned"), ratio_at(latency, "learned_direct_peak", tokens)
    native, written = (
        ratio_at(latency, "learned_native_peak", tokens),
        mode_of(latency, tokens, "materialised"),
    )
    if direct is None or native is None:
        return "Peak memory was not measured for these paths in this run."
    apart = abs(learned["peak_extra_bytes"] - row_of(latency, tokens, "direct")["peak_extra_bytes"])
    against = f"{factor(direct)} what direct reuse needs"
    if abs(direct - 1) < SAME:
        against = f"as direct reuse does, to within {bytes_text(apart)}"
    text = (
        f"At {tokens:,} tokens the learned handoff needs {bytes_text(learned['peak_extra_bytes'])} at its peak, {against}, and "
        f"{percent(native)} of what native prefill needs. At short prefixes all of it is a few hundred KiB, where pages of memory show."
    )
    if written is None or written["peak_extra_bytes"] is None:
        return text
    return f"{text} Written out it needs {bytes_text(written['peak_extra_bytes'])}."


def ways_sentence(latency: dict, tokens: int) -> str:
    """Each other way's time at one length, against direct reuse."""
    direct, said = row_of(latency, tokens, "direct"), []
    for row in latency["modes"]:
        if row["prefix_tokens"] == tokens:
            said.append(
                f"{way_of(row)} {milliseconds(row['p50_ms'])} ({factor(share(row, direct))} direct reuse)"
            )
    if not said:
        return "No other way of applying the map was timed in this run."
    return f"At {tokens:,} tokens the same map takes, by the way in which it is applied: {join(said, '; ')}."


def left_out_sentence(latency: dict) -> str:
    if not latency["left_out"]:
        return "No way that was asked for was left out."
    said = [f"{r['mode'].replace('_', ' ')} ({r['reason']})" for r in latency["left_out"]]
    return f"Left out: {join(said, '; ')}."


def floor_sentence(latency: dict, tokens: int) -> str:
    floor, ratio = floor_of(latency, tokens), ratio_at(latency, "direct_floor", tokens)
    return (
        f"At {tokens:,} tokens one step must read {bytes_text(floor['weight_bytes'])} of weights and "
        f"{bytes_text(floor['cache_bytes'])} of cache, which at the {gigabytes_per_second(latency['memory_bandwidth_gb_s'])} measured "
        f"in this run takes {milliseconds(floor['floor_ms'])}: the floor. Direct reuse takes {factor(ratio)} that."
    )


def parts_sentence(latency: dict) -> str:
    """The largest part of the learned step at the longest length, and what the map itself takes."""
    bars = [r["prefix_tokens"] for r in latency["breakdown"] if r["path"] == "learned"]
    if not bars:
        return "No step was taken apart in this run."
    parts = parts_of(latency, max(bars), "learned")
    whole, largest = sum(parts.values()), max(parts, key=parts.get)
    own = (
        f"the map itself takes {milliseconds(parts[MAP])}, {percent(parts[MAP] / whole)}."
        if parts[MAP]
        else "the map itself is applied within attention, and takes no part of its own."
    )
    return f"Of the learned step over {max(bars):,} tokens the largest part is “{largest}”, {percent(parts[largest] / whole)}; {own}"


def profiler_sentence(latency: dict) -> str:
    """What the profiler adds: the profiled step and its operators against the same path's median without it."""
    said = []
    for tokens, path in dict.fromkeys((r["prefix_tokens"], r["path"]) for r in latency["breakdown"]):
        parts, timed = parts_of(latency, tokens, path), row_of(latency, tokens, path)
        operators = sum(ms for part, ms in parts.items() if part != PYTHON)
        said.append(
            f"{milliseconds(sum(parts.values()))}, {milliseconds(operators)} of it in operators, instead of "
            f"{milliseconds(timed['p50_ms'])} ({path_label(path)}, {tokens:,} tokens)"
        )
    if not said:
        return "Without a profiled step there is no overhead of a profiler to state."
    return (
        f"A step under the profiler is longer than one that is only timed, and not by Python's part alone: {'; '.join(said)}. "
        "Read the parts as rough shares."
    )


def pipeline_sentence(latency: dict) -> str:
    rows = sorted(
        (r for r in latency["pipeline"] if r["path"] == "learned"), key=lambda r: r["prefix_tokens"]
    )
    if not rows:
        return "The pipeline was not measured in this run."
    said, beside = [], []
    for row in rows:
        saved = 1 - row["pipelined_p50_ms"] / row["serial_p50_ms"]
        verb = "saves" if saved > 0 else "costs"
        said.append(
            f"{verb} {percent(abs(saved))} at {row['prefix_tokens']:,} tokens ({plural(row['repetitions'], 'repetition')})"
        )
        beside.append(f"{row['serial_handoff_p50_ms'] / row['resident_p50_ms']:.2f}")
    return (
        f"Against one after the other, the pipeline {join(said, '; ')}. One after the other, what comes after the source's prefill takes, at "
        f"these lengths, {join(beside)} times the resident handoff when the two are timed side by side."
    )


def reached_sentence(targets: list[Target]) -> str:
    known = [one for one in targets if one.met is not None]
    if not known:
        return "None of the figures was measured in this run."
    met, missed = (
        sum(one.met for one in known),
        [f"{one.what} ({one.value:.3g} at {one.tokens:,} tokens)" for one in known if not one.met],
    )
    text = f"Of the figures that were set beforehand this run measures {count(len(known))}, and {of(met, len(known))} "
    text += f"{'is' if met == 1 else 'are'} met"
    text += f"; not met: {'; '.join(missed)}." if missed else "."
    aimed = [one for one in known if one.aim is not None]
    return (
        f"{text} The aim is reached by {of(sum(bool(one.aimed) for one in aimed), len(aimed))} that have one."
    )
