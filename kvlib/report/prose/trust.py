"""Sentences of “Can this be trusted?”: what was attacked and what came of it."""

from kvlib.report.agreement import RawTables, clustered_interval, paired_first_step, side
from kvlib.report.figures.trust import control_label
from kvlib.report.prose.evidence import evidence_headline
from kvlib.report.prose.results import times
from kvlib.report.summaries import headline, main_forcing
from kvlib.report.wording import UNKNOWN, count, interval, join, number, percent, plural, signed
from kvlib.study.decision import CONTENT_SHARE, NOISE_FACTOR

VERDICTS = {
    "improves": "By the rule, the learned correction improves on direct reuse.",
    "harms": "By the rule, the learned correction does harm here: direct reuse is better.",
    "undecided": "By the rule, this run is undecided: the learned correction cannot be told from direct reuse.",
}


def trust_facts(
    records: dict[str, dict], checks: list[dict], attacks: dict | None, evidence: dict | None
) -> dict[str, str]:
    """checks: of `kvlib verify`. attacks, evidence: what `kvlib evidence` left, None where it was not run."""
    final = records["frozen_evaluation"]
    return {
        "verified": verified_sentence(checks),
        "attacks": attacks_sentence(attacks, records["pair"]["run"]),
        "evidence": evidence_sentence(evidence, final["frozen"], records["pair"]["run"]),
        "opened": f"The final prompts have been opened {times(final['opened'])} for this run.",
        "gates": gates_sentence(records),
        "agreement": agreement_sentence(records["frozen_evaluation"]),
        "noise": noise_sentence(final),
        "canary": canary_sentence(final),
        "controls": controls_sentence(final),
        "wrong_trained": wrong_trained_sentence(final, records["confirmation"]),
        "verdict": verdict_sentence(final),
        "content": content_sentence(final),
        "rule_hash": records["pair"]["decision_rule"],
        "holm": holm_sentence(records),
    }


def verified_sentence(checks: list[dict]) -> str:
    count_all = sum(check["checked"] for check in checks)
    wrong = [check for check in checks if check["mismatches"]]
    if not wrong:
        return (
            f"When this page was made, {count_all:,} numbers and hashes were compared, and all of them match."
        )
    return (
        f"When this page was made, {count_all:,} numbers and hashes were compared, and some DO NOT MATCH "
        f"({join([check['check'] for check in wrong])}): the table says which."
    )


def attacks_sentence(attacks: dict | None, run: str) -> str:
    if attacks is None:
        return (
            "Runs that are killed, started twice or out of disk were not attacked beside this run; "
            f"the command “python -m kvlib evidence {run}” does it, on small runs, in a few minutes."
        )
    found = attacks["attacks"]
    broken = [entry["attack"] for entry in found if not entry["held"]]
    times_all = sum(entry["times"] for entry in found)
    verdict = (
        "every one ended with the same records, byte for byte, or was refused with one sentence"
        if not broken
        else f"NOT every one ended as promised: {join(broken)}"
    )
    return f"Small runs were attacked {times_all:,} times beside this run, in {count(len(found))} ways; {verdict}."


def evidence_sentence(evidence: dict | None, frozen: str, run: str) -> str:
    if evidence is None or evidence["frozen"] != frozen:
        state = "has not been asked" if evidence is None else "was asked of another frozen map"
        return (
            "What the frozen map is worth at other lengths, how much text it needs, which layers carry it and what so "
            f"many prompts can show {state}; the command “python -m kvlib evidence {run}” asks it."
        )
    return " ".join(evidence_headline(evidence))


def gates_sentence(records: dict[str, dict]) -> str:
    found = [gate for summary in records.values() for gate in summary.get("gates", [])]
    worst = max(found, key=lambda gate: max(gate["max_abs_difference"].values()) / gate["tolerance"])
    lengths = sorted({gate["prefix_tokens"] for gate in found})
    failed = [gate for gate in found if not gate["passed"]]
    verdict = (
        "all of them passed"
        if not failed
        else f"{count(len(failed))} FAILED: no figure after that can be trusted"
    )
    return (
        f"{count(len(found)).capitalize()} gates stood before the stages of this run, over prefixes of {lengths[0]:,} to "
        f"{lengths[-1]:,} tokens; {verdict}. The largest difference against what was allowed is "
        f"{max(worst['max_abs_difference'].values()):.1e} of {worst['tolerance']:g}, where the largest logit is "
        f"{number(worst['logit_scale'], 1)}."
    )


def agreement_sentence(final: dict) -> str:
    """How closely the ways of applying the frozen maps agree, beside what the maps change."""
    found = final["agreement"]
    largest = max(max(entry["max_abs_difference"].values()) for entry in found)
    least = min(entry["moved"] for entry in found)
    return (
        f"Applied in every other way that it allows, a frozen map gives the logits of the corrected cache written out, up to "
        f"{largest:.1e}, where the maps themselves move a logit by up to {number(least, 2)} and more."
    )


def noise_sentence(final: dict) -> str:
    """How the gain compares with native against itself."""
    found, gain = headline(final), headline(final)["paired"]["learned-direct"]["mean"]
    entries = found.get("noise", {})
    if gain is None or not entries:
        return "The noise of native against itself was not measured in this run."
    # Rounding may leave a mean a hair below zero; what counts as noise is its size.
    parts = abs(entries["native_two_parts"]["kl32"]["mean"])
    text = (
        f"Prefilled in two parts instead of one, native differs from itself by {parts:.1e} nats: that is the floor of "
        f"this measurement. The learned correction's mean difference from direct reuse, {abs(gain):.4f} nats, is "
    )
    text += f"{_times(abs(gain), parts)}."
    rough = entries.get("native_training_dtype")
    if rough is not None:
        level = abs(rough["kl32"]["mean"])
        text += (
            f" In the number format that training computes in, native differs from itself by {level:.1e} nats; no reported "
            "figure is computed in it."
        )
    return text


def _times(gain: float, noise: float) -> str:
    if noise == 0:
        return "above it, which is zero"
    factor = gain / noise
    if factor < 1.5:
        return "not larger than that"
    return f"{factor:.0f} times that" if factor < 1000 else "more than a thousand times that"


def canary_sentence(final: dict) -> str:
    found = headline(final)["step1"]
    said = [
        f"{number(found[path]['kl']['mean'], 3)} nats and {percent(found[path]['top1'])} for {path}"
        for path in ("direct", "ridge", "learned")
    ]
    return (
        f"At the first new token alone, KL and agreement with native are {join(said, '; ')}. It is the one token that a "
        "handoff must get right before any of the target's own tokens can help."
    )


def first_step_sentence(final: dict, raw: RawTables) -> str:
    """The paired difference at the first forced step, and whether it can be told from nothing."""
    found = paired_first_step(raw.steps, raw.prompts, main_forcing(final))
    if found["mean"] is None:
        return f"The first step cannot be compared prompt by prompt: {found['note']}."
    text = (
        f"Prompt by prompt the learned correction differs from direct reuse at the first token by {signed(found['mean'])} nats"
        f" (95 % interval {interval(found.get('ci95'))}, with errors by article {interval(clustered_interval(found))}), lower on "
        f"{found['wins']} of {found['prompts']} prompts."
    )
    told = {
        -1: "At the first token too it brings the target closer to native.",
        1: "At the first token it does harm.",
        0: "That is not distinguishable from zero: the gain over all forced steps says nothing sure about the one token that is timed.",
        None: "There is no interval to judge that by.",
    }
    return f"{text} {told[side(found)]}"


def controls_sentence(final: dict) -> str:
    controls, direct = final["controls"], headline(final)["paths"]["direct"]["kl32"]["mean"]
    if not controls:
        return "This run has no controls."
    worse = [name for name, entry in controls.items() if entry["kl32"]["mean"] > direct]
    better = [name for name in controls if name not in worse]
    empty = {name: controls[name]["kl32"]["mean"] for name in ("other_prompt", "zeros") if name in controls}
    said = join([f"{control_label(name)} has {number(value, 2)}" for name, value in empty.items()])
    text = f"Direct reuse has {number(direct)} nats; {said}. " if empty else ""
    if not better:
        return f"{text}Every control is worse than direct reuse of the right cache."
    named = join([control_label(name) for name in better])
    verb = "is" if len(better) == 1 else "are"
    return f"{text}Not worse than direct reuse {verb}: {named}. What that says is below."


def wrong_trained_sentence(final: dict, confirmation: dict) -> str:
    controls, decision = final["controls"], final["decision"]
    if "wrong_trained" not in controls:
        reason = confirmation.get("wrong_trained", {}).get("reason") or "it was not trained"
        return f"There is no map trained on wrong prompts: {reason}."
    share, right = decision["content_share"], controls["wrong_trained"]["kl32"]["mean"]
    text = (
        "The same map, trained as long on caches of other prompts, "
        f"has {number(right)} nats on the right cache; "
    )
    if share is None:
        text += "the learned correction has no gain of which it could recover a share."
    elif share <= 0:
        text += "it recovers nothing of the learned correction's gain."
    else:
        text += (
            f"it recovers {percent(share)} of the learned correction's gain. That part needs no right content: it is what "
            "a map of this size can learn about the target and the text in general."
        )
    return f"{text} {_without_content(controls)}".rstrip()


def _without_content(controls: dict) -> str:
    """What training alone takes off where there is no right content to carry."""
    plain, trained = (
        controls[name]["kl32"]["mean"] if name in controls else None
        for name in ("other_prompt", "wrong_trained_other_prompt")
    )
    if plain is None or trained is None:
        return ""
    verb = "lowers" if trained < plain else "does not lower"
    return (
        f"On another prompt's cache, what it was trained on, it {verb} divergence: {number(trained, 2)} nats against "
        f"{number(plain, 2)} for such a cache as it is."
    )


def verdict_sentence(final: dict) -> str:
    decision = final["decision"]
    failed = [name for name, held in decision["criteria"].items() if not held]
    text = VERDICTS[decision["verdict"]]
    if decision["verdict"] == "undecided":
        text += f" Not met: {join(failed)}."
    if decision["exceeds_noise"] is not None:
        text += f" The gain {'is' if decision['exceeds_noise'] else 'is not'} more than {NOISE_FACTOR} times the noise floor."
    return text


def content_sentence(final: dict) -> str:
    decision = final["decision"]
    if decision["needs_content"] is None:
        return "Whether the gain needs the right content was not measured completely."
    if decision["needs_content"]:
        return "By the rule, the gain needs the right content."
    failed = [control_label(name) for name, held in decision["content"].items() if held is False]
    return (
        f"By the rule, the gain does not need the right content in every respect: the criterion fails for {join(failed)} "
        f"(a map trained on wrong prompts may recover less than {percent(CONTENT_SHARE, 0)} of it)."
    )


def holm_sentence(records: dict[str, dict]) -> str:
    """How many comparisons were read together, and how many stay below 5 % after Holm."""
    arms = [a for a in records["screening"]["arms"] if a.get("against_direct")]
    final, forcing = records["frozen_evaluation"], main_forcing(records["frozen_evaluation"])

    def below(found: list[dict]) -> int:
        return sum((p.get("wilcoxon_p_holm") or 1) < 0.05 for p in found)

    screened = below([arm["against_direct"] for arm in arms])
    together = [p for f in final["forcing"].values() for p in f["paired"].values()]
    p = final["forcing"][forcing]["paired"]["learned-direct"].get("wilcoxon_p_holm")
    said = UNKNOWN if p is None else f"{p:.2g}"
    return (
        f"In the screen {plural(len(arms), 'arm')} were compared with direct reuse on the validation prompts; after Holm's "
        f"correction {count(screened)} of them differ from it at the 5 % level. In the final evaluation "
        f"{plural(len(together), 'comparison')} are read together, of which {count(below(together))} do; the learned "
        f"correction's Wilcoxon p after Holm is {said}."
    )
