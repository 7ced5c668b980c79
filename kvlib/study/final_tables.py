"""The final evaluation's tables, and every figure of its summary as a function of them."""

import math
from collections.abc import Sequence

import pandas as pd
import torch

from kvlib.divergence import Divergence
from kvlib.errors import KvlibError
from kvlib.study.controls import CONTROLS, NOISE
from kvlib.study.decision import decide
from kvlib.study.records import read_table
from kvlib.study.statistics import describe, paired, with_holm

PATHS = ("native", "direct", "ridge", "learned")
COMPARED = ("learned", "ridge")  # each against direct reuse
TEXT_CHARACTERS = 4000  # of a prompt's end at most, kept for people to read
KL_FIELDS = ("mean", "se", "se_clustered", "median", "q10", "q90")
STEP_KEYS = ["forcing", "path", "prompt", "step"]
LEAN = {*STEP_KEYS, "kl", "agree"}  # columns of a control
TOKENS = {"forced_token", "native_token", "path_token"}
PROBABILITIES = {"native_probability", "path_probability"}


def step_table(found: Divergence, forced: torch.Tensor, start: int, tokenizer) -> pd.DataFrame:
    """One row per prompt and step of one path, with the tokens as text; `start` is the first prompt's number."""
    return lean_table(found, start).assign(
        forced_token=[tokenizer.decode([t]) for t in forced.flatten().tolist()],
        native_token=[tokenizer.decode([t]) for t in found.native_token.flatten().tolist()],
        path_token=[tokenizer.decode([t]) for t in found.path_token.flatten().tolist()],
        native_probability=found.native_probability.flatten().tolist(),
        path_probability=found.path_probability.flatten().tolist(),
    )


def lean_table(found: Divergence, start: int) -> pd.DataFrame:
    """prompt, step, kl and agree: what controls keep."""
    prompts, steps = found.kl.shape
    return pd.DataFrame(
        {
            "prompt": [start + i for i in range(prompts) for _ in range(steps)],
            "step": list(range(1, steps + 1)) * prompts,
            "kl": found.kl.flatten().tolist(),
            "agree": found.agree.flatten().tolist(),
        }
    )


def checked_steps(
    path, forcings: Sequence[str], paths: list[str], prompts: range, steps: int
) -> pd.DataFrame:
    """A batch's table, after it was found to hold each forcing, path, prompt and step once, with finite numbers."""
    table = read_table(path)
    wanted = {(f, p, i, s) for f in forcings for p in paths for i in prompts for s in range(1, steps + 1)}
    fits = sorted(table.columns) in (sorted(LEAN), sorted(LEAN | TOKENS | PROBABILITIES))
    found = list(table[STEP_KEYS].itertuples(index=False, name=None)) if fits else []
    numbers = [name for name in ("kl", *sorted(PROBABILITIES)) if name in table]
    if (
        len(found) != len(wanted)
        or set(found) != wanted
        or not table[numbers].map(math.isfinite).all(axis=None)
    ):
        raise KvlibError(
            f"{path} does not hold every step of prompts {prompts.start} to {prompts.stop - 1} once: delete it and run the stage "
            "again"
        )
    return table


def prompt_table(steps: pd.DataFrame, items, prefixes: torch.Tensor, tokenizer) -> pd.DataFrame:
    """One row per forcing, path and prompt: KL32, top-1, the article and the prefix as text; “…” stands for a beginning that was cut."""
    table = per_prompt(steps)
    texts = [_end(tokenizer.decode(row.tolist())) for row in prefixes]
    return table.assign(
        article=[items[i].article for i in table["prompt"]],
        text=[texts[i] for i in table["prompt"]],
    )


def _end(text: str) -> str:
    return text if len(text) <= TEXT_CHARACTERS else f"…{text[-TEXT_CHARACTERS:]}"


def per_prompt(steps: pd.DataFrame) -> pd.DataFrame:
    """forcing, path, prompt, kl32 (mean over steps), top1 (share of steps)."""
    grouped = steps.groupby(["forcing", "path", "prompt"], sort=False)
    return grouped.agg(kl32=("kl", "mean"), top1=("agree", "mean")).reset_index()


def summarise_final(
    steps: pd.DataFrame, prompts: pd.DataFrame, controls: pd.DataFrame, forcings: Sequence[str], seed: int
) -> dict:
    """ "forcing", "controls", "noise" and "decision" of the summary.

    "controls" and "noise" on the top level are those of the first forcing that the headline rests on.
    """
    each = {
        forcing: _forcing(*(t[t["forcing"] == forcing] for t in (steps, prompts, controls)), seed=seed)
        for forcing in forcings
    }
    read_together = with_holm(
        {(forcing, name): result for forcing in forcings for name, result in each[forcing]["paired"].items()}
    )
    for (forcing, name), result in read_together.items():
        each[forcing]["paired"][name] = result
    main = main_forcing(forcings)
    return {
        "forcing": each,
        "controls": each[main]["controls"],
        "noise": each[main]["noise"],
        "decision": {"forcing": main, **decide(each[main])},
    }


def main_forcing(forcings: Sequence[str]) -> str:
    """The forcing that the headline and the decision rest on."""
    return "oracle" if "oracle" in forcings else forcings[0]


def _forcing(steps: pd.DataFrame, prompts: pd.DataFrame, controls: pd.DataFrame, *, seed: int) -> dict:
    kl = prompts.pivot(index="prompt", columns="path", values="kl32").sort_index()
    top1 = prompts.pivot(index="prompt", columns="path", values="top1").sort_index()
    articles = prompts[prompts["path"] == "direct"].sort_values("prompt")["article"].tolist()
    direct = kl["direct"]

    def described(values, shares) -> dict:
        found = describe(values, articles)
        return {
            "kl32": {key: found[key] for key in KL_FIELDS},
            "top1": float(shares.mean()),
            "prompts": len(values),
        }

    def compared(values) -> dict:
        return paired((values - direct).tolist(), articles, baseline=direct.tolist(), seed=seed)

    result = {
        "paths": {name: described(kl[name], top1[name]) for name in PATHS},
        "paired": {
            f"{name}-direct": compared(kl[name])
            | {"top1_difference": float((top1[name] - top1["direct"]).mean())}
            for name in COMPARED
        },
        "step1": {name: first_step(steps, name) for name in PATHS},
    }
    each = per_prompt(controls)
    for group, names in (("controls", CONTROLS), ("noise", NOISE)):
        result[group] = {}
        for name in names:
            own = each[each["path"] == name].set_index("prompt").sort_index()
            if len(own):
                entry = described(own["kl32"], own["top1"]) | {"step1": first_step(controls, name)}
                if group == "controls":
                    entry["paired"] = compared(own["kl32"])
                result[group][name] = entry
    result["controls"] = _corrected(result["controls"])
    return result


def _corrected(controls: dict) -> dict:
    """The controls' comparisons with direct reuse, read together."""
    found = with_holm({name: entry["paired"] for name, entry in controls.items()})
    return {name: entry | {"paired": found[name]} for name, entry in controls.items()}


def first_step(steps: pd.DataFrame, path: str) -> dict:
    """The first new token alone: {"kl": {"mean", "se"}, "top1"}."""
    rows = steps[(steps["path"] == path) & (steps["step"] == 1)]
    found = describe(rows["kl"])
    return {"kl": {key: found[key] for key in ("mean", "se")}, "top1": float(rows["agree"].mean())}
