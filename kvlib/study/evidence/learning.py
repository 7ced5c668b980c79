"""Learning curves of the frozen arm: trained on the first windows alone, and looked at along the way."""

from dataclasses import replace
from pathlib import Path

import pandas as pd

from kvlib.maps import DirectMap, ResidualMap
from kvlib.study.arms import Arm, chosen_arms
from kvlib.study.evidence.keeping import kept_scores
from kvlib.study.learning import Task, Trainer
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json
from kvlib.study.run import Run
from kvlib.study.scoring import Scorer, summarise
from kvlib.study.screening import SCORE_STEPS

COLUMNS = ["axis", "value", "prompt", "kl32", "top1"]
NOT_REACHED = "the training's loss stopped being finite before this point, so there is no map to score"


def window_counts(run: Run) -> list[int]:
    """The profile's counts below the number of windows, and that number."""
    return _up_to(run.profile.evidence.windows, run.profile.partitions.confirm_train.items)


def step_counts(run: Run) -> list[int]:
    return _up_to(run.profile.evidence.steps, run.profile.training.steps)


def _up_to(counts: list[int], whole: int) -> list[int]:
    return [*(count for count in counts if count < whole), whole]


def learning_units(run: Run) -> float:
    """What the learning curves cost in all, in training steps."""
    windows, steps = window_counts(run), step_counts(run)
    scores = (len(windows) - 1 + len(steps) + 2) * run.profile.partitions.confirm_validate.items
    return len(windows) * run.profile.training.steps + scores * SCORE_STEPS


def frozen_arm(run: Run, name: str) -> Arm:
    return next(arm for arm in chosen_arms(run.profile.screening) if arm.id == name)


def measure_learning(
    run: Run, trainer: Trainer, scorer: Scorer, frozen: dict, work: Path, progress: Progress
) -> pd.DataFrame:
    """One row per point and validation prompt (`COLUMNS`); a training that diverged has no rows beyond that step.

    Args:
        trainer, scorer: of the confirmation stage. frozen: arm, seed, checkpoint_step and scale of the frozen map.
    """
    arm, seed, tables = frozen_arm(run, frozen["arm"]), frozen["seed"], []
    units = scorer.prompts * SCORE_STEPS

    def score(axis: str, value: int, name: str, make) -> None:
        table = kept_scores(
            work / f"{name}.parquet", range(scorer.prompts), lambda: scorer.table(make()), progress, units, f"scored {name}"
        )  # fmt: skip
        tables.append(table.assign(axis=axis, value=value))

    def score_map(axis: str, value: int, windows: int, step: int, load) -> None:
        if load is not None:
            score(axis, value, point_name(windows, step), lambda: load().with_scale(frozen["scale"]))

    score("direct", 0, "learning-direct", DirectMap)
    score("ridge", 0, "learning-ridge", lambda: trainer.ridge)
    counts, last = window_counts(run), run.profile.training.steps
    for count in counts[:-1]:
        part = first_windows(trainer, arm, count, [last], run.stage("evidence") / "arms")
        task = Task(arm, seed, last)
        train_on(part, trainer, task, count, progress, f"{count} windows")
        score_map("windows", count, count, last, loader(part, task, last))
    maps = all_windows(run, trainer, arm, frozen, progress)
    for step, load in maps.items():
        score_map("steps", step, counts[-1], step, load)
    if maps[last] is not None:
        tables.append(tables[-1].assign(axis="windows", value=counts[-1]))
    return pd.concat(tables, ignore_index=True)[COLUMNS]


def point_name(windows: int, step: int) -> str:
    """Of the file that keeps the scores of a training on so many windows, at this step."""
    return f"learning-{windows:05d}-windows-step-{step:05d}"


def first_windows(trainer: Trainer, arm: Arm, count: int, keep: list[int], folder: Path) -> Trainer:
    """A trainer on the first `count` windows, with checkpoints at the steps `keep` in a folder of its own.

    σ and the ridge map are still those of `trainer`; `train_on` makes them anew before it trains.
    """
    screening = trainer.profile.screening.model_copy(update={"checkpoints": keep})
    return replace(
        trainer, profile=trainer.profile.model_copy(update={"screening": screening}), store=trainer.store.first(count),
        articles=trainer.articles[:count], folder=folder, key=hash_json([trainer.key, "first windows", count, keep]),
    )  # fmt: skip


def train_on(part: Trainer, whole: Trainer, task: Task, count: int, progress: Progress, note: str) -> None:
    """Train unless it was done; all that the arm takes from training text comes from the `count` windows."""
    if part.finished(task) is None and count < len(whole.store.windows):
        part = replace(part, scale=part.store.source_scale())
        if task.arm.base == "ridge":
            part = replace(
                part,
                ridge=part.store.fit_ridge(
                    part.profile.screening.ridge_penalty, next(part.target.parameters()).device
                ),
            )
    part.train(task, progress, note)


def all_windows(run: Run, trainer: Trainer, arm: Arm, frozen: dict, progress: Progress) -> dict:
    """Step -> how to load the map of the training on all windows (None where it diverged).

    The confirmation stage trained the same arm from the same seed: what it kept is taken, and only steps that it did not keep
    or did not reach are trained for.
    """
    steps, total = step_counts(run), len(trainer.store.windows)
    confirmed = Task(arm, frozen["seed"], frozen["checkpoint_step"])
    found = {step: loader(trainer, confirmed, step) for step in steps}
    missing = [step for step in steps if found[step] is None]
    if not missing:
        progress.skip(run.profile.training.steps)
        return found
    progress.skip(run.profile.training.steps - max(missing))
    part = first_windows(trainer, arm, total, missing, run.stage("evidence") / "arms")
    task = Task(arm, frozen["seed"], max(missing))
    train_on(part, trainer, task, total, progress, f"all {total} windows")
    return found | {step: loader(part, task, step) for step in missing}


def loader(trainer: Trainer, task: Task, step: int):
    """A function that loads a checkpoint, or None where there is none."""

    def load() -> ResidualMap:
        return trainer.load(task, step)

    return load if trainer.checkpoint(task, step).exists() else None


def window_facts(run: Run, articles: list[str]) -> list[dict]:
    """windows, tokens and articles of each training. articles: of every window, in the order of the store."""
    each = run.profile.partitions.window_tokens
    return [
        {"windows": count, "tokens": count * each, "articles": len(set(articles[:count]))}
        for count in window_counts(run)
    ]


def summarise_learning(table: pd.DataFrame, windows: list[dict], steps: list[int]) -> dict:
    """Of learning.parquet. windows: entries with `windows`, `tokens` and `articles`; steps: of the run over all windows."""

    def of(axis: str, value: int) -> dict:
        rows = table[(table["axis"] == axis) & (table["value"] == value)]
        if len(rows) == 0:
            return dict.fromkeys(("kl32", "se", "median_kl32", "top1")) | {"note": NOT_REACHED}
        return summarise(rows)

    facts = ("windows", "tokens", "articles")
    return {
        "prompts": int((table["axis"] == "direct").sum()),
        "direct": of("direct", 0),
        "ridge": of("ridge", 0),
        "windows": [
            {fact: entry[fact] for fact in facts} | of("windows", entry["windows"]) for entry in windows
        ],
        "steps": [{"step": step} | of("steps", step) for step in steps],
    }
