"""Stage 02: retrain the finalists on a disjoint partition with fixed seeds, and freeze one."""

import time
from dataclasses import replace

import pandas as pd

from kvlib.study.arms import chosen_arms
from kvlib.study.executors import executor_of
from kvlib.study.freezing import WRONG_TRAINED, freeze_manifest
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.records import read_record, write_table
from kvlib.study.run import Run, now
from kvlib.study.scoring import summarise
from kvlib.study.screening import PROMPT_STEPS, SCORE_STEPS, WINDOW_STEPS
from kvlib.study.selection_tables import confirmed_arm, frozen_arm, seed_table
from kvlib.study.units import Unit


def run_confirmation(run: Run) -> dict:
    """Confirm, choose by the rule, save the frozen map and its manifest; write `confirmation/summary.json`."""
    summary, manifest = run.finished("confirmation"), run.stage("confirmation") / "manifest.json"
    if summary and read_record(manifest, "hash")["hash"] == summary["manifest_hash"]:
        return summary
    screening, started, profile = run.require("screening", "confirmation"), time.time(), run.profile
    settings = {entry["arm"]: entry for entry in screening["chosen"]}
    arms = [
        arm for name in screening["finalists"] for arm in chosen_arms(profile.screening) if arm.id == name
    ]
    seeds, prompts = profile.confirmation.seeds, profile.partitions.confirm_validate.items
    total = (
        profile.partitions.confirm_train.items * WINDOW_STEPS + prompts * (PROMPT_STEPS + 2 * SCORE_STEPS)
        + sum(len(seeds) * (settings[arm.id]["checkpoint_step"] + prompts * SCORE_STEPS) for arm in arms)
        + profile.training.steps
    )  # fmt: skip
    progress = Progress("confirmation", total)
    tasks = {
        seed_table(arm.id, seed): Task(arm, seed, settings[arm.id]["checkpoint_step"])
        for arm in arms
        for seed in seeds
    }
    units = [
        Unit(
            name, task, f"{task.arm.id}, seed {task.seed}",
            ((task.steps, (settings[task.arm.id]["scale"],)),),
        )
        for name, task in tasks.items()
    ]  # fmt: skip
    with executor_of(run, "confirm", run.require("pair", "confirmation"), progress) as executor:
        opening, trained = executor.opening(), {}
        for unit, done in executor.each(units):
            trained[unit.name] = done
            started = run.add_time("confirmation", started)
        tables = opening.tables | {  # workers end in any order
            name: table for name in tasks for table in trained[name].tables.values()
        }
        records = []
        for arm in arms:
            ends = {seed: trained[seed_table(arm.id, seed)].ended for seed in seeds}
            parameters = ends[seeds[-1]]["parameters"]
            records.append(confirmed_arm(arm, settings[arm.id], ends, tables, parameters))
        chosen = frozen_arm(records)
        name, seed, scale = chosen["arm"], chosen["seed"], chosen["scale"]
        task = tasks[seed_table(name, seed)]
        wrong = Unit(WRONG_TRAINED, replace(task, wrong_prompts=True), "control on other prompts' caches")
        ((_, control),) = executor.each([wrong])
        started = run.add_time("confirmation", started)
        maps = {"learned": (task, scale), "ridge": None}
        if control.ended["status"] == "finished":
            maps[WRONG_TRAINED] = wrong.task, scale
        executor.save(maps, {"arm": name, "seed": seed})
    folder, articles = run.stage("confirmation"), opening.articles
    write_table(
        folder / "validation.parquet",
        pd.concat([t.assign(arm=n, article=articles) for n, t in tables.items()], ignore_index=True),
    )
    frozen = {**chosen, "checkpoint_bytes": (folder / "learned.safetensors").stat().st_size}
    manifest_hash, weights = freeze_manifest(run, frozen, list(maps))
    return run.publish(
        "confirmation",
        {
            "arms": records,
            "direct": summarise(tables["direct"]),
            "ridge": summarise(tables["ridge"]),
            "prompts": prompts,
            "windows": opening.windows,
            "frozen": {**frozen, "weights_sha256": weights["learned"]},
            "wrong_trained": {key: control.ended[key] for key in ("status", "reason")},
            "manifest_hash": manifest_hash,
            "gates": opening.gates,
        },
        started,
        {
            "frozen_at": now(),
            "ran": {name: done.ran for name, done in {**trained, wrong.name: control}.items()},
        },
    )
