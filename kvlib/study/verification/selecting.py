"""Checks of screening and confirmation: every figure from the tables, the tables from the trainings' own records."""

import datetime

import pandas as pd

from kvlib.study.arms import chosen_arms
from kvlib.study.learning import Task
from kvlib.study.records import sha256_file
from kvlib.study.scoring import summarise
from kvlib.study.selection_tables import (
    BASELINES,
    arm_record,
    confirmed_arm,
    frozen_arm,
    seed_table,
    selected_arms,
    summarise_screening,
)
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import LOWEST_KL, Records, training_dtype_of
from kvlib.study.verification.training import Training, check_windows, scores_by


def check_screening(records: Records, check: Check) -> None:
    """`screening/summary.json` and its tables."""
    run, summary = records.run, records.summary("screening")
    profile, settings = run.profile, run.profile.screening
    steps, where = profile.training.steps, "screening/validation.parquet"
    tables = _validation(records, "screening", "screen_validate", check)
    arms, curves = [], []
    trainings = {
        arm.id: Training(records, "screening", Task(arm, profile.training.seed, steps))
        for arm in chosen_arms(settings)
    }
    seconds = {}
    for name, training in trainings.items():
        with check.reading(f"screening/arms, {name}"):
            ended = training.check(check)
            seconds[name] = ended["seconds"]
            curves.append(training.curve())
            if ended["status"] == "finished":
                check.table(f"{where}, {name}", tables[name], training.scores(steps, 1.0))
            arms.append(arm_record(training.task.arm, ended, tables.get(name)))
    finished = [arm["id"] for arm in arms if arm["status"] == "finished"]
    check.same(f"{where}, maps", list(tables), [*BASELINES, *finished])
    with check.reading("screening/curves.parquet"):
        whole = pd.concat(curves, ignore_index=True)
        check.table("screening/curves.parquet", records.table("screening", "curves.parquet"), whole)
    grid = scores_by(records.table("screening", "grid.parquet"), "arm", "checkpoint_step", "scale")
    wanted = [
        (name, step, scale)
        for name in selected_arms(arms, settings)
        for step in settings.checkpoints
        for scale in settings.scales
    ]
    place = "screening/grid.parquet"
    check.same(f"{place}, cells", [list(cell) for cell in grid], [list(cell) for cell in wanted])
    for name, step, scale in wanted:
        cell = f"{place}, {name} at step {step}, scale {scale:g}"
        with check.reading(cell):
            check.table(cell, grid[name, step, scale], trainings[name].scores(step, scale))
    with check.reading("screening/summary.json"):
        cells, articles = {cell: grid[cell] for cell in wanted}, records.articles("screen_validate")
        found = summarise_screening(arms, tables, cells, articles, settings, profile.seed)
        counts = {
            "prompts": profile.partitions.screen_validate.items,
            "steps": steps,
            "prompts_per_step": profile.training.prompts_per_step,
            "windows": profile.partitions.screen_train.items,
            "training_dtype": training_dtype_of(profile, summary),
        }
        records.same_summary(check, "screening", {**found, **counts}, recorded=("gates",))
    check_windows(records, "screening", profile.partitions.screen_train.items, check)
    check.same("screening/made.json, seconds", records.made("screening")["seconds"], seconds)


def check_confirmation(records: Records, check: Check) -> None:
    """`confirmation/summary.json` and its table; the rule, applied again, freezes the same arm and seed."""
    run, screening = records.run, records.summary("screening")
    profile = run.profile
    tables = _validation(records, "confirmation", "confirm_validate", check)
    chosen = {entry["arm"]: entry for entry in screening["chosen"]}
    known = {arm.id: arm for arm in chosen_arms(profile.screening)}
    arms, scored, where = [], [], "confirmation/validation.parquet"
    for name in screening["finalists"]:
        step, scale, ends = chosen[name]["checkpoint_step"], chosen[name]["scale"], {}
        for seed in profile.confirmation.seeds:
            training, rows = (
                Training(records, "confirmation", Task(known[name], seed, step)),
                seed_table(name, seed),
            )
            with check.reading(f"confirmation/arms, {rows}"):
                ends[seed] = training.check(check)
                if ends[seed]["status"] == "finished":
                    scored.append(rows)
                    check.table(f"{where}, {rows}", tables[rows], training.scores(step, scale))
        arms.append(
            confirmed_arm(known[name], chosen[name], ends, tables, list(ends.values())[-1]["parameters"])
        )
    check.same(f"{where}, maps", list(tables), [*BASELINES, *scored])
    frozen = frozen_arm(arms)
    task = Task(known[frozen["arm"]], frozen["seed"], frozen["checkpoint_step"], wrong_prompts=True)
    control = Training(records, "confirmation", task).check(check)
    learned = run.stage("confirmation") / "learned.safetensors"
    expected = {
        "arms": arms,
        **{name: summarise(tables[name]) for name in BASELINES},
        "prompts": profile.partitions.confirm_validate.items,
        "windows": profile.partitions.confirm_train.items,
        "frozen": {
            **frozen,
            "checkpoint_bytes": learned.stat().st_size,
            "weights_sha256": sha256_file(learned),
        },
        "wrong_trained": {key: control[key] for key in ("status", "reason")},
        "manifest_hash": records.json("confirmation", "manifest.json")["hash"],
    }
    records.same_summary(check, "confirmation", expected, recorded=("gates",))
    check_windows(records, "confirmation", profile.partitions.confirm_train.items, check)
    datetime.datetime.fromisoformat(records.made("confirmation")["frozen_at"])


def _validation(records: Records, stage: str, partition: str, check: Check) -> dict[str, pd.DataFrame]:
    """The scores of each map in a stage's validation table, after its prompts were compared with the partition's."""
    where, articles = f"{stage}/validation.parquet", records.articles(partition)
    table = records.table(stage, "validation.parquet")
    for name, rows in table.groupby("arm", sort=False):
        check.same(f"{where}, {name}, prompt", rows["prompt"].tolist(), list(range(len(articles))))
        check.same(f"{where}, {name}, article", rows["article"].tolist(), articles)
        for column, limit in (("kl32", float("inf")), ("top1", 1.0)):
            inside = rows[column].between(LOWEST_KL, limit, inclusive="both") & (rows[column] != float("inf"))
            check.holds(bool(inside.all()), f"{where}, {name}, {column}: found a value that cannot be")
    return scores_by(table, "arm")
