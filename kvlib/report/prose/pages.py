"""Sentences that hand-written pages ask for: the front page and the colophon."""

from kvlib.report.prose.results import latency_facts, paired_verdict, times
from kvlib.report.prose.speed import price_sentence
from kvlib.report.speed import read_targets
from kvlib.report.summaries import headline, median_times, prefix_lengths
from kvlib.report.wording import count, duration, interval, join, number, ratio


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
        "found": _found(final, latency),
        "sure": _sure(final),
        "fidelity": paired_verdict("learned", quality["paired"]["learned-direct"]),
        "time": f"{times_said['resident_verdict']} {price_sentence(latency, prefix_lengths(latency)[-1], _limit())}",
        "cold": f"Counting the source's own prefill too: {times_said['learned_cold']} "
        f"({times_said['cold_longest']}), which {times_said['cold_ratio']}.",
        "learned_mode": times_said["learned_mode"],
        "corpus": f"{pair['corpus']['source'].rstrip('.')} (licence: {pair['corpus']['licence']})",
    }


def _found(final: dict, latency: dict) -> str:
    """Fidelity and time in one sentence."""
    quality, longest = headline(final), prefix_lengths(latency)[-1]
    direct, learned = (quality["paths"][path]["kl32"]["mean"] for path in ("direct", "learned"))
    found, clock = quality["paired"]["learned-direct"], median_times(latency, longest)
    native, resident, cold = (
        clock.get(key) for key in (("native", "resident"), ("learned", "resident"), ("learned", "cold"))
    )
    return (
        f"Fed the source's cache as it is, the target's next-token distribution is {number(direct, 3)} nats per token away from its "
        f"own; with the learned correction {number(learned, 3)}, lower on {found['wins']} of {found['prompts']} prompts. At "
        f"{longest:,} tokens this path {ratio(native, resident)} if the source has read the prompt anyway, and "
        f"{ratio(native, cold)} if its reading counts."
    )


def _sure(final: dict) -> str:
    """What the first difference rests on, in one sentence."""
    found, quality = headline(final)["paired"]["learned-direct"], headline(final)
    ci, noise = found.get("ci95"), quality.get("noise", {}).get("native_two_parts")
    wrong = quality.get("controls", {}).get("other_prompt")
    side = "has no interval"
    if ci:
        where = "below zero" if ci[1] < 0 else "above zero" if ci[0] > 0 else "on both sides of zero"
        side = f"has a 95 % interval of {interval(ci)} nats, {where}"
    text = (
        f"The difference {side}, on {found['prompts']} prompts from {count(final['articles'])} articles that were opened "
        f"{times(final['opened'])}, after everything had been fixed"
    )
    scale = []
    if noise:
        scale.append(
            f"native differs from itself by {_tiny(abs(noise['kl32']['mean']))} when it reads in two parts"
        )
    if wrong:
        scale.append(f"another prompt's cache scores {number(wrong['kl32']['mean'], 2)}")
    return f"{text}. For scale: {join(scale)}." if scale else f"{text}."


def _tiny(value: float) -> str:
    return number(value, 6) if value >= 1e-6 else "less than a millionth"


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
