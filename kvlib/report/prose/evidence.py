"""Sentences of the evidence chapter that rest on its summary alone, and its headline for other pages."""

import math

from kvlib.report import evidence
from kvlib.report.prose.evidence_lengths import length_facts, length_headline
from kvlib.report.wording import count, join, number, of, percent, plural, signed, small


def evidence_facts(summary: dict) -> dict[str, str]:
    """Everything that the summary alone can say; `evidence_map_facts` adds what only the tables hold."""
    entries = sorted(summary["lengths"], key=lambda entry: entry["prefix_tokens"])
    return {
        "manifest": summary["frozen"],
        "map": f"arm {summary['arm']}, residual scale {summary['scale']:g}",
        "validation_prompts": plural(summary["learning"]["prompts"], "validation prompt"),
        **length_facts(entries, summary["training_prefix_tokens"]),
        **_learning_facts(summary["learning"]),
        "parts": parts_sentence(summary),
        **_power_facts(summary["power"]),
    }


def evidence_headline(summary: dict) -> list[str]:
    """What the chapter comes to, in five short sentences for another page."""
    learning, power = summary["learning"], summary["power"]
    entries = sorted(summary["lengths"], key=lambda entry: entry["prefix_tokens"])
    points = [point for point in learning["windows"] if point["kl32"] is not None]
    if len(points) > 1:
        first, last = points[0], points[-1]
        text = (
            f"From {first['windows']:,} to {last['windows']:,} training windows the correction's validation KL32 "
            f"goes from {number(first['kl32'])} to {number(last['kl32'])} nats; direct reuse has "
            f"{number(learning['direct']['kl32'])}."
        )
    else:
        text = "How the correction depends on the amount of training text was not measured."
    if power["needed_80"] is None:
        planned = f"What power this run has cannot be computed: {_note(power)}."
    else:
        needed = math.ceil(power["needed_80"])
        planned = (
            f"A difference of the size found takes {plural(needed, 'independent prompt')} to be shown with a power "
            f"of 80 %; this run has {count(power['prompts'])}."
        )
    return [
        length_headline(entries),
        text,
        parts_sentence(summary, short=True),
        _layer_headline(summary),
        planned,
    ]


def parts_sentence(summary: dict, short: bool = False) -> str:
    """How the gain divides between corrected keys and corrected values."""
    direct, whole = summary["learning"]["direct"]["kl32"], evidence.total_gain(summary)
    if whole is None:
        return "The gain on the validation prompts has no finite value, so it is not divided."
    if whole <= 0:
        return (
            "On the validation prompts the whole correction does not lower KL32 "
            f"({number(direct - whole)} nats against {number(direct)} for direct reuse), so there is no gain to "
            "divide among keys, values and layers."
        )
    scores = [summary["ablation"][key]["kl32"] for key in ("keys_only", "values_only")]
    if None in scores:
        return "Keys alone or values alone have no finite KL32, so the gain is not divided between them."
    keys, values = (direct - kl32 for kl32 in scores)
    if short:
        return (
            f"Corrected keys alone bring {percent(keys / whole, 0)} of the gain on the validation prompts, corrected "
            f"values alone {percent(values / whole, 0)}."
        )
    more = "values" if values > keys else "keys" if keys > values else None
    return (
        f"The whole correction takes {small(whole)} nats off direct reuse's {number(direct)}. With the keys alone "
        f"corrected the gain is {small(keys)} ({percent(keys / whole)}), with the values alone {small(values)} "
        f"({percent(values / whole)})"
        + (f": more of it comes from the {more}." if more else ", the same.")
        + f" The two shares add to {percent((keys + values) / whole)}, and nothing makes them add to the whole: "
        "what attention reads depends on both."
    )


def _learning_facts(learning: dict) -> dict[str, str]:
    direct = learning["direct"]["kl32"]
    windows = [point for point in learning["windows"] if point["kl32"] is not None]
    steps = [point for point in learning["steps"] if point["kl32"] is not None]
    broken = len(learning["windows"]) + len(learning["steps"]) - len(windows) - len(steps)
    said = []
    if windows:
        at = [
            f"{number(p['kl32'])} nats with {plural(p['windows'], 'window')} ({p['tokens']:,} tokens from "
            f"{plural(p['articles'], 'article')})"
            for p in (windows if len(windows) == 1 else (windows[0], windows[-1]))
        ]
        below = [p for p in windows if direct is not None and p["kl32"] < direct]
        said.append(f"KL32 is {join(at)}; direct reuse has {number(direct)}.")
        if len(windows) > 1:
            said.append(f"It lies below direct reuse for {of(len(below), len(windows))} numbers of windows.")
    else:
        said.append("No training over a number of windows has a finite KL32.")
    if broken:
        said.append(f"{plural(broken, 'training').capitalize()} of these curves gave no finite KL32.")
    ends = steps if len(steps) == 1 else [steps[0], steps[-1]] if steps else []
    after = [f"{number(p['kl32'])} nats after {plural(p['step'], 'step')}" for p in ends]
    return {
        "data_levels": " ".join(said),
        "steps_levels": f"KL32 is {join(after)}."
        if after
        else "No checkpoint along the steps has a finite KL32.",
    }


def _power_facts(power: dict) -> dict[str, str]:
    effect, prompts = power["effect"], power["prompts"]
    found = (
        "There is no mean difference between learned and direct on the final prompts to start from."
        if effect is None
        else f"On {plural(prompts, 'final prompt')} the mean of learned minus direct is {signed(effect)} nats"
        + (
            "."
            if power["sd"] is None
            else f", with a standard deviation of {number(power['sd'])} between prompts."
        )
    )
    if power["needed_80"] is None:
        text = f"What it would take to show it cannot be computed: {_note(power)}."
        return {
            "power_found": found,
            "power_needed": text,
            "power_detectable": _detectable(power),
            "power_plan": "",
        }
    needed, clustered = math.ceil(power["needed_80"]), power["needed_80_clustered"]
    text = (
        f"To show a difference of that size with a power of 80 % takes {plural(needed, 'independent prompt')}"
    )
    if clustered is not None:
        text += f", and {count(math.ceil(clustered))} when prompts share articles as they do here"
        if power["design_effect"] is not None:
            text += f" (design effect {number(power['design_effect'], 2)})"
    enough = [prompts >= needed] + ([prompts >= clustered] if clustered is not None else [])
    verdict = "enough" if all(enough) else "enough by one of these counts only" if any(enough) else "too few"
    return {
        "power_found": found,
        "power_needed": f"{text}. What this run has, {count(prompts)}, is {verdict}.",
        "power_detectable": _detectable(power),
        "power_plan": (
            "Power computed from the very difference that was found adds nothing to that difference's own p-value; "
            f"it is for planning. A difference half as large would take about four times as many prompts, {4 * needed:,}."
        ),
    }


def _detectable(power: dict) -> str:
    smallest, clustered = power["detectable_80"], power["detectable_80_clustered"]
    if smallest is None:
        return "How small a difference this run could have shown is not known either."
    limit = clustered if clustered is not None else smallest
    text = (
        f"{plural(power['prompts'], 'prompt').capitalize()} show with a power of 80 % a mean difference of {small(smallest)} "
        "nats or more"
        + (f" ({small(clustered)} with shared articles)" if clustered is not None else "")
        + "; a smaller one is missed more often than one time in five."
    )
    if power["effect"] is None:
        return text
    side = "larger" if abs(power["effect"]) > limit else "not larger"
    return (
        f"{text} The one found is {side} than {'the stricter of these' if clustered is not None else 'that'}."
    )


def _note(power: dict) -> str:
    said = "the difference is zero" if power["effect"] == 0 else "the record gives no reason"
    return (power.get("note") or said).rstrip(".")


def _layer_headline(summary: dict) -> str:
    off, whole = summary["ablation"]["off"], evidence.total_gain(summary)
    known = [entry for entry in off if entry["change"] is not None]
    if not known:
        return "No layer was switched off by itself."
    worst = max(known, key=lambda entry: entry["change"])
    if worst["change"] <= 0:
        return "Switching off the correction of any one layer does not raise KL32."
    share = f", {percent(worst['change'] / whole, 0)} of the gain" if whole and whole > 0 else ""
    return (
        f"Of {plural(len(known), 'layer')}, layer {worst['layer']} is missed most when its correction is off: KL32 "
        f"rises by {small(worst['change'])} nats{share}."
    )
