"""Stage 02: retrain the finalists on a disjoint partition with fixed seeds, and freeze one."""

import time
from dataclasses import replace

import pandas as pd

from kvlib.maps import DirectMap, save_map
from kvlib.study.arms import chosen_arms
from kvlib.study.freezing import WRONG_TRAINED, freeze_manifest
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.records import read_record, write_table
from kvlib.study.run import Run, now
from kvlib.study.scoring import summarise
from kvlib.study.screening import (
    PROMPT_STEPS,
    SCORE_STEPS,
    WINDOW_STEPS,
    prepare,
    scored_table,
    stage_gates,
)
from kvlib.study.selection_tables import confirmed_arm, frozen_arm, seed_table


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
    trainer, scorer = prepare(run, "confirm", run.require("pair", "confirmation"), progress)
    passed = stage_gates(run, trainer, scorer, progress)
    units = prompts * SCORE_STEPS
    tables = {}
    for name, cache_map in (("direct", DirectMap()), ("ridge", trainer.ridge)):
        tables[name] = scorer.table(cache_map)
        progress.advance(units, f"{name} scored")
    records = []
    for arm in arms:
        step, scale = settings[arm.id]["checkpoint_step"], settings[arm.id]["scale"]
        ends = {}
        for seed in seeds:
            task = Task(arm, seed, step)
            ends[seed] = trained = trainer.train(task, progress, f"{arm.id}, seed {seed}")
            if trained["status"] == "finished":
                table = scored_table(trainer, scorer, task, step, scale, progress, units)
                tables[seed_table(arm.id, seed)] = table
            started = run.add_time("confirmation", started)
        records.append(confirmed_arm(arm, settings[arm.id], ends, tables, trained["parameters"]))
    chosen = frozen_arm(records)
    name, seed, scale = chosen["arm"], chosen["seed"], chosen["scale"]
    arm = next(arm for arm in arms if arm.id == name)
    folder = run.stage("confirmation")
    task = Task(arm, seed, chosen["checkpoint_step"])
    maps = {"learned": trainer.load(task, task.steps).with_scale(scale), "ridge": trainer.ridge}
    control = trainer.train(replace(task, wrong_prompts=True), progress, "control on other prompts' caches")
    if control["status"] == "finished":
        maps[WRONG_TRAINED] = trainer.load(replace(task, wrong_prompts=True), task.steps).with_scale(scale)
    started = run.add_time("confirmation", started)
    for file, cache_map in maps.items():
        path = folder / f"{file}.safetensors"
        save_map(cache_map, path, pair=trainer.pair, provenance={"map": file, "arm": name, "seed": seed})
    write_table(
        folder / "validation.parquet",
        pd.concat([t.assign(arm=n, article=scorer.articles) for n, t in tables.items()], ignore_index=True),
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
            "windows": len(trainer.store.windows),
            "frozen": {**frozen, "weights_sha256": weights["learned"]},
            "wrong_trained": {key: control[key] for key in ("status", "reason")},
            "manifest_hash": manifest_hash,
            "gates": passed,
        },
        started,
        {"frozen_at": now()},
    )
