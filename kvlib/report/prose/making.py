"""Sentences of chapters 00 to 02: the pair, the screen, the confirmation."""

from collections import Counter

from kvlib.report.figures.training import FEATURES, arm_label
from kvlib.report.wording import (
    bytes_text,
    count,
    duration,
    join,
    number,
    of,
    percent,
    plural,
    signed,
    small,
)
from kvlib.study.assets import load_assets
from kvlib.study.inputs import GgufModel, HubModel, RandomModel
from kvlib.study.records import read_json
from kvlib.study.run import Run
from kvlib.study.selection import standard_error


def pair_facts(pair: dict) -> dict[str, str]:
    target, source, loss, gate = pair["target"], pair["source"], pair["held_out_nll"], pair["gate"]
    pruning, parts, corpus = pair["pruning"], pair["partitions"], pair["corpus"]
    if pruning is None:
        made = f"The source is {source['name']} as it was found; nothing was pruned."
        unseen = "no map has seen"
        by_layer = "Nothing was pruned for this run, so there is no loss to follow from layer to layer."
    else:
        unseen = "neither the pruning nor any map has seen"
        by_layer = (
            "A source that is pruned from the target carries a rotated and narrower copy of its residual stream. After every "
            "layer the chart compares the two: the share of the target's energy, its sum of squares, that the source's stream "
            "misses, and the share of the MLP's energy that lies in the neurons that were kept."
        )
        made = (
            f"The source was made from the target in {duration(pair['pruning_seconds'])}, out of "
            f"{pruning['calibration_tokens']:,} "
            f"calibration tokens. It keeps {percent(pruning['body_parameters_kept'])} of the parameters "
            "outside the embeddings, and the "
            f"directions that it keeps carry {percent(pruning['energy_kept'])} of the residual stream's "
            "energy."
        )
    worst = max(gate["max_abs_difference"].values())
    verdict = "passed" if gate["passed"] else "FAILED: no later figure of this run can be trusted"
    return {
        "run": pair["run"],
        "label": pair["label"],
        "target": target["name"],
        "source_made": made,
        "cache_shape": f"{target['layers']} layers × {target['kv_heads']} KV heads × "
        f"{target['head_dim']} numbers",
        "widths": _widths(target, source),
        "unseen": unseen,
        "layer_by_layer": by_layer,
        "texts": _texts(pair),
        "target_nll": number(loss["target"], 2),
        "source_nll": number(loss["source"], 2),
        "nll_tokens": f"{loss['tokens']:,}",
        "gate": (
            f"The gate {verdict}. On a prefix of {gate['prefix_tokens']} tokens the largest difference "
            "between any logit through the "
            f"handoff and the same logit from native prefill is {worst:.1e}, where the largest logit is "
            f"{number(gate['logit_scale'], 1)} and {gate['tolerance']:g} is allowed."
        ),
        "corpus": f"{corpus['articles']:,} articles of {corpus['characters']:,} characters in all",
        "corpus_origin": f"{corpus['source'].rstrip('.')} (licence: {corpus['licence']})",
        "final_prompts": count(parts["final"]["items"]),
        "final_articles": count(parts["final"]["articles"]),
        "partition_count": count(len(parts)),
        "articles_used": f"{sum(p['articles'] for p in parts.values()):,}",
    }


def text_facts(run: Run) -> dict[str, str]:
    """What the list of partitions tells of the articles, and the profile of how the target was stored."""
    partitions = read_json(run.stage("pair") / "partitions.json")["partitions"]
    titles = {article["title"] for part in partitions.values() for article in part["articles"]}
    return {"spread": spread_sentence(titles), "target_format": format_sentence(run.profile.pair.target)}


def spread_sentence(titles: set[str]) -> str:
    """Whether articles come from one end of the alphabet, where their titles are words."""
    initials = Counter(title[:1].upper() for title in titles if title[:1].isalpha())
    if not initials:
        return ""
    letter, most = initials.most_common(1)[0]
    if most < 0.5 * len(titles):
        return f"Titles of the {plural(len(titles), 'article')} that are used begin with {plural(len(initials), 'different letter')}."
    return (
        f"{_capital(of(most, len(titles)))} titles begin with “{letter}”: the corpus is one end of an encyclopedia, not a sample "
        "of it."
    )


def format_sentence(target: GgufModel | RandomModel | HubModel) -> str:
    """How the target's weights were stored, where that is part of what is measured."""
    if not isinstance(target, GgufModel):
        return ""
    asset = load_assets()[target.asset]
    return (
        f"Its file, {asset.file}, holds quantised weights (the format stands in the name: Q4_1 keeps four bits for each, and a scale "
        "and an offset for every 32). They are expanded once, and it is this expanded model that is target, reference and origin "
        "of the source; “Instruct” in its name means that it was tuned on instructions, while the text here is plain prose."
    )


def _widths(target: dict, source: dict) -> str:
    if target["hidden_size"] == source["hidden_size"]:
        return "Its hidden width is the target's too, and still every activation in the source is its own."
    return "Its hidden width differs, so nothing else about the two caches need agree: every activation in the source is its own."


def _texts(pair: dict) -> str:
    """Which partitions were drawn from which text, where the corpus has several."""
    drawn: dict[str, list[str]] = {}
    for name, part in pair["partitions"].items():
        if part["text"] is not None:
            drawn.setdefault(part["text"], []).append(name.replace("_", "-"))
    sentences = [f"from the text {text}: {join(names)}" for text, names in drawn.items()]
    if not sentences:
        return "Every partition is drawn from this one text."
    return f"Each partition was drawn from one text ({'; '.join(sentences)}), and a document that two texts share stands in the first alone."


def screening_facts(screening: dict) -> dict[str, str]:
    arms = {arm["id"]: arm for arm in screening["arms"]}
    finished = [arm for arm in arms.values() if arm["kl32"] is not None]
    broken = [arm for arm in arms.values() if arm["kl32"] is None]
    best = min(finished, key=lambda arm: arm["kl32"])
    better = sum(arm["kl32"] < screening["direct"]["kl32"] for arm in finished)
    order = [arm["base"] for arm in sorted(finished, key=lambda arm: arm["kl32"])]
    by_base = {base: [arm["kl32"] for arm in finished if arm["base"] == base] for base in ("direct", "ridge")}
    top = screening["chosen"][0]
    return {
        "arms": count(len(arms)),
        "prompts": f"{screening['prompts']}",
        "steps": f"{screening['steps']}",
        "prompts_per_step": count(screening["prompts_per_step"]),
        "outcome": (
            f"The best of the {count(len(finished))} finished arms is: {arm_label(best)}, with a validation "
            f"KL32 of {number(best['kl32'])} "
            f"nats; direct reuse has {number(screening['direct']['kl32'])} and the ridge map "
            f"{number(screening['ridge']['kl32'])}. "
            f"{_capital(count(better))} of them {'is' if better == 1 else 'are'} below direct reuse."
        ),
        "bases": _bases(by_base, order),
        "broken": "Every arm finished."
        if not broken
        else f"{_capital(plural(len(broken), 'arm'))} broke off because the loss was no longer finite: "
        f"{join([arm_label(arm) for arm in broken])}. The record says at which step.",
        "slices": _slices(arms, screening["slices"]),
        "selected": count(len(screening["selected"])),
        "grid_cells": f"{len(screening['grid'])}",
        "chosen": (
            f"The lowest is {number(top['kl32'])} nats: {arm_label(arms[top['arm']])}, at the checkpoint of "
            "step "
            f"{top['checkpoint_step']} and scale {top['scale']:g}. {_edge(screening)}"
        ).strip(),
        "finalists": join([f"“{arm_label(arms[name])}”" for name in screening["finalists"]]),
        "places": _places(screening, arms),
    }


def _places(screening: dict, arms: dict[str, dict]) -> str:
    """Which of the finalists are the lowest there were, and what decided where several could not be told apart."""
    told = []
    for ordinal, place in enumerate(screening["places"], 1):
        tied, chosen = place["tied"], arms[place["arm"]]
        if not tied:
            told.append(f"place {ordinal} goes to the lowest, by more than a standard error")
            continue
        lowest = arms[place["lowest"]]
        rest = "the lowest" if ordinal == 1 else "the lowest of the rest"
        text = f"for place {ordinal}, {plural(len(tied), 'arm')} cannot be told from {rest} ({arm_label(lowest)})"
        if chosen is lowest:
            told.append(f"{text}, and {rest} is taken")
            continue
        own = next(tie for tie in tied if tie["arm"] == place["arm"])
        reason = (
            "fewer parameters" if absorbable(chosen) == absorbable(lowest) else "what attention can absorb"
        )
        told.append(
            f"{text}; “{arm_label(chosen)}” is taken, {small(own['difference'])} nats above it with a standard error of "
            f"{small(own['se'])}, decided by {reason}"
        )
    return f"{_capital('; '.join(told))}."


def _edge(screening: dict) -> str:
    """Whether the grid's last checkpoint was best for every arm: then more training might have helped."""
    last = max(cell["checkpoint_step"] for cell in screening["grid"])
    if all(entry["checkpoint_step"] == last for entry in screening["chosen"]):
        return "Every selected arm is best at the last checkpoint, and longer training was not tried."
    return ""


def _slices(arms: dict[str, dict], slices: dict[str, dict]) -> str:
    """What each single change does to the centre of the direct base."""
    ids = [set(bases.get("direct", [])) for bases in slices.values()]
    centres = [name for name in set.intersection(*ids) if name in arms] if ids else []
    if not centres or arms[centres[0]]["kl32"] is None:
        return "The centre of the direct base is not among the finished arms of this run."
    centre = arms[centres[0]]
    others = [a for a in arms.values() if a["base"] == "direct" and a is not centre and a["kl32"] is not None]
    changes = [f"{_change(a, centre)} {signed(a['kl32'] - centre['kl32'])}" for a in others]
    return (
        f"On the direct base the centre ({arm_label(centre)}) has {number(centre['kl32'])} nats. One change "
        "at a time moves that by, "
        f"in nats: {join(changes)}."
    )


def _change(arm: dict, centre: dict) -> str:
    if arm["rank"] != centre["rank"]:
        return f"rank {arm['rank']}"
    if arm["learning_rate"] != centre["learning_rate"]:
        return f"learning rate {arm['learning_rate']:g}"
    if arm["residual"] != centre["residual"]:
        return f"a {arm['residual']} residual"
    if arm["features"] != centre["features"]:
        return f"{FEATURES[arm['features']]} features"
    return f"a warm-up of {plural(arm['warmup_steps'], 'step')}"


def _bases(by_base: dict[str, list[float]], order: list[str]) -> str:
    direct, ridge = by_base["direct"], by_base["ridge"]
    if not direct or not ridge:
        return "Arms of one base alone finished, so this run does not compare the two bases."
    if max(direct) < min(ridge):
        return (
            "Every arm on the direct base is below every arm on the ridge base: the clusters do not overlap."
        )
    if max(ridge) < min(direct):
        return (
            "Every arm on the ridge base is below every arm on the direct base, the opposite of what the "
            "study found."
        )
    leading = next((i for i, base in enumerate(order) if base != order[0]), len(order))
    best = "the best arm is" if leading == 1 else f"the best {count(leading)} arms are"
    return f"The bases overlap: {best} on the {order[0]} base, then the other base appears."


def confirmation_facts(summary: dict, screening: dict) -> dict[str, str]:
    arms, frozen = {arm["id"]: arm for arm in screening["arms"]}, summary["frozen"]
    seeds = [len(arm["runs"]) for arm in summary["arms"]]
    means = join(
        [f"{number(arm['mean_kl32'])} for “{arm_label(arms[arm['id']])}”" for arm in summary["arms"]]
    )
    values = [[run["kl32"] for run in arm["runs"] if run["kl32"] is not None] for arm in summary["arms"]]
    spread = max((max(v) - min(v) for v in values if v), default=None)
    known = [arm["mean_kl32"] for arm in summary["arms"] if arm["mean_kl32"] is not None]
    gap = max(known) - min(known) if len(known) > 1 else None
    if gap is None or spread is None:
        told = "There are not two complete arms to compare."
    elif gap > spread:
        told = "The difference between the arms is larger than the spread over seeds."
    else:
        told = "The spread over seeds is larger than the difference between the arms: a close choice."
    return {
        "finalists": count(len(summary["arms"])),
        "seeds": count(max(seeds)),
        "prompts": f"{summary['prompts']}",
        "means": f"In nats, the mean KL32 over seeds is {means}. Direct reuse has "
        f"{number(summary['direct']['kl32'])} on the same prompts.",
        "spread": f"Within an arm the seeds lie {number(spread)} nats apart at most. {told}",
        "frozen": (
            f"Frozen: {arm_label(arms[frozen['arm']])}; seed {frozen['seed']}, checkpoint of step "
            f"{frozen['checkpoint_step']}, residual "
            f"scale {frozen['scale']:g}, {frozen['parameters']:,} learned parameters in a file of "
            f"{bytes_text(frozen['checkpoint_bytes'])}. {_absorbable(arms[frozen['arm']])}"
        ),
        "why": f"The reason on record: {frozen['why'].rstrip('.')}.",
        "decided": _decided(summary),
        "manifest": summary["manifest_hash"][:16] + "…",
        "weights": frozen["weights_sha256"][:16] + "…",
    }


def _decided(summary: dict) -> str:
    """What the freeze turned on: a lower mean, or among arms that tie the first of the rule's preferences that differs."""
    whole = [
        arm for arm in summary["arms"] if arm["runs"] and all(r["status"] == "finished" for r in arm["runs"])
    ]
    if len(whole) < 2:
        return "No other arm finished every seed, so there was nothing to decide."
    lowest = min(whole, key=lambda arm: arm["mean_kl32"])
    limit = lowest["mean_kl32"] + standard_error(lowest)
    tied = [arm for arm in whole if arm["mean_kl32"] <= limit]
    if len(tied) == 1:
        return "No other arm lies within one standard error of it: the lower mean decided."
    chosen = next(arm for arm in tied if arm["id"] == summary["frozen"]["arm"])
    others = [arm for arm in tied if arm is not chosen]
    if any(arm["absorbable"] != chosen["absorbable"] for arm in others):
        return "Among the arms that tie, what attention can absorb decided."
    same = f"{'All' if chosen['absorbable'] else 'None'} of the arms that tie can be absorbed by attention"
    if any(arm["parameters"] != chosen["parameters"] for arm in others):
        return f"{same}; fewer parameters decided."
    return (
        f"{same} and they have equally many parameters, so the rule's last resort, the lower mean, decided. As they tie, that says nothing "
        "about which of them is better."
    )


def absorbable(arm: dict) -> bool:
    """Whether an arm, as recorded, is affine in each head's own vector."""
    return arm["residual"] == "linear" and arm["features"] == "own"


def _absorbable(arm: dict) -> str:
    if absorbable(arm):
        return "It is affine in each head's own vector, so attention can absorb it."
    reason = (
        "a quadratic residual"
        if arm["residual"] == "quadratic"
        else f"its {FEATURES[arm['features']]} features"
    )
    return f"It is not affine in each head's own vector ({reason}), so attention cannot absorb it as a whole: it is applied in place."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
