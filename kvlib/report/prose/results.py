"""Sentences of chapters 03 and 04: fidelity and time, and how sure one can be."""

import pandas as pd

from kvlib.report.agreement import paired_top1, side
from kvlib.report.palette import path_label
from kvlib.report.summaries import (
    headline,
    lengths_around,
    main_forcing,
    median_times,
    prefix_lengths,
)
from kvlib.report.wording import (
    count,
    gigabytes_per_second,
    interval,
    join,
    milliseconds,
    number,
    p_value,
    percent,
    plural,
    ratio,
    signed,
    signed_percent,
)


def final_facts(final: dict) -> dict[str, str]:
    """Facts of the frozen evaluation; a forcing that was not run has its sentences too, and they say so."""
    paths = headline(final)["paths"]
    facts = {
        "prompts": count(paths["native"]["prompts"]),
        "articles": count(final["articles"]),
        "manifest": final["frozen"],
    }
    for forcing in ("oracle", "text"):
        for path in ("learned", "ridge"):
            result = final["forcing"].get(forcing, {}).get("paired", {}).get(f"{path}-direct")
            missing = f"The forcing “{forcing}” was not run for the {path_label(path)}."
            facts[f"{forcing}_{path}_verdict"] = paired_verdict(path, result) if result else missing
            facts[f"{forcing}_{path}_tests"] = paired_tests(result) if result else missing
    learned = headline(final)["paths"]["learned"]["kl32"]
    facts["tail"] = (
        f"The learned path's median prompt has {number(learned.get('median'))} nats against a mean of "
        f"{number(learned['mean'])}; a tenth of "
        f"the prompts lie above {number(learned.get('q90'))}. "
        + (
            f"The mean is {percent(learned['mean'] / learned['median'] - 1)} above the median: a few hard prompts carry part "
            "of it."
            if learned.get("median") and learned["mean"] > learned["median"]
            else "The mean does not lie above the median."
        )
    )
    facts["opened"] = f"The final prompts have been opened {times(final['opened'])} for this run."
    learned = headline(final)["paired"]["learned-direct"]
    facts["worse"] = (
        f"On {count(learned['losses'])} of {learned['prompts']} prompts, {percent(learned['losses'] / learned['prompts'])}, the "
        "learned correction is further from native than direct reuse."
        if learned.get("losses") is not None
        else "How many prompts get worse cannot be said."
    )
    return facts


def top1_sentence(final: dict, prompts: pd.DataFrame) -> str:
    """Whether the learned path's most likely token is native's more often than direct reuse's, prompt by prompt."""
    found = paired_top1(prompts, main_forcing(final))
    if found["mean"] is None:
        return f"Top-1 agreement cannot be compared prompt by prompt: {found['note']}."
    ci = found.get("ci95")
    said = f", 95 % interval {signed(100 * ci[0], 2)} to {signed(100 * ci[1], 2)}" if ci else ""
    text = (
        f"The share of steps with native's most likely token changes by {signed(100 * found['mean'], 2)} percentage points{said}; "
        f"it is higher on {count(found['wins'])} prompts, lower on {count(found['losses'])} and equal on {count(found['ties'])}."
    )
    told = {
        1: "By this measure too the correction brings the target closer to native.",
        -1: "By this measure the correction does harm.",
        0: "That is not distinguishable from zero: the gain shows in the distributions, not surely in the most likely token.",
        None: "There is no interval to judge that by.",
    }
    return f"{text} {told[side(found)]}"


def step_facts(steps) -> dict[str, str]:
    """How KL moves from the first forced step to the last, under the first forcing there is."""
    one = steps[steps["forcing"] == steps["forcing"].iloc[0]]
    mean = one.groupby(["path", "step"])["kl"].mean()
    said = []
    for path in ("direct", "learned"):
        first, last = mean[path].iloc[0], mean[path].iloc[-1]
        said.append(f"{number(first, 3)} to {number(last, 3)} for the {path_label(path)}")
    falls = all(mean[path].iloc[0] > mean[path].iloc[-1] for path in ("direct", "learned"))
    word = "It fades here" if falls else "It does not simply fade here"
    return {"step_change": f"{word}: from the first forced step to the last, mean KL goes from {join(said)}."}


def paired_verdict(path: str, result: dict) -> str:
    """What a path's paired difference from direct reuse says, and how sure one can be."""
    name = path_label(path)
    if result["mean"] is None:
        return (
            f"The {name} cannot be compared with direct reuse: {result.get('note', 'there are no values')}."
        )
    ci, prompts = result.get("ci95"), result["prompts"]
    text = (
        f"The {name} differs from direct reuse by {signed(result['mean'])} nats on average"
        + (f" ({signed_percent(result['relative'])})" if result.get("relative") is not None else "")
        + (f", 95 % interval {interval(ci)}" if ci else "")
        + f"; its KL32 is lower on {result['wins']} of {prompts} prompts."
    )
    if not ci:
        return f"{text} There is no interval to judge that by."
    if ci[1] < 0:
        return (
            f"{text} The interval lies below zero: with it the target is closer to native than with the "
            "source's cache as it is."
        )
    if ci[0] > 0:
        return f"{text} The interval lies above zero: here the map does harm."
    return f"{text} The interval holds zero: this run cannot tell the two apart."


def paired_tests(result: dict) -> str:
    return (
        f"The bootstrap's interval (BCa) is {interval(result.get('bca95'))}. The Wilcoxon signed-rank test "
        f"gives {p_value(result.get('wilcoxon_p'))}, the exact sign test {p_value(result.get('sign_p'))}. "
        f"With errors clustered by article the standard error is {number(result.get('se_clustered'))} "
        f"instead of {number(result.get('se'))}."
    )


def latency_facts(latency: dict) -> dict[str, str]:
    lengths = prefix_lengths(latency)
    longest, shortest = lengths[-1], lengths[0]
    times_ms = median_times(latency, longest)
    native = times_ms["native", "resident"]
    repeats = {
        kind: {
            t: [
                r["repetitions"]
                for r in latency["rows"]
                if r["prefix_tokens"] == t and r["residency"] == kind and r["path"] != "native"
            ]
            for t in lengths
        }
        for kind in ("resident", "cold")
    }
    native_repeats = {
        t: [r["repetitions"] for r in latency["rows"] if r["prefix_tokens"] == t and r["path"] == "native"]
        for t in lengths
    }
    facts = {
        "device": str(latency["device"]),
        "dtype": str(latency["dtype"]),
        "bandwidth": gigabytes_per_second(latency["memory_bandwidth_gb_s"]),
        "threads": f"{latency['threads']}",
        "longest": f"{longest:,}",
        "shortest": f"{shortest:,}",
        "lengths": count(len(lengths)),
        "repetitions": _counts(repeats["resident"]),
        "native_repetitions": _counts(native_repeats),
        "cold_repetitions": _counts(repeats["cold"]),
        "cold_longest": plural(max(repeats["cold"][longest], default=0), "repetition"),
        "native_longest": milliseconds(native),
        "modes": join(
            sorted({f"{path_label(r['path'])} ({r['mode'].replace('_', ' ')})" for r in latency["rows"]})
        ),
    }
    for kind in ("resident", "cold"):
        learned, direct = (times_ms.get((path, kind)) for path in ("learned", "direct"))
        facts[f"learned_{kind}"] = milliseconds(learned)
        facts[f"direct_{kind}"] = milliseconds(direct)
        when = {
            "resident": "With the source's cache in memory, at",
            "cold": "Counting the source's own prefill too, at",
        }[kind]
        facts[f"{kind}_verdict"] = (
            f"{when} {longest:,} tokens the first token through the learned correction takes "
            f"{milliseconds(learned)} against {milliseconds(native)} for native prefill: it "
            f"{ratio(native, learned)}."
        )
        facts[f"{kind}_ratio"] = ratio(native, learned)
        facts[f"{kind}_crossover"] = _crossover(latency, kind, shortest)
    by_length = {t: median_times(latency, t) for t in lengths}
    facts["overhead"] = _overhead(
        {
            t: [found.get((path, "resident")) for path in ("learned", "direct")]
            for t, found in by_length.items()
        }
    )
    facts["learned_mode"] = _learned_mode(latency)
    return facts


def _overhead(times_ms: dict[int, list[float | None]]) -> str:
    """What the correction takes on top of direct reuse, over the lengths; times_ms: (learned, direct) by length."""
    extra = [
        learned - direct
        for learned, direct in times_ms.values()
        if learned is not None and direct is not None
    ]
    if not extra:
        return "This run has no pair of times to tell the correction's own cost."
    low, high = min(extra), max(extra)
    if high <= 0:
        return (
            "The correction takes no more time than direct reuse in the same attention code, at any length."
        )
    if low == high:
        return f"On top of direct reuse in the same attention code the correction takes {milliseconds(high)}."
    if low < 0:
        return (
            f"On top of direct reuse in the same attention code the correction takes up to {milliseconds(high)}, by length; at some its "
            f"median is the lower one, by up to {milliseconds(-low)}."
        )
    return f"On top of direct reuse in the same attention code the correction takes {milliseconds(low)} to {milliseconds(high)}, by length."


def _counts(repeats: dict[int, list[int]]) -> str:
    return join([f"{max(found, default=0)} at {t:,}" for t, found in repeats.items()])


def _learned_mode(latency: dict) -> str:
    """What the way in which the learned map is applied means for its time."""
    row = next((row for row in latency["rows"] if row["path"] == "learned"), None)
    mode = row and row["mode"]
    if mode == "absorbed":
        return "The learned correction of this run is affine in each head's own vector and so was absorbed."
    if mode == "in_place":
        return (
            "The learned correction of this run is not affine in each head's own vector, so it cannot be absorbed: it is "
            f"applied in place, in one {'compiled ' if row['compiled'] else ''}pass over the whole cache, and its cost grows with "
            "the prefix. The ridge map, which is absorbed, shows about what a correction costs that can be."
        )
    return ""


def _crossover(latency: dict, kind: str, shortest: int) -> str:
    found = latency["crossover"].get(kind) or {}
    if found.get("learned"):
        return f"The learned handoff overtakes native prefill between {lengths_around(latency, found['learned'])} tokens."
    if found.get("below"):
        return f"The learned handoff is ahead of native prefill from the shortest length, {shortest:,}, on."
    return "The learned handoff does not overtake native prefill at any length that was measured."


def times(value: int) -> str:
    return {1: "once", 2: "twice"}.get(value, f"{count(value)} times")
