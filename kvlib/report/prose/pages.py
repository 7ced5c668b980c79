"""Sentences that hand-written pages ask for: the front page and the colophon."""

from kvlib.report.agreement import RawTables, first_tokens, paired_first_step, paired_top1, side
from kvlib.report.prose.results import latency_facts, paired_verdict, times
from kvlib.report.prose.speed import price_sentence
from kvlib.report.repetitions import Times, factor_text, ratio_range, times_of
from kvlib.report.speed import read_targets
from kvlib.report.summaries import headline, main_forcing, prefix_lengths
from kvlib.report.wording import (
    count,
    duration,
    interval,
    join,
    number,
    of,
    percent,
    plural,
    ratio,
    small,
)

OWN_PATH = "learned-direct"


def front_facts(records: dict[str, dict], prefix_tokens: int, raw: RawTables) -> dict[str, str]:
    """The front page's sentences: which run this is, fidelity, time, and what bounds both."""
    pair, final, latency = records["pair"], records["frozen_evaluation"], records["latency"]
    times_said, quality = latency_facts(latency), headline(final)
    return {
        "label": pair["label"],
        "target": pair["target"]["name"],
        "source": _source_name(pair),
        "measured_on": _measured_on(pair, latency),
        "prompts": count(quality["paths"]["native"]["prompts"]),
        "prefix": f"{prefix_tokens}",
        "found": f"{_fidelity(final, prefix_tokens, raw)} {_time(latency, prefix_tokens, raw)}",
        "sure": _sure(final, records["confirmation"]),
        "fidelity": paired_verdict("learned", quality["paired"][OWN_PATH]),
        "time": f"{times_said['resident_verdict']} {price_sentence(latency, prefix_lengths(latency)[-1], _limit())}",
        "cold": f"Counting the source's own prefill too: {times_said['learned_cold']} "
        f"({times_said['cold_longest']}), which {times_said['cold_ratio']}{_cold_range(latency, raw)}.",
        "learned_mode": times_said["learned_mode"],
        "training_seeds": _seeds(records["confirmation"]),
        "remains": _remains(final),
        "pair_size": _pair_size(pair),
        "corpus": f"{pair['corpus']['source'].rstrip('.')} (licence: {pair['corpus']['licence']})",
    }


def _pair_size(pair: dict) -> str:
    """How large the two models are, how much smaller the source is, and how much worse it writes."""
    target, source, loss = pair["target"], pair["source"], pair["held_out_nll"]
    smaller = 1 - source["body_parameters"] / target["body_parameters"]
    text = f"{target['name']}, {_parameters(target['parameters'])} parameters, and a source "
    text += f"{percent(smaller, 0)} smaller" if smaller > 0 else "that is no smaller"
    return f"{text} (without embeddings; loss on held-out text {number(loss['source'], 2)} against {number(loss['target'], 2)})"


def _measured_on(pair: dict, latency: dict) -> str:
    return f"Here: {_pair_size(pair)}, on {plural(latency['threads'], 'thread')} of {latency['device']}."


def _parameters(value: int) -> str:
    return (
        f"{value / 1e9:.1f} billion"
        if value >= 1e9
        else f"{value / 1e6:,.0f} million"
        if value >= 1e6
        else f"{value:,}"
    )


def _fidelity(final: dict, prefix_tokens: int, raw: RawTables) -> str:
    """How much closer the correction comes, what is left, and what of it is not distinguishable from nothing."""
    quality, forcing = headline(final), main_forcing(final)
    direct, learned = (quality["paths"][path]["kl32"]["mean"] for path in ("direct", "learned"))
    found = quality["paired"][OWN_PATH]
    text = (
        f"At {prefix_tokens:,} tokens direct reuse is {number(direct, 3)} away, the learned correction {number(learned, 3)}, lower on "
        f"{found['wins']} of {found['prompts']} prompts; {_remains(final)} remains."
    )
    first, top1 = paired_first_step(raw.steps, raw.prompts, forcing), paired_top1(raw.prompts, forcing)
    told = [(side(first), "the first token alone"), (side(top1), "top-1 agreement")]
    if told[1][0] is not None:
        told[1] = (-told[1][0], told[1][1])  # more agreement is better, less divergence is
    for wanted, said in (
        ((0, None), "not distinguishable from direct reuse"),
        ((1,), "worse than with direct reuse"),
    ):
        found_so = [what for where, what in told if where in wanted]
        if found_so:
            named = join(found_so)
            text += f" {named[:1].upper()}{named[1:]} {'is' if len(found_so) == 1 else 'are'} {said}."
    return text


def _remains(final: dict) -> str:
    paths = headline(final)["paths"]
    direct, learned = (paths[path]["kl32"]["mean"] for path in ("direct", "learned"))
    return f"{percent(learned / direct, 0) if learned is not None and direct else 'an unknown part'} of direct reuse's divergence"


def _time(latency: dict, prefix_tokens: int, raw: RawTables) -> str:
    """Time at the longest length, which is not where fidelity was measured, with the repetitions behind it."""
    longest = prefix_lengths(latency)[-1]
    native, resident, cold = (
        times_of(raw.latency, longest, *one) for one in (("native",), ("learned",), ("learned", "cold"))
    )
    if native is None or resident is None:
        return f"Times at {longest:,} tokens were not measured."
    where = (
        f"At {longest:,} tokens, where fidelity was not measured,"
        if longest != prefix_tokens
        else "At the same length"
    )
    text = f"{where} this path {_faster(native, resident, raw, longest, 'resident')} if the source has read the prompt anyway"
    if cold is None:
        return f"{text}."
    return f"{text}; if that reading counts, it {_faster(native, cold, raw, longest, 'cold')}."


def _faster(native: Times, path: Times, raw: RawTables, tokens: int, residency: str) -> str:
    if native.median < path.median:
        return ratio(native.median, path.median)
    return f"is {factor_text(raw.latency, tokens, residency)} times as fast as native"


def _cold_range(latency: dict, raw: RawTables) -> str:
    found = ratio_range(raw.latency, prefix_lengths(latency)[-1], "cold")
    return f"; the repetitions allow {found[0]:.2f} to {found[1]:.2f}" if found else ""


def first_token_sentence(raw: RawTables) -> str:
    """Whether the first token that the clock stopped at was native's: of the timed prompts, path by path."""
    found = first_tokens(raw.latency)
    if found.empty:
        return "Whether the first tokens of the timed prompts are native's cannot be said: native was not timed on them."
    said = []
    for path, rows in found.groupby("path", sort=False):
        said.append(f"{of(int(rows['agree'].sum()), int(rows['prompts'].sum()))} for {path}")
    return (
        f"Over all lengths together the first token is the one that native gave on {join(said)}. These are a few prompts of "
        "a few articles: too few to rank the paths, enough to see that a fast first token need not be native's."
    )


def _sure(final: dict, confirmation: dict) -> str:
    """What the first difference rests on, what its interval does not cover, and its scale."""
    found, quality = headline(final)["paired"][OWN_PATH], headline(final)
    ci, noise = found.get("ci95"), quality.get("noise", {}).get("native_two_parts")
    wrong = quality.get("controls", {}).get("other_prompt")
    text = "The difference has no interval"
    if ci:
        where = "below zero" if ci[1] < 0 else "above zero" if ci[0] > 0 else "on both sides of zero"
        text = f"The difference's 95 % interval is {interval(ci)} nats, {where}"
    text += (
        f", on {found['prompts']} prompts from {count(final['articles'])} articles, opened "
        f"{times(final['opened'])}, after everything had been fixed. It covers prompts, not training: {_seeds(confirmation)}."
    )
    scale = []
    if noise:
        scale.append(f"native in two parts differs from itself by {_tiny(abs(noise['kl32']['mean']))}")
    if wrong:
        scale.append(f"another prompt's cache scores {number(wrong['kl32']['mean'], 2)} nats")
    return f"{text} For scale: {join(scale)}." if scale else text


def _seeds(confirmation: dict) -> str:
    """How many training seeds were evaluated, and how far the frozen arm's lie apart where they were compared."""
    arm = next(arm for arm in confirmation["arms"] if arm["id"] == confirmation["frozen"]["arm"])
    known = [run["kl32"] for run in arm["runs"] if run["kl32"] is not None]
    text = f"one training seed of {count(len(arm['runs']))} was evaluated"
    if len(known) < 2:
        return text
    return f"{text}; on the confirmation's prompts the seeds lie up to {small(max(known) - min(known))} nats apart"


def _tiny(value: float) -> str:
    return f"{number(value, 6)} nats" if value >= 1e-6 else "less than a millionth of a nat"


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
