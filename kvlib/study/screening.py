"""Stage 01: train every arm, rank by validation KL32, then look at checkpoints and scales of the best."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch

from kvlib.cache import Geometry
from kvlib.errors import KvlibError
from kvlib.maps import RidgeMap, load_map, save_map
from kvlib.maps.base import map_provenance
from kvlib.pair import fingerprint
from kvlib.study.arms import chosen_arms
from kvlib.study.device import device_of, training_dtype
from kvlib.study.executors import executor_of
from kvlib.study.gate import gates
from kvlib.study.learning import Task, Trainer
from kvlib.study.lowering import PROMPTS, WINDOWS, room
from kvlib.study.models import OneModel, load_pair_config, load_pair_model, load_pair_tokenizer
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.progress import Progress
from kvlib.study.prompts import TOO_MANY, PromptStore
from kvlib.study.records import hash_json, read_record, write_json, write_table
from kvlib.study.run import Run
from kvlib.study.scoring import Scorer
from kvlib.study.selection_tables import arm_record, selected_arms, summarise_screening
from kvlib.study.store import TOO_LONG, WINDOWS_AT_ONCE, WindowStore, hash_ids
from kvlib.study.units import Unit

# What the parts cost, in training steps, so that the time left can be told; measured on two cores.
WINDOW_STEPS, PROMPT_STEPS, SCORE_STEPS = 4, 1.5, 0.2
GATE_WINDOWS = 2


def prepare(
    run: Run, stage: str, pair: dict, progress: Progress, *, filled: bool = False, asked_by: str | None = None
) -> tuple[Trainer, Scorer]:
    """Windows, ridge map, validation prompts and the frozen target of a stage ("screen" or "confirm").

    What is missing is computed, by one model after the other. Of the target there is one copy, or one in each number
    format where training computes in another than the pair's.

    Args:
        filled: another process has just done this for the same run: its files are taken as they are, not looked through
            again. asked_by: the stage whose record says what memory did not suffice for, where it is another.
    """
    profile, partitions, tokenizer = run.profile, load_partitions(run), load_pair_tokenizer(run)
    own = "screening" if stage == "screen" else "confirmation"
    folder, noted = run.stage(own), run.stage(asked_by or own)
    device = device_of(profile)
    dtype = training_dtype(profile.training.dtype, device)
    geometry, hidden_size = _shape(run)
    data_key = caches_key(run, dtype)
    store = WindowStore(
        folder / f"windows-{data_key}", partitions.tokens(f"{stage}_train", tokenizer), geometry, hidden_size,
        getattr(torch, profile.training.cache_dtype), room(noted, *WINDOWS, WINDOWS_AT_ONCE, TOO_LONG, progress),
    )  # fmt: skip
    at_once = profile.evaluation.batch_prompts
    validation = PromptStore(
        folder / f"prompts-{data_key}", partitions.tokens(f"{stage}_validate", tokenizer), profile.prompt.prefix_tokens,
        ["oracle"], at_once, room(noted, *PROMPTS, at_once, TOO_MANY, progress),
    )  # fmt: skip
    models = OneModel(run, lambda role, model: None if filled else check_fingerprint(pair, role, model))
    if filled and store.filled and validation.filled:
        progress.skip(len(store.windows) * WINDOW_STEPS + len(validation.tokens) * PROMPT_STEPS)
    else:
        validation.fill_with("source", lambda: models.get("source"), progress, PROMPT_STEPS)
        store.fill_with("source", lambda: models.get("source", dtype), progress, WINDOW_STEPS)
        validation.fill_with("native", lambda: models.get("target"), progress, PROMPT_STEPS)
        store.fill_with("target", lambda: models.get("target", dtype), progress, WINDOW_STEPS)
    training_target = models.get("target", dtype)
    same = dtype == getattr(torch, profile.pair.dtype)
    target = training_target if same else load_pair_model(run, "target")
    fingerprint_of_pair = recorded_fingerprint(pair)
    ridge = _ridge(
        folder / f"ridge-{data_key}.safetensors", store, profile.screening.ridge_penalty, fingerprint_of_pair, device
    )  # fmt: skip
    trainer = Trainer(
        profile, store, training_target, target.get_output_embeddings().weight.detach().float(), ridge, store.kept_scale(),
        fingerprint_of_pair, folder / "arms",
        key=trainings_key(run, dtype),
        articles=[item.article for item in partitions.items(f"{stage}_train")],
        noted=noted,
    )  # fmt: skip
    articles = [item.article for item in partitions.items(f"{stage}_validate")]
    return trainer, Scorer(validation, target, articles)


def _shape(run: Run) -> tuple[Geometry, int]:
    """(the pair's cache geometry, the target's hidden size), from its configuration alone."""
    config = load_pair_config(run, "target")
    return Geometry.of(SimpleNamespace(config=config)), config.hidden_size


def caches_key(run: Run, dtype: torch.dtype) -> str:
    """Names what the stored caches and the ridge map of a stage depend on; `dtype` is the one that training computes in."""
    cache_dtype = getattr(torch, run.profile.training.cache_dtype)
    penalty = run.profile.screening.ridge_penalty
    return hash_json([run.key("pair"), str(dtype), str(cache_dtype), penalty])[:10]


def trainings_key(run: Run, dtype: torch.dtype) -> str:
    """Names what every training of a stage depends on, the arm and the seed apart."""
    settings = run.profile.training.model_dump(mode="json")
    return hash_json([caches_key(run, dtype), settings, run.profile.screening.checkpoints])


def stage_gates(run: Run, trainer: Trainer, scorer: Scorer, progress: Progress) -> list[dict]:
    """The gate at the shortest and longest prefix that training cuts, and at the prompts' own."""
    profile = run.profile
    longest = profile.partitions.window_tokens - profile.prompt.forced_steps
    lengths = (profile.training.min_prefix_tokens, profile.prompt.prefix_tokens, longest)
    windows = trainer.store.windows[:GATE_WINDOWS]
    tolerance = profile.evaluation.gate_tolerance
    return gates(scorer.target, windows, lengths, profile.prompt.forced_steps, tolerance, progress)


def check_fingerprint(pair: dict, role: str, model) -> None:
    """Raises KvlibError unless the model's weights are those of the pair stage's summary."""
    if fingerprint(model) != pair[role]["fingerprint"]:
        raise KvlibError(
            f"the {role}'s weights are not those that the pair stage recorded ({pair[role]['fingerprint'][:12]}): "
            "restore them, or begin a new run"
        )


def _ridge(path, store: WindowStore, penalty: float, pair: str, device: torch.device) -> RidgeMap:
    wanted = {"penalty": penalty, "windows": hash_ids(store.windows)}
    if not path.exists():
        save_map(store.fit_ridge(penalty, device), path, pair=pair, provenance=wanted)
    loaded = load_map(path, pair=pair)
    if map_provenance(path) != wanted:
        raise KvlibError(f"{path} was not fitted on this stage's windows: delete it and run the stage again")
    return loaded


def run_screening(run: Run) -> dict:
    """Train and score every arm; write `screening/summary.json`, curves.parquet and validation.parquet."""
    summary = run.finished("screening")
    if summary:
        return summary
    pair, started, profile = run.require("pair", "screening"), time.time(), run.profile
    settings, steps = profile.screening, profile.training.steps
    arms = chosen_arms(settings)
    prompts = profile.partitions.screen_validate.items
    grid_size = settings.select * len(settings.checkpoints) * len(settings.scales)
    total = (
        profile.partitions.screen_train.items * WINDOW_STEPS + prompts * PROMPT_STEPS
        + len(arms) * steps + (len(arms) + 2 + grid_size) * prompts * SCORE_STEPS
    )  # fmt: skip
    progress = Progress("screening", total)
    tasks = {arm.id: Task(arm, profile.training.seed, steps) for arm in arms}
    first = [
        Unit(name, task, f"arm {number} of {len(arms)}", ((steps, (1.0,)),))
        for number, (name, task) in enumerate(tasks.items(), 1)
    ]
    with executor_of(run, "screen", pair, progress) as executor:
        opening, trained = executor.opening(), {}
        for unit, done in executor.each(first):
            trained[unit.name] = done
            started = run.add_time("screening", started)
        trained = {name: trained[name] for name in tasks}  # workers end in any order
        tables = opening.tables | {
            name: done.tables[steps, 1.0]
            for name, done in trained.items()
            if done.ended["status"] == "finished"
        }
        records = [arm_record(arm, trained[arm.id].ended, tables.get(arm.id)) for arm in arms]
        selected = selected_arms(records, settings)
        grid = tuple((step, tuple(settings.scales)) for step in settings.checkpoints)
        second = [Unit(name, tasks[name], f"scales of {name}", grid, trained=True) for name in selected]
        scored = {unit.name: done.tables for unit, done in executor.each(second)}
    cells = {(name, *cell): table for name in selected for cell, table in scored[name].items()}
    articles, curves = opening.articles, [done.curve for done in trained.values()]
    found = summarise_screening(records, tables, cells, articles, settings, profile.seed)
    folder = run.stage("screening")
    write_table(folder / "curves.parquet", pd.concat(curves, ignore_index=True))
    write_table(
        folder / "validation.parquet",
        pd.concat([t.assign(arm=name, article=articles) for name, t in tables.items()], ignore_index=True),
    )
    write_table(
        folder / "grid.parquet",
        pd.concat(
            [
                table.assign(arm=name, checkpoint_step=step, scale=scale)
                for (name, step, scale), table in cells.items()
            ],
            ignore_index=True,
        ),
    )
    return run.publish(
        "screening",
        {
            **found,
            "prompts": prompts,
            "steps": steps,
            "prompts_per_step": profile.training.prompts_per_step,
            "windows": opening.windows,
            "training_dtype": opening.training_dtype,
            "gates": opening.gates,
        },
        started,
        {
            "seconds": {name: done.ended["seconds"] for name, done in trained.items()},
            "ran": {name: done.ran for name, done in trained.items()},
        },
    )


def scores_file(step: int, scale: float) -> str:
    """The name of the record of one checkpoint at one scale, in its arm's folder."""
    return f"scored-{step:05d}-{scale!r}.json"


def scored_tables(
    trainer: Trainer,
    scorer: Scorer,
    task: Task,
    step: int,
    scales: list[float],
    progress: Progress,
    units: float,
) -> dict[float, pd.DataFrame]:
    """The validation tables of one checkpoint by scale, from their records where there are some; the others together."""
    found = {scale: _recorded(trainer.place(task) / scores_file(step, scale), scorer) for scale in scales}
    missing = [scale for scale in scales if found[scale] is None]
    progress.skip((len(scales) - len(missing)) * units)
    if missing:
        checkpoint = trainer.load(task, step)
        tables = scorer.tables([checkpoint.with_scale(scale) for scale in missing])
        for scale, table in zip(missing, tables):
            found[scale] = table
            path = trainer.place(task) / scores_file(step, scale)
            write_json(path, {name: table[name].tolist() for name in table})
            progress.advance(units, f"scored {task.arm.id} at step {step}, scale {scale:g}")
    return found


def _recorded(path: Path, scorer: Scorer) -> pd.DataFrame | None:
    if not path.exists():
        return None
    found = read_record(path, "prompt", "kl32", "top1")
    if found["prompt"] != list(range(scorer.prompts)) or not all(
        _are_numbers(column, scorer.prompts) for column in found.values()
    ):
        raise KvlibError(
            f"{path} is not of this stage's {scorer.prompts} prompts: delete it and run the stage again"
        )
    # as a fresh table has them, not as JSON sorts them
    return pd.DataFrame(found)[["prompt", "kl32", "top1"]]


def _are_numbers(column, count: int) -> bool:
    whole = isinstance(column, list) and len(column) == count
    return whole and all(isinstance(value, (int, float)) and math.isfinite(value) for value in column)
