"""Tables of “Can this be trusted?” and of where the learned correction does harm."""

import pandas as pd

from kvlib.report.agreement import clustered_interval, paired_first_step
from kvlib.report.figures.trust import control_label
from kvlib.report.palette import PATHS, path_label
from kvlib.report.summaries import main_forcing
from kvlib.study.controls import CONTROLS, NOISE
from kvlib.study.decision import CRITERIA

STAGE_NAMES = {"frozen_evaluation": "final evaluation"}


def _in_order(found: dict, order) -> list[tuple[str, object]]:
    """A record's entries in the order in which a page names them: JSON keeps them by the alphabet."""
    return [(name, found[name]) for name in order if name in found]


def gates(records: dict[str, dict]) -> pd.DataFrame:
    """Every gate of every stage, in the order in which they were passed."""
    rows = [
        {
            "stage": STAGE_NAMES.get(stage, stage),
            "prefix (tokens)": found["prefix_tokens"],
            "prompts": found["prompts"],
            "logits compared": found["comparisons"],
            **{
                f"{mode.replace('_', ' ')} (logits)": value
                for mode, value in found["max_abs_difference"].items()
            },
            "allowed (logits)": found["tolerance"],
            "largest logit": found["logit_scale"],
            "passed": found["passed"],
        }
        for stage, summary in records.items()
        for found in summary.get("gates", [])
    ]
    return pd.DataFrame(rows)


def agreement(final: dict) -> pd.DataFrame:
    """The frozen maps through the ways of applying them, against the corrected cache written out."""
    rows = [
        {
            "map": found["map"],
            "prompts": found["prompts"],
            "logits compared": found["comparisons"],
            **{
                f"{mode.replace('_', ' ')} (logits)": found["max_abs_difference"].get(mode)
                for mode in ("in_place", "absorbed")
            },
            "allowed (logits)": found["tolerance"],
            "the map moves a logit by up to": found["moved"],
            "largest logit": found["logit_scale"],
            "passed": found["passed"],
        }
        for found in final["agreement"]
    ]
    return pd.DataFrame(rows)


def noise(final: dict) -> pd.DataFrame:
    """Native against itself, by forcing."""
    rows = [
        {
            "forcing": forcing,
            "native against": NOISE[name],
            "KL32 (nats)": entry["kl32"]["mean"],
            "± se": entry["kl32"]["se"],
            "± se, by article": entry["kl32"]["se_clustered"],
            "top-1": entry["top1"],
            "first step, KL (nats)": entry["step1"]["kl"]["mean"],
        }
        for forcing, found in final["forcing"].items()
        for name, entry in _in_order(found["noise"], NOISE)
    ]
    return pd.DataFrame(rows)


def first_step(final: dict) -> pd.DataFrame:
    """The first new token alone, by forcing and path."""
    rows = [
        {
            "forcing": forcing,
            "path": path_label(path),
            "KL at step 1 (nats)": entry["kl"]["mean"],
            "± se": entry["kl"]["se"],
            "top-1 at step 1": entry["top1"],
        }
        for forcing, found in final["forcing"].items()
        for path, entry in _in_order(found["step1"], PATHS)
    ]
    return pd.DataFrame(rows)


def first_step_paired(steps: pd.DataFrame, prompts: pd.DataFrame, forcings: list[str]) -> pd.DataFrame:
    """KL at the first step, path minus direct reuse, by prompt. steps, prompts: the final evaluation's raw tables."""
    rows = []
    for forcing in forcings:
        for path in (p for p in ("learned", "ridge") if p in set(steps.path)):
            found = paired_first_step(steps, prompts, forcing, path)
            plain, by_article = found.get("ci95") or (None, None), clustered_interval(found) or (None, None)
            rows.append(
                {
                    "forcing": forcing,
                    "comparison": f"{path} − direct",
                    "mean at step 1 (nats)": found["mean"],
                    "± se": found["se"],
                    "± se, by article": found.get("se_clustered"),
                    "95 % from": plain[0],
                    "to": plain[1],
                    "by article from": by_article[0],
                    "by article to": by_article[1],
                    "lower on": found["wins"],
                    "of prompts": found["prompts"],
                    "Wilcoxon p": found["wilcoxon_p"],
                }
            )
    return pd.DataFrame(rows)


def controls(final: dict) -> pd.DataFrame:
    """Every control under every forcing, with its paired difference from direct reuse."""
    rows = []
    for forcing, found in final["forcing"].items():
        for name, entry in _in_order(found["controls"], CONTROLS):
            low, high = entry["paired"].get("ci95") or (None, None)
            rows.append(
                {
                    "forcing": forcing,
                    "control": control_label(name),
                    "what it is": CONTROLS[name][2],
                    "KL32 (nats)": entry["kl32"]["mean"],
                    "± se": entry["kl32"]["se"],
                    "± se, by article": entry["kl32"]["se_clustered"],
                    "top-1": entry["top1"],
                    "first step, KL (nats)": entry["step1"]["kl"]["mean"],
                    "minus direct (nats)": entry["paired"]["mean"],
                    "95 % from": low,
                    "to": high,
                    "Wilcoxon p, Holm": entry["paired"].get("wilcoxon_p_holm"),
                }
            )
    return pd.DataFrame(rows)


def decision(final: dict) -> pd.DataFrame:
    """The rule's criteria, one row each."""
    found = final["decision"]
    rows = [("primary comparison", name, held) for name, held in _in_order(found["criteria"], CRITERIA)]
    rows += [
        ("needs the right content", control_label(name), held)
        for name, held in _in_order(found["content"], CONTROLS)
    ]
    rows.append(("exceeds the noise", "ten times native in two parts", found["exceeds_noise"]))
    return pd.DataFrame(
        [(part, name, "not measured" if held is None else held) for part, name, held in rows],
        columns=["part of the rule", "criterion", "holds"],
    )


def checks(found: list[dict]) -> pd.DataFrame:
    """What `kvlib verify` compared, one row per check, and the first thing that did not match."""
    rows = [
        {
            "check": entry["check"],
            "compared": entry["checked"] or None,
            "do not match": len(entry["mismatches"]) if entry["checked"] or entry["mismatches"] else None,
            "the first": entry["mismatches"][0]
            if entry["mismatches"]
            else ""
            if entry["checked"]
            else "nothing of it in this run",
        }
        for entry in found
    ]
    return pd.DataFrame(rows, dtype=object)


def attacked(records: dict[str, dict], found: list[dict], attacks: dict | None) -> pd.DataFrame:
    """What was attacked, how often, what happened: the page's last word.

    Args:
        found: the checks of `kvlib verify`. attacks: `evidence/attacks.json`, or None where no run was attacked.
    """
    final = records["frozen_evaluation"]
    gates = [gate for summary in records.values() for gate in summary.get("gates", [])]
    failed = sum(not gate["passed"] for gate in gates)
    difference = max(max(gate["max_abs_difference"].values()) for gate in gates)
    wrong = [
        (
            control_label(name),
            entry["kl32"]["mean"] > final["forcing"][forcing]["paths"]["direct"]["kl32"]["mean"],
        )
        for forcing, by_forcing in final["forcing"].items()
        for name, entry in by_forcing["controls"].items()
    ]
    prompts = sum(e["prompts"] for f in final["forcing"].values() for e in f["controls"].values())
    quiet = max(abs(e["kl32"]["mean"]) for f in final["forcing"].values() for e in f["noise"].values())
    mismatches = sum(len(entry["mismatches"]) for entry in found)
    rows = [
        (
            "the handoff: the target's own cache through every mode and map kind",
            sum(gate["comparisons"] for gate in gates),
            f"{failed} of {len(gates)} gates failed; no logit moved by more than {difference:.1e}",
        ),
        (
            "the handoff: the frozen maps, in every way that they allow against written out",
            sum(entry["comparisons"] for entry in final["agreement"]),
            f"no logit differed by more than {max(max(e['max_abs_difference'].values()) for e in final['agreement']):.1e}",
        ),
        (
            "the measure: native against itself",
            sum(e["prompts"] for f in final["forcing"].values() for e in f["noise"].values()),
            f"KL32 of {quiet:.1e} at most",
        ),
        (
            "the gain: caches and maps that should know nothing",
            prompts,
            f"{sum(worse for _, worse in wrong)} of {len(wrong)} controls are worse than direct reuse",
        ),
        (
            "the records: every figure computed again, every hash compared",
            sum(entry["checked"] for entry in found),
            f"{mismatches} do not match",
        ),
        ("the freeze: openings of the final prompts", final["opened"], "each is in the ledger"),
    ]
    if attacks is None:
        rows.append(
            (
                "runs that are killed, started twice or run out of disk",
                0,
                "not attacked beside this run: nothing is claimed",
            )
        )
    else:
        rows += [
            (f"a run: {entry['attack']}", entry["times"], entry["outcome"]) for entry in attacks["attacks"]
        ]
    return pd.DataFrame(rows, columns=["what was attacked", "how often", "what happened"])


def worst(prompts: pd.DataFrame, steps: pd.DataFrame, final: dict, count: int = 5) -> pd.DataFrame:
    """The prompts on which the learned correction loses most against direct reuse, and where it parts from native."""
    forcing = main_forcing(final)
    rows = prompts[prompts.forcing == forcing]
    wide = rows.pivot(index="prompt", columns="path", values="kl32")
    order = (wide.learned - wide.direct).sort_values(ascending=False).head(count)
    about = rows.drop_duplicates("prompt").set_index("prompt")
    learned = steps[(steps.forcing == forcing) & (steps.path == "learned")]
    found = []
    for prompt, difference in order.items():
        own = learned[learned.prompt == prompt].sort_values("step")
        parted = own[~own.agree.astype(bool)]
        first = parted.iloc[0] if len(parted) else None
        found.append(
            {
                "prompt": int(prompt),
                "article": about.article[prompt],
                "end of the prompt": "… " + " ".join(str(about.text[prompt]).split())[-160:],
                "direct KL32": wide.direct[prompt],
                "learned KL32": wide.learned[prompt],
                "learned − direct": difference,
                "they part at step": None if first is None else int(first.step),
                "native says": None if first is None else repr(first.native_token),
                "learned says": None if first is None else repr(first.path_token),
            }
        )
    return pd.DataFrame(found)
