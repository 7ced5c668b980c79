"""Sentences about the other ways of the learned map: where one of them was faster than the chosen one, and the same way timed twice."""

from kvlib.report.speed import row_of, share, way_of
from kvlib.report.summaries import prefix_lengths
from kvlib.report.wording import factor, join, milliseconds, percent


def ways_facts(latency: dict) -> dict[str, str]:
    return {"chosen": _chosen(latency), "twice": _twice(latency)}


def _chosen(latency: dict) -> str:
    """At which lengths another way gave the first token sooner than the one that a handoff took by itself."""
    said = []
    for tokens in prefix_lengths(latency):
        own, others = row_of(latency, tokens, "learned"), _others(latency, tokens)
        known = [row for row in others if row["p50_ms"] and way_of(row) != way_of(own)] if own else []
        best = min(known, key=lambda row: row["p50_ms"], default=None)
        if best is not None and best["p50_ms"] < own["p50_ms"]:
            said.append(
                f"{way_of(best)} at {tokens:,} tokens ({milliseconds(best['p50_ms'])}, {factor(share(best, own))} the chosen way's "
                f"{milliseconds(own['p50_ms'])})"
            )
    if not said:
        return "At no length was a way that was asked for by name faster than the one that the handoff took by itself."
    return f"The way that the handoff took by itself was not always the fastest of those timed; sooner was {join(said, '; ')}."


def _twice(latency: dict) -> str:
    """The chosen way asked for by name once more: two medians of one and the same work."""
    longest = prefix_lengths(latency)[-1]
    own = row_of(latency, longest, "learned")
    same = [row for row in _others(latency, longest) if own and way_of(row) == way_of(own)]
    if not same:
        return "The chosen way itself was not asked for by name, so it was timed once."
    apart = abs(same[0]["p50_ms"] / own["p50_ms"] - 1)
    return (
        f"The chosen way was timed twice, by itself ({milliseconds(own['p50_ms'])} at {longest:,} tokens) and by name "
        f"({milliseconds(same[0]['p50_ms'])}): the same work, {percent(apart)} apart, which is how far two medians here can differ "
        "for no reason."
    )


def _others(latency: dict, tokens: int) -> list[dict]:
    return [row for row in latency["modes"] if row["prefix_tokens"] == tokens]
