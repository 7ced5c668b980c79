"""Several runs beside one another: what differs in their settings, their findings and how they were made."""

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from kvlib.errors import KvlibError
from kvlib.study.records import read_record, read_table
from kvlib.study.run import EXTRA, NOTEBOOKS, STAGES, Run, read_summary
from kvlib.study.standing import DONE, standing
from kvlib.study.statistics import paired
from kvlib.study.yaml_files import flat

HANDOFFS = ("direct", "ridge", "learned")
SETTINGS, STATE, MACHINE, PAIRED = "settings", "state", "made with", "prompt by prompt"
INTERVAL = "95 % interval"
Value = float | int | str | bool | list | None


@dataclass(frozen=True)
class Row:
    """One quantity of every run, None where a run does not have it."""

    group: str
    what: str
    values: tuple[Value, ...]

    @property
    def differs(self) -> bool:
        if self.group == PAIRED:  # each is a difference to the first run, which has none to itself
            return any(value not in (None, 0, [0, 0]) for value in self.values)
        return any(value != self.values[0] for value in self.values)


@dataclass(frozen=True)
class Comparison:
    """Runs by name in the order in which they were given; notes: what could not be compared, and why."""

    runs: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def groups(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found

    def record(self) -> dict:
        rows = [
            {"group": r.group, "what": r.what, "values": list(r.values), "differs": r.differs}
            for r in self.rows
        ]
        return {"runs": list(self.runs), "notes": list(self.notes), "rows": rows}


def compare_runs(runs: list[Run]) -> Comparison:
    """Everything that the runs' records say, side by side. A stage that a run lacks is said in the notes, never guessed.

    Raises: KvlibError for fewer than two runs, one given twice, and records that are damaged.
    """
    names = [run.name for run in runs]
    if len(runs) < 2 or len(set(names)) < len(names):
        raise KvlibError(
            f"runs {', '.join(names) or 'none'} given, expected two or more different ones: name each once"
        )
    found = [_found(run) for run in runs]
    rows, notes = (
        _rows(SETTINGS, [flat(run.profile.model_dump(mode="json")) for run in runs], only_changes=True),
        [],
    )
    rows += _rows(STATE, [each[STATE] for each in found])
    for run, each in zip(runs, found):
        notes += [f"{run.name}: {name} is {state}" for name, state in each[STATE].items() if state != DONE]
    for stage in STAGES:
        rows += _rows(stage.replace("_", " "), [each[stage] for each in found])
    against, note = _prompt_by_prompt(runs)
    rows += _rows(PAIRED, against)
    rows += _rows(MACHINE, [each[MACHINE] for each in found])
    return Comparison(tuple(names), tuple(rows), (*notes, *([note] if note else [])))


def _rows(group: str, values: list[dict], only_changes: bool = False) -> list[Row]:
    rows = [Row(group, what, tuple(each.get(what) for each in values)) for what in _keys(values)]
    return [row for row in rows if row.differs] if only_changes else rows


def _keys(values: Iterable[dict]) -> list[str]:
    return list(dict.fromkeys(key for each in values for key in each))


def _found(run: Run) -> dict[str, dict]:
    """By group, what one run's records say."""
    summaries = {
        stage: read_summary(run.stage(stage))
        for stage in STAGES
        if (run.stage(stage) / "summary.json").exists()
    }
    stages = [*STAGES, *(stage for stage in EXTRA if run.stage(stage).exists())]
    found: dict[str, dict] = {STATE: {NOTEBOOKS[stage]: standing(run, stage).state for stage in stages}}
    for stage, describe in DESCRIBED.items():
        found[stage] = describe(summaries[stage]) if stage in summaries else {}
    found[MACHINE] = _machine(run, summaries)
    return found


def _pair(summary: dict) -> dict:
    facts = {}
    for role in ("target", "source"):
        model = summary[role]
        facts |= {
            role: model["name"],
            f"{role}: weights": model["fingerprint"][:12],
            f"{role}: parameters": model["parameters"],
        }
    nll = {
        f"{role}: held-out loss (nats per token)": summary["held_out_nll"][role]
        for role in ("target", "source")
    }
    hashes = {f"partition {name}": part["hash"][:12] for name, part in summary["partitions"].items()}
    return facts | nll | hashes


def _screening(summary: dict) -> dict:
    finished = [arm for arm in summary["arms"] if arm["kl32"] is not None]
    best = min(finished, key=lambda arm: arm["kl32"], default=None)
    return {
        "arms screened": len(summary["arms"]),
        "validation prompts": summary["prompts"],
        "direct: KL32 (nats)": summary["direct"]["kl32"],
        "ridge: KL32 (nats)": summary["ridge"]["kl32"],
        "best arm": best and best["id"],
        "best arm: KL32 (nats)": best and best["kl32"],
        "finalists": ", ".join(summary["finalists"]),
    }


def _confirmation(summary: dict) -> dict:
    frozen = summary["frozen"]
    arm = next(arm for arm in summary["arms"] if arm["id"] == frozen["arm"])
    return {
        "frozen arm": frozen["arm"],
        "frozen arm: KL32 over its seeds (nats)": arm["mean_kl32"],
        "frozen arm: checkpoint (step)": frozen["checkpoint_step"],
        "frozen arm: residual scale": frozen["scale"],
        "frozen arm: seed": frozen["seed"],
        "frozen arm: parameters": frozen["parameters"],
        "frozen weights": frozen["weights_sha256"][:12],
    }


def _final(summary: dict) -> dict:
    facts: dict[str, Value] = {}
    for forcing, found in summary["forcing"].items():
        for path, scores in found["paths"].items():
            if path != "native":  # exact by definition
                facts[f"{forcing}: {path}, KL32 (nats)"] = scores["kl32"]["mean"]
                facts[f"{forcing}: {path}, KL32 standard error"] = scores["kl32"]["se"]
                facts[f"{forcing}: {path}, top-1 agreement"] = scores["top1"]
        for name, test in found["paired"].items():
            path = name.replace("-", " − ")
            facts[f"{forcing}: {path}, mean (nats)"] = test["mean"]
            facts[f"{forcing}: {path}, {INTERVAL}"] = test["ci95"]
            facts[f"{forcing}: {path}, relative"] = test.get("relative")
            facts[f"{forcing}: {path}, prompts won"] = test["wins"]
            facts[f"{forcing}: {path}, prompts"] = test["prompts"]
    return facts


def _latency(summary: dict) -> dict:
    facts: dict[str, Value] = {key: summary[key] for key in ("device", "dtype", "threads")}
    times = {(row["prefix_tokens"], row["path"], row["residency"]): row["p50_ms"] for row in summary["rows"]}
    for tokens in sorted({tokens for tokens, _, _ in times}):
        native = times.get((tokens, "native", "resident"), times.get((tokens, "native", "cold")))
        learned, direct = (times.get((tokens, path, "resident")) for path in ("learned", "direct"))
        ratios = {
            "native ÷ learned, cache resident": _ratio(native, learned),
            "native ÷ learned, cold": _ratio(native, times.get((tokens, "learned", "cold"))),
            "learned ÷ direct": _ratio(learned, direct),
            "native, p50 (ms)": native,
            "learned, p50 (ms)": learned,
        }
        facts |= {f"{tokens:,} tokens: {name}": value for name, value in ratios.items()}
    return facts


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _machine(run: Run, summaries: dict[str, dict]) -> dict:
    facts: dict[str, Value] = {"profile": run.source}
    if "pair" in summaries:
        made = dict(summaries["pair"]["environment"])
        packages = made.pop("packages", {})
        facts |= flat(made) | {f"package {name}": version for name, version in packages.items()}
    manifest = run.stage("confirmation") / "manifest.json"
    if manifest.exists():
        frozen = read_record(manifest)
        facts |= {
            "code at the freeze": frozen.get("kvlib", "")[:12] or None,
            "commit at the freeze": frozen.get("commit"),
            "manifest": frozen.get("hash", "")[:12] or None,
        }
    for stage, summary in summaries.items():
        facts |= {f"{NOTEBOOKS[stage]}: seconds": summary["duration_s"]}
    return facts


def _prompt_by_prompt(runs: list[Run]) -> tuple[list[dict], str | None]:
    """(per run the paired differences to the first run, None), or (nothing, why the prompts cannot be paired)."""
    nothing: list[dict] = [{} for _ in runs]
    tables, questions = [], []
    for run in runs:
        path = run.stage("frozen_evaluation") / "prompts.parquet"
        if not path.exists():
            return nothing, f"no prompt by prompt comparison: {run.name} has no final evaluation"
        pair, prompt = read_summary(run.stage("pair")), run.profile.prompt
        questions.append((pair["partitions"]["final"]["hash"], pair["target"]["fingerprint"], prompt))
        if questions[-1] != questions[0]:
            return nothing, (
                f"no prompt by prompt comparison: {run.name} has other final prompts or another target than {runs[0].name}"
            )
        tables.append(read_table(path))
    differences = [
        _differences(tables[0], table, runs[0].name, run.profile.seed) for run, table in zip(runs, tables)
    ]
    return [{}, *differences[1:]], None


def _differences(first: pd.DataFrame, table: pd.DataFrame, name: str, seed: int) -> dict:
    """What every handoff gained or lost on the same prompts, along native's own forced tokens or the text's."""
    facts: dict[str, Value] = {}
    both = first.merge(table, on=["forcing", "path", "prompt"], suffixes=("_first", ""))
    for (forcing, path), part in both.groupby(["forcing", "path"], sort=False):
        if path in HANDOFFS:
            test = paired((part.kl32 - part.kl32_first).tolist(), part.article.tolist(), seed=seed)
            what = f"{forcing}: {path}, KL32 minus {name}'s"
            facts |= {
                f"{what}, mean (nats)": test["mean"],
                f"{what}, {INTERVAL}": test["ci95"],
                f"{what}, prompts lower": test["wins"],
            }
    return facts


DESCRIBED = {
    "pair": _pair, "screening": _screening, "confirmation": _confirmation,
    "frozen_evaluation": _final, "latency": _latency,
}  # fmt: skip
