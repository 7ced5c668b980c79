"""Sentences that hand-written pages ask for: the front page and the colophon."""

from kvlib.report.prose.results import latency_facts, paired_verdict, times
from kvlib.report.prose.speed import price_sentence
from kvlib.report.speed import read_targets
from kvlib.report.summaries import headline, prefix_lengths
from kvlib.report.wording import count, duration


def front_facts(records: dict[str, dict], prefix_tokens: int) -> dict[str, str]:
    """The front page's sentences: which run this is, fidelity, time, and what bounds both."""
    pair, final, latency = records["pair"], records["frozen_evaluation"], records["latency"]
    times_said, quality = latency_facts(latency), headline(final)
    return {
        "label": pair["label"],
        "target": pair["target"]["name"],
        "source": _source_name(pair),
        "prompts": count(quality["paths"]["native"]["prompts"]),
        "prefix": f"{prefix_tokens}",
        "fidelity": paired_verdict("learned", quality["paired"]["learned-direct"]),
        "time": f"{times_said['resident_verdict']} {price_sentence(latency, prefix_lengths(latency)[-1], _limit())}",
        "cold": f"Counting the source's own prefill too: {times_said['learned_cold']} "
        f"({times_said['cold_longest']}), which {times_said['cold_ratio']}.",
        "learned_mode": times_said["learned_mode"],
        "corpus": f"{pair['corpus']['source'].rstrip('.')} (licence: {pair['corpus']['licence']})",
    }


def _limit() -> float:
    """Up to which ratio to direct reuse's time the learned correction is said to cost nothing."""
    return next(entry["at_least"] for entry in read_targets() if entry["id"] == "learned_direct")


def _source_name(pair: dict) -> str:
    source = pair["source"]
    if pair["pruning"] is None:
        return source["name"]
    return (
        f"a copy of it that was pruned to a width of {source['hidden_size']} × {source['intermediate_size']}"
    )


def colophon_facts(records: dict[str, dict]) -> dict[str, str]:
    pair, final = records["pair"], records["frozen_evaluation"]
    return {
        "run": pair["run"],
        "profile": pair["profile"],
        "opened": times(final["opened"]),
        "commit": pair["environment"]["commit"] or "unknown (not a git checkout)",
        "total": duration(sum(summary["duration_s"] for summary in records.values())),
        "seed": f"{pair['seed']}",
        "training_dtype": pair["training_dtype"],
    }
