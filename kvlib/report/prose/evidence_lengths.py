"""Sentences of the evidence chapter on prefix lengths: where the gain holds, and where that cannot be told."""

from collections.abc import Callable

from kvlib.report import evidence
from kvlib.report.evidence import EMPTY, GAIN, HARM, OPEN, UNJUDGED
from kvlib.report.wording import count, join, number, signed_interval, signed_percent


def length_facts(entries: list[dict], trained: list[int] | None) -> dict[str, str]:
    """Facts over prefix lengths. `entries`: the summary's, shortest first; `trained`: shortest and longest trained."""
    few = [e for e in entries if 0 < e["prompts"] < evidence.FEW_PROMPTS]
    named = join([f"{e['prefix_tokens']:,} tokens ({count(e['prompts'])})" for e in few])
    return {
        "length_trained": f"The frozen map was trained on prefixes of {trained[0]:,} to {trained[1]:,} tokens."
        if trained
        else "The record does not say which prefix lengths the frozen map was trained on.",
        "length_gain": _length_gain(_groups(entries)),
        "length_few": (
            f"There are fewer than {count(evidence.FEW_PROMPTS)} prompts at {named}: a normal interval from so few "
            "is rough, and rather too narrow."
            if few
            else ""
        ),
        "length_outside": _outside(entries, trained),
        "length_clustered": _clustered(entries),
        "length_ridge": _ridge(_groups(entries, lambda entry: evidence.verdict(entry, "ridge"))),
        "length_trend": _trend(entries),
    }


def length_headline(entries: list[dict]) -> str:
    """Where the gain holds by the plain and the clustered interval alike, in one sentence."""
    groups = _groups(entries, evidence.strict_verdict)
    verbs = (
        (GAIN, "is shown at"),
        (OPEN, "is not distinguishable from none at"),
        (HARM, "is a loss at"),
        (UNJUDGED, "cannot be judged at"),
    )
    said = [f"{verb} {_tokens(groups[word])}" for word, verb in verbs if groups[word]]
    if not said:
        return "No prefix length had prompts on which to compare the paths."
    rule = "judged with and without errors clustered by article"
    return f"Over prefix lengths, {rule}, the gain of the learned correction over direct reuse {join(said)}."


def _length_gain(groups: dict[str, list[dict]]) -> str:
    if not any(groups.values()):
        return "No prefix length was measured."
    said = []
    if groups[GAIN]:
        shares = [evidence.paired_at(entry).get("relative") for entry in groups[GAIN]]
        known = "" if None in shares else f" ({join([signed_percent(share) for share in shares])})"
        said.append(
            f"At {_tokens(groups[GAIN])} the 95 % interval of learned minus direct lies below zero: there the gain "
            f"holds{known}."
        )
    elif groups[OPEN] or groups[HARM]:
        said.append("At no length does the 95 % interval of learned minus direct lie below zero.")
    if groups[OPEN]:
        said.append(
            f"At {_tokens(groups[OPEN])} it holds zero: a gain there is not distinguishable from none."
        )
    if groups[HARM]:
        said.append(f"At {_tokens(groups[HARM])} it lies above zero: there the correction does harm.")
    if groups[UNJUDGED]:
        said.append(f"At {_tokens(groups[UNJUDGED])} there is a difference but no interval to judge it by.")
    if groups[EMPTY]:
        said.append(f"At {_tokens(groups[EMPTY])} there was no prompt on which to compare the paths.")
    return " ".join(said)


def _outside(entries: list[dict], trained: list[int] | None) -> str:
    known = [e for e in entries if evidence.verdict(e) != EMPTY]
    if not trained or not known:
        return ""
    outside = [e for e in known if not trained[0] <= e["prefix_tokens"] <= trained[1]]
    if not outside:
        return (
            "No length with prompts lies outside those of the training, so how far the gain carries beyond them is "
            "not shown."
        )
    held = [e for e in outside if evidence.strict_verdict(e) == GAIN]
    verb = "lies" if len(outside) == 1 else "lie"
    if len(held) == len(outside):
        where = "there" if len(held) == 1 else "at all of them"
    else:
        where = f"at {_tokens(held)}" if held else "at none of them" if len(outside) > 1 else None
    shown = f"the gain is shown {where}" if where else "the gain is not shown there"
    return (
        f"Outside the lengths of the training {verb} {_tokens(outside)}; judged with and without errors clustered by "
        f"article, {shown}."
    )


def _clustered(entries: list[dict]) -> str:
    judged = [e for e in entries if evidence.verdict(e, clustered=True) in (GAIN, HARM, OPEN)]
    if not judged:
        return "There is no standard error clustered by article to hold beside these."
    changed = [e for e in judged if evidence.verdict(e, clustered=True) != evidence.verdict(e)]
    if not changed:
        return f"With errors clustered by article the verdict at {_tokens(judged)} stays the same."
    intervals = [
        f"{e['prefix_tokens']:,} tokens ({signed_interval(evidence.clustered_interval(evidence.paired_at(e)))})"
        for e in changed
    ]
    return f"With errors clustered by article the verdict changes at {join(intervals)}."


def _ridge(groups: dict[str, list[dict]]) -> str:
    verbs = (
        (HARM, "does harm at"),
        (GAIN, "is closer to native at"),
        (OPEN, "cannot be told apart from it at"),
    )
    said = [f"{verb} {_tokens(groups[word])}" for word, verb in verbs if groups[word]]
    if not said:
        return "For the ridge map there is no interval to judge by."
    return f"Against direct reuse, by the same rule, the ridge map {join(said)}."


def _trend(entries: list[dict]) -> str:
    known = [e for e in entries if evidence.at_length(e, "direct")]
    if len(known) < 2:
        return ""
    first, last = (f"{number(evidence.at_length(e, 'direct')['mean'], 3)}" for e in (known[0], known[-1]))
    return (
        f"Direct reuse itself has {first} nats at {known[0]['prefix_tokens']:,} tokens and {last} at "
        f"{known[-1]['prefix_tokens']:,}, on different prompts."
    )


def _tokens(entries: list[dict]) -> str:
    named = [f"{entry['prefix_tokens']:,}" for entry in entries]
    return f"{join(named)} tokens"


def _groups(entries: list[dict], judge: Callable[[dict], str] = evidence.verdict) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {word: [] for word in (GAIN, HARM, OPEN, UNJUDGED, EMPTY)}
    for entry in entries:
        groups[judge(entry)].append(entry)
    return groups
