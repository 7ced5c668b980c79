"""Sentences of the evidence chapter that need its tables: the curves' ends, the map itself, reconstruction."""

import pandas as pd

from kvlib.report import evidence
from kvlib.report.palette import path_label
from kvlib.report.wording import join, number, of, percent, plural, signed, signed_interval, small

NAMED_LAYERS = 6  # more than these are counted, not listed


def evidence_map_facts(summary: dict, tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    """What the tables say beyond the summary."""
    each = evidence.by_layer(summary, tables)
    return {
        "data_end": _end(evidence.last_change(tables["learning"], "windows"), "window", "more text"),
        "steps_end": _end(evidence.last_change(tables["learning"], "steps"), "step", "more steps"),
        "strength": _strength(tables["singular_values"]),
        "directions": _directions(tables["singular_values"]),
        "size": _size(tables["size"]),
        "layers_off": _off(each),
        "layers_only": _only(each),
        "layers_sum": _sum(each, evidence.total_gain(summary)),
        **_reconstruction(summary, tables["ridge"]),
    }


def _end(change: dict | None, unit: str, more: str) -> str:
    """Whether a curve still falls between its last two points, paired over prompts."""
    if change is None or change["mean"] is None:
        return f"There are no two points on the axis of {unit}s, so whether {more} would help is not shown."
    said = f"from {change['from']:,} to {plural(change['to'], unit)} KL32 changes by {signed(change['mean'])} nats"
    if change["ci95"] is None:
        return f"At the curve's end, {said}, from one prompt: there is no interval to judge by."
    said += f" (95 % interval {signed_interval(change['ci95'])}, paired over {plural(change['prompts'], 'prompt')})"
    if change["ci95"][1] < 0:
        return f"The curve still falls at its end: {said}. So {more} would be worth trying."
    if change["ci95"][0] > 0:
        return f"The curve rises at its end: {said}."
    return f"At its end the curve cannot be told from a flat one: {said}."


def _strength(singular_values: pd.DataFrame) -> str:
    found = evidence.spectrum(singular_values)
    if found.empty:
        return "No singular values are on record."
    if not found.largest.gt(0).any():
        return "Every singular value is zero: the correction changes nothing."
    said, means = [], {}
    for kind, rows in found.groupby("kind"):
        top = rows.loc[rows.largest.idxmax()]
        means[kind] = float(rows.largest.mean())
        said.append(
            f"{number(means[kind], 3)} for {kind} (highest in layer {int(top.layer)}, {number(top.largest, 3)})"
        )
    return f"Averaged over heads and layers the largest singular value is {join(said)}.{_more(means, 'is stronger')}"


def _more(values: dict[str, float], verb: str) -> str:
    if set(values) != set(evidence.KINDS):
        return ""
    if values["keys"] == values["values"]:
        return " Keys and values do not differ in this."
    return f" By this measure the correction {verb} on the {max(values, key=values.get)}."


def _directions(singular_values: pd.DataFrame) -> str:
    found = evidence.spectrum(singular_values).dropna(subset=["directions"])
    if found.empty:
        return "There are no directions to count."
    rank = int(singular_values.groupby(["layer", "head", "kind"]).size().max())
    said = [f"{number(float(rows.directions.mean()), 1)} for {kind}" for kind, rows in found.groupby("kind")]
    return (
        f"Of {plural(rank, 'direction')} that its rank allows, as many as {join(said)} carry it on average."
    )


def _size(size: pd.DataFrame) -> str:
    known = size.dropna(subset=["ratio"])
    if known.empty:
        return "The correction's size beside the cache is not on record."
    said, middle = [], {}
    for kind, rows in known.groupby("kind"):
        middle[kind] = float(rows.ratio.median())
        said.append(
            f"{percent(middle[kind])} of the {kind} (from {percent(float(rows.ratio.min()))} to "
            f"{percent(float(rows.ratio.max()))})"
        )
    return (
        f"Its root mean square is, in the median layer, {join(said)}.{_more(middle, 'is relatively larger')}"
    )


def _off(each: pd.DataFrame) -> str:
    known = each.dropna(subset=["off"])
    if known.empty:
        return "No layer was switched off by itself."
    worst = known.loc[known.off.idxmax()]
    if worst.off <= 0:
        return "KL32 does not rise when any one layer's correction is off."
    rises = known[known.off > 0].sort_values("off", ascending=False)
    half = rises.head(int((rises.off.cumsum() < rises.off.sum() / 2).sum()) + 1)
    named = f" ({join([str(int(layer)) for layer in half.layer])})" if len(half) <= NAMED_LAYERS else ""
    carry = "carries" if len(half) == 1 else "carry"
    if known.off_se.isna().all():
        judged = "There is no standard error to judge single layers by."
    else:
        missed, better = (int((sign * known.off > 2 * known.off_se).sum()) for sign in (1, -1))
        judged = (
            f"By more than two standard errors of the paired difference KL32 rises for {of(missed, len(known))} "
            f"layers and falls for {of(better, len(known))}."
        )
    return (
        f"The layer that is missed most is layer {int(worst.layer)}: without its correction KL32 rises by "
        f"{small(worst.off)} nats. {judged} {plural(len(half), 'layer').capitalize()}{named} {carry} half of what all "
        "the rises sum to."
    )


def _only(each: pd.DataFrame) -> str:
    known = each.dropna(subset=["only"])
    if known.empty:
        return "No layer was switched on by itself."
    best = known.loc[known.only.idxmax()]
    if best.only <= 0:
        return "No layer's correction lowers KL32 by itself."
    helps = int((known.only > 0).sum())
    return (
        f"By itself, layer {int(best.layer)} brings most: {small(best.only)} nats. "
        f"Corrected alone, {of(helps, len(known))} layers {'lowers' if helps == 1 else 'lower'} KL32."
    )


def _sum(each: pd.DataFrame, whole: float | None) -> str:
    shares = each[["off_share", "only_share"]].dropna()
    if shares.empty or not whole or whole <= 0:
        return "Without a gain on these prompts there are no shares of it."
    return (
        f"What is lost with single layers off sums to {percent(float(shares.off_share.sum()), 0)} of the gain, what "
        f"single layers bring alone to {percent(float(shares.only_share.sum()), 0)}. Neither need be the whole: each "
        "layer reads what the layers below it have written, so that corrections can stand in for one another or "
        "need one another."
    )


def _reconstruction(summary: dict, ridge: pd.DataFrame) -> dict[str, str]:
    r2, scores = evidence.typical(ridge), evidence.path_scores(summary)
    kl = {path: score["kl32"] for path, score in scores.items()}
    needed = [r2.get((kind, path)) for kind in evidence.KINDS for path in evidence.PATHS]
    if None in needed or None in kl.values():
        missing = "The record lacks an R² or a KL32, so reconstruction and fidelity are not compared."
        return {"ridge_reason": missing, "learned_reason": "", "cosine": _cosine(r2, kl, False)}
    orders = {_order({path: r2[kind, path] for path in evidence.PATHS}) for kind in evidence.KINDS}
    by_kl = _order({path: -value for path, value in kl.items()})
    return {
        "ridge_reason": f"{_compared(ridge, r2, 'ridge', 'direct')} {_conclusion(r2, kl, 'ridge', 'direct')}",
        "learned_reason": f"{_compared(ridge, r2, 'learned', 'ridge')} {_conclusion(r2, kl, 'learned', 'ridge')}",
        "cosine": _cosine(r2, kl, orders != {by_kl}),
    }


def _compared(ridge: pd.DataFrame, r2: dict, path: str, other: str) -> str:
    said = []
    for kind in evidence.KINDS:
        wide = (
            ridge[ridge.kind == kind]
            .pivot(index="layer", columns="path", values="r2")[[path, other]]
            .dropna()
        )
        higher = int((wide[path] > wide[other]).sum())
        said.append(
            f"{number(r2[kind, path], 3)} against {number(r2[kind, other], 3)} for the {kind} (higher in "
            f"{of(higher, len(wide))} layers)"
        )
    return f"The {path_label(path)} has a held-out R², in the median layer and beside that of {_the(other)}, of {join(said)}."


def _conclusion(r2: dict, kl: dict, path: str, other: str) -> str:
    """Whether R² and KL32 agree on two paths, in the one way that the numbers allow."""
    signs = {_sign(r2[kind, path] - r2[kind, other]) for kind in evidence.KINDS}
    fidelity = _sign(kl[other] - kl[path])
    levels = f"{number(kl[path])} against {number(kl[other])} nats"
    outcome = {
        1: f"its KL32 is lower, {levels}",
        -1: f"its KL32 is higher, {levels}",
        0: f"KL32 is the same, {levels}",
    }
    if len(signs) > 1 or 0 in signs:
        return f"So R² does not point one way, and {outcome[fidelity]}."
    sign = signs.pop()
    rebuilt = "It reconstructs the target's cache " + ("better" if sign > 0 else "worse")
    if fidelity == sign:
        return f"{rebuilt}, and {outcome[fidelity]}: here reconstruction and fidelity agree."
    if fidelity == 0:
        return f"{rebuilt}, and {outcome[fidelity]}: here reconstruction makes no difference to fidelity."
    return f"{rebuilt}, and yet {outcome[fidelity]}: reconstruction in the mean-square sense is not fidelity here."


def _cosine(found: dict, kl: dict, r2_differs: bool) -> str:
    cosine = {path: found[("attention", path)] for path in evidence.PATHS if ("attention", path) in found}
    if len(cosine) < len(evidence.PATHS) or None in kl.values():
        return "The cosine of the attention's output is not on record for every path."
    said = join([f"{number(value, 3)} for {_the(path)}" for path, value in cosine.items()])
    same = _order(cosine) == _order({path: -value for path, value in kl.items()})
    text = f"The cosine of the attention's output with native's is, in the median layer, {said}."
    if same and r2_differs:
        return f"{text} It orders the paths as KL32 does, which R² does not: what attention reads out says more than what the cache holds."
    if same:
        return f"{text} It orders the paths as KL32 does, and so does R²."
    return (
        f"{text} It does not order the paths as KL32 does either."
        if r2_differs
        else f"{text} It does not order the paths as KL32 does, though R² does."
    )


def _the(path: str) -> str:
    return path_label(path) if path == "direct" else f"the {path_label(path)}"


def _order(values: dict[str, float]) -> tuple[str, ...]:
    return tuple(sorted(values, key=lambda path: (-values[path], path)))


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
