"""The evidence stage: what the frozen map is worth elsewhere, and why; a run that was stopped goes on where it was."""

import time
from pathlib import Path

import pandas as pd

from kvlib.errors import KvlibError
from kvlib.maps import CacheMap, DirectMap, load_map
from kvlib.study.evidence.ablation import ablation_units, measure_ablation, summarise_ablation
from kvlib.study.evidence.content import singular_values, sizes
from kvlib.study.evidence.learning import (
    learning_units,
    measure_learning,
    step_counts,
    summarise_learning,
    window_facts,
)
from kvlib.study.evidence.lengths import length_units, measure_lengths, summarise_lengths
from kvlib.study.evidence.power import final_differences, summarise_power
from kvlib.study.evidence.quality import QUALITY_STEPS, measure_quality
from kvlib.study.freezing import record_opening
from kvlib.study.models import load_pair_config, load_pair_tokenizer
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_record, read_table, sha256_file, write_table
from kvlib.study.run import NOTEBOOKS, Run
from kvlib.study.screening import PROMPT_STEPS, WINDOW_STEPS, prepare

STAGE = "evidence"


def run_evidence(run: Run) -> dict:
    """Measure what is not there yet and write `evidence/`: summary.json and the tables that `run.OUTPUTS` lists.

    Raises: KvlibError unless the final evaluation of the map that is frozen now is finished, and for lengths beyond the
    model's positions.
    """
    final, confirmation = (run.require(stage, STAGE) for stage in ("frozen_evaluation", "confirmation"))
    summary, manifest_hash = run.finished(STAGE), confirmation["manifest_hash"]
    if summary and summary["frozen"] == manifest_hash:
        return summary
    if final["frozen"] != manifest_hash:
        raise KvlibError(
            f"the final evaluation of run {run.name} is of manifest {final['frozen'][:12]}, the frozen one is {manifest_hash[:12]}: "
            f"run `python -m kvlib run {NOTEBOOKS['frozen_evaluation']} --profile {run.source} --run {run.name}` first"
        )
    started, pair, profile = time.time(), run.require("pair", STAGE), run.profile
    check_positions(run)
    maps, frozen = frozen_maps(run, pair, confirmation), confirmation["frozen"]
    folder = run.stage(STAGE)
    work = work_folder(run, manifest_hash)
    work.mkdir(parents=True, exist_ok=True)
    partitions, tokenizer = load_partitions(run), load_pair_tokenizer(run)
    progress = Progress(STAGE, _units(run, pair["target"]["layers"]))

    # The final articles are read again: said once, beside the evaluation's own openings.
    record_opening(run, manifest_hash, work, STAGE)
    final_articles = partitions.parts["final"].articles
    lengths = measure_lengths(run, final_articles, tokenizer, maps, work, progress)
    write_table(folder / "lengths.parquet", lengths)
    started = run.add_time(STAGE, started)

    trainer, scorer = prepare(run, "confirm", pair, progress, asked_by=STAGE)
    learning = measure_learning(run, trainer, scorer, frozen, work, progress)
    write_table(folder / "learning.parquet", learning)
    started = run.add_time(STAGE, started)

    ablation = measure_ablation(scorer, maps["learned"], work, progress)
    write_table(folder / "ablation.parquet", ablation)
    started = run.add_time(STAGE, started)

    write_table(folder / "singular_values.parquet", singular_values(maps["learned"]))
    maps = {name: cache_map.to(scorer.device) for name, cache_map in maps.items()}
    with scorer.stream() as batches:
        prefixes = (prefix for prefix, _ in batches)
        write_table(folder / "size.parquet", sizes(maps["learned"], prefixes, scorer.target))
    quality = work / "quality.parquet"
    if quality.exists():
        progress.skip(scorer.prompts * QUALITY_STEPS)
    else:
        tokens = partitions.tokens("confirm_validate", tokenizer)[:, : profile.prompt.prefix_tokens]
        with scorer.stream() as batches:
            write_table(quality, measure_quality(scorer.target, tokens, batches, maps, progress))
    write_table(folder / "ridge.parquet", read_table(quality))

    return run.publish(
        STAGE,
        facts(run, frozen, manifest_hash) | summarise_tables(run, window_facts(run, trainer.articles)),
        started,
    )


def work_folder(run: Run, manifest_hash: str) -> Path:
    """Where scores of the map frozen in this manifest are kept as soon as they are measured.

    All that they depend on is in the manifest, the counts of this stage apart, and those are in the names of files.
    """
    return run.stage(STAGE) / f"work-{hash_json(manifest_hash)[:10]}"


def facts(run: Run, frozen: dict, manifest_hash: str) -> dict:
    """What the summary says of the frozen map, beside what it measured."""
    training, partitions = run.profile.training, run.profile.partitions
    return {
        "frozen": manifest_hash,
        "arm": frozen["arm"],
        "scale": frozen["scale"],
        "training_prefix_tokens": [
            training.min_prefix_tokens,
            partitions.window_tokens - run.profile.prompt.forced_steps,
        ],
    }


def summarise_tables(run: Run, windows: list[dict]) -> dict:
    """lengths, learning, ablation and power, from the stage's tables and the final evaluation's alone.

    Args:
        windows: `windows`, `tokens` and `articles` of each training; the summary's own entries will do.
    """

    def table(name: str, stage: str = STAGE) -> pd.DataFrame:
        return read_table(run.stage(stage) / f"{name}.parquet")

    learning = summarise_learning(table("learning"), windows, step_counts(run))
    return {
        "lengths": summarise_lengths(table("lengths"), run.profile.evidence.prefix_tokens, run.profile.seed),
        "learning": learning,
        "ablation": summarise_ablation(table("ablation"), learning["direct"]["kl32"]),
        "power": summarise_power(*final_differences(table("prompts", "frozen_evaluation"))),
    }


def check_positions(run: Run) -> None:
    """Raises KvlibError when a length and its forced steps go beyond the target's positions."""
    longest, steps = max(run.profile.evidence.prefix_tokens), run.profile.prompt.forced_steps
    limit = load_pair_config(run, "target").max_position_embeddings
    if longest + steps > limit:
        raise KvlibError(
            f"evidence.prefix_tokens holds {longest}, which is {longest + steps} positions with prompt.forced_steps, and the model "
            f"has {limit}: lower it to {limit - steps} at most"
        )


def frozen_maps(run: Run, pair: dict, confirmation: dict) -> dict[str, CacheMap]:
    """direct, ridge and learned, the weights of the last two checked against the manifest."""
    folder, maps = run.stage("confirmation"), {"direct": DirectMap()}
    manifest = read_record(folder / "manifest.json", "hash", "weights")
    if manifest["hash"] != confirmation["manifest_hash"]:
        raise KvlibError(
            f"the frozen manifest {folder / 'manifest.json'} has hash {manifest['hash'][:12]}, the confirmation stage recorded "
            f"{confirmation['manifest_hash'][:12]}: restore it"
        )
    for name in ("ridge", "learned"):
        path = folder / f"{name}.safetensors"
        _check_weights(path, manifest["weights"][name])
        maps[name] = load_map(path, pair=recorded_fingerprint(pair))
    return maps


def _check_weights(path: Path, wanted: str) -> None:
    found = sha256_file(path) if path.exists() else "missing"
    if found != wanted:
        raise KvlibError(
            f"{path} is not the map that was frozen ({wanted[:12]} then, {found[:12]} now): restore it from a copy"
        )


def _units(run: Run, layers: int) -> float:
    """The stage's work in training steps, so that the time left can be told."""
    settings, partitions = run.profile.evidence, run.profile.partitions
    prompts = partitions.confirm_validate.items
    lengths = sum(n * length_units(length) for length, n in zip(settings.prefix_tokens, settings.prompts))
    found = (
        partitions.confirm_train.items * WINDOW_STEPS + prompts * PROMPT_STEPS
    )  # the confirmation stage's own
    return lengths + found + learning_units(run) + ablation_units(layers, prompts) + prompts * QUALITY_STEPS
