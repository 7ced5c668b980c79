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
from kvlib.study.selection import freeze, mean_kl32, median_seed, why_frozen


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
        runs = []
        for seed in seeds:
            task = Task(arm, seed, step)
            trained = trainer.train(task, progress, f"{arm.id}, seed {seed}")
            entry = {"seed": seed, "status": trained["status"], "kl32": None, "se": None, "top1": None}
            if trained["status"] == "finished":
                table = scored_table(trainer, scorer, task, step, scale, progress, units)
                tables[f"{arm.id} seed {seed}"] = table
                entry |= summarise(table)
            runs.append(entry)
            started = run.add_time("confirmation", started)
        whole = all(entry["status"] == "finished" for entry in runs)
        records.append(
            {
                "id": arm.id, "checkpoint_step": step, "scale": scale,
                "parameters": trained["parameters"], "absorbable": arm.absorbable, "runs": runs,
                "mean_kl32": mean_kl32({"runs": runs}) if whole else None, "median_seed": median_seed(runs) if whole else None,
            }
        )  # fmt: skip
    name, seed = freeze(records)
    record = next(entry for entry in records if entry["id"] == name)
    arm = next(arm for arm in arms if arm.id == name)
    folder = run.stage("confirmation")
    task = Task(arm, seed, record["checkpoint_step"])
    maps = {"learned": trainer.load(task, task.steps).with_scale(record["scale"]), "ridge": trainer.ridge}
    control = trainer.train(replace(task, wrong_prompts=True), progress, "control on other prompts' caches")
    if control["status"] == "finished":
        maps[WRONG_TRAINED] = trainer.load(replace(task, wrong_prompts=True), task.steps).with_scale(
            record["scale"]
        )
    started = run.add_time("confirmation", started)
    for file, cache_map in maps.items():
        path = folder / f"{file}.safetensors"
        save_map(cache_map, path, pair=trainer.pair, provenance={"map": file, "arm": name, "seed": seed})
    write_table(
        folder / "validation.parquet",
        pd.concat([t.assign(arm=n, article=scorer.articles) for n, t in tables.items()], ignore_index=True),
    )
    frozen = {
        "arm": name, "seed": seed, "checkpoint_step": record["checkpoint_step"], "scale": record["scale"],
        "parameters": record["parameters"], "checkpoint_bytes": (folder / "learned.safetensors").stat().st_size,
        "why": why_frozen(records, name, seed),
    }  # fmt: skip
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
