"""Stage 03: four paths on the final prompts, opened only with the frozen manifest in hand."""

import math
import time

import pandas as pd
import torch

from kvlib.divergence import Divergence, divergence, path_divergence
from kvlib.errors import KvlibError
from kvlib.maps import DirectMap, load_map
from kvlib.study.describing import commit
from kvlib.study.freezing import check_manifest, openings, record_opening
from kvlib.study.models import load_pair_model, load_pair_tokenizer
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_table, write_table
from kvlib.study.run import Run
from kvlib.study.statistics import describe, paired
from kvlib.study.store import PromptStore

PATHS = ("native", "direct", "ridge", "learned")
STEP_COLUMNS = (
    "prompt", "step", "kl", "agree", "forced_token", "native_token", "path_token", "native_probability", "path_probability",
    "forcing", "path",
)  # fmt: skip
TEXT_CHARACTERS = 400  # of a prompt's end, kept for people to read
PREFILL_UNITS, PATH_UNITS = 3, 1


def run_frozen_evaluation(run: Run) -> dict:
    """Evaluate and write `frozen_evaluation/`: summary.json, prompts.parquet, steps.parquet, ledger.jsonl."""
    summary = run.finished("frozen_evaluation")
    if summary and summary["frozen"] == run.require("confirmation", "frozen_evaluation")["manifest_hash"]:
        return summary
    pair, started, profile = run.require("pair", "frozen_evaluation"), time.time(), run.profile
    manifest = check_manifest(run)
    folder, tokenizer = run.stage("frozen_evaluation"), load_pair_tokenizer(run)
    settings, count = profile.evaluation, profile.partitions.final.items
    progress = Progress(
        "frozen_evaluation", count * (PREFILL_UNITS + PATH_UNITS * len(PATHS) * len(settings.forcings))
    )
    work = folder / f"work-{hash_json([manifest['hash'], settings.model_dump(mode='json')])[:10]}"
    record_opening(run, manifest["hash"], work)
    partitions = load_partitions(run)  # every article and prompt checked against the hashes in the manifest
    tokens, items = partitions.tokens("final", tokenizer), partitions.items("final")
    target = load_pair_model(run, "target")
    store = PromptStore(work, tokens, profile.prompt.prefix_tokens, settings.forcings, settings.batch_prompts)
    store.fill(load_pair_model(run, "source"), target, progress, PREFILL_UNITS)
    maps = {
        name: load_map(run.stage("confirmation") / f"{name}.safetensors", pair=recorded_fingerprint(pair))
        for name in ("ridge", "learned")
    }
    maps["direct"] = DirectMap()

    tables = []
    for start in store.starts:
        path = work / f"steps-{start:04d}.parquet"
        units = min(settings.batch_prompts, count - start) * PATH_UNITS * len(PATHS) * len(settings.forcings)
        if path.exists():
            progress.skip(units)
        else:
            write_table(path, evaluate_batch(store, start, target, maps, tokenizer))
            progress.advance(
                units, f"paths over prompt {min(start + settings.batch_prompts, count)} of {count}"
            )
        tables.append(checked_steps(path, store, start, settings.forcings))
    steps = pd.concat(tables, ignore_index=True)
    prompts = prompt_table(steps, items, tokens[:, : profile.prompt.prefix_tokens], tokenizer)
    write_table(folder / "steps.parquet", steps)
    write_table(folder / "prompts.parquet", prompts)
    return run.publish(
        "frozen_evaluation",
        {
            "forcing": {
                forcing: summarise_forcing(prompts[prompts["forcing"] == forcing], profile.seed)
                for forcing in settings.forcings
            },
            "controls": {},
            "articles": int(prompts["article"].nunique()),
            "frozen": manifest["hash"],
            "opened": len(openings(run)),
            "commit": commit(),
            "modes": {
                name: "in_place" if cache_map.why_not_affine else "absorbed"
                for name, cache_map in maps.items()
            },
        },
        started,
    )


def checked_steps(path, store: PromptStore, start: int, forcings: list[str]) -> pd.DataFrame:
    """A batch's table, after it was found to hold each forcing, path, prompt and step of its batch once."""
    table, size = read_table(path), store.tokens.shape
    batch = range(start, min(start + store.batch_prompts, size[0]))
    wanted = {
        (f, p, i, s)
        for f in forcings
        for p in PATHS
        for i in batch
        for s in range(1, size[1] - store.prefix_tokens + 1)
    }
    keys, numbers = ["forcing", "path", "prompt", "step"], ["kl", "native_probability", "path_probability"]
    fits = sorted(table.columns) == sorted(STEP_COLUMNS)
    found = list(table[keys].itertuples(index=False, name=None)) if fits else []
    if (
        len(found) != len(wanted)
        or set(found) != wanted
        or not table[numbers].map(math.isfinite).all(axis=None)
    ):
        raise KvlibError(
            f"{path} does not hold every step of prompts {batch.start} to {batch.stop - 1} once: delete it and run the stage again"
        )
    return table


@torch.no_grad()
def evaluate_batch(store: PromptStore, start: int, target, maps: dict, tokenizer) -> pd.DataFrame:
    """One row per forcing, path, prompt and step."""
    prefix, references = store.batch(start)
    frames = []
    for forcing, reference in references.items():
        for name in PATHS:
            if name == "native":  # by definition its own reference
                logits = target.get_output_embeddings()(reference.hidden)
                found = divergence(logits, logits, reference.forced)
            else:
                found = path_divergence(target, prefix, maps[name], reference)
            frames.append(
                step_table(found, reference.forced, start, tokenizer).assign(forcing=forcing, path=name)
            )
    return pd.concat(frames, ignore_index=True)


def step_table(found: Divergence, forced: torch.Tensor, start: int, tokenizer) -> pd.DataFrame:
    prompts, steps = found.kl.shape
    return pd.DataFrame(
        {
            "prompt": [start + i for i in range(prompts) for _ in range(steps)],
            "step": list(range(1, steps + 1)) * prompts,
            "kl": found.kl.flatten().tolist(),
            "agree": found.agree.flatten().tolist(),
            "forced_token": [tokenizer.decode([t]) for t in forced.flatten().tolist()],
            "native_token": [tokenizer.decode([t]) for t in found.native_token.flatten().tolist()],
            "path_token": [tokenizer.decode([t]) for t in found.path_token.flatten().tolist()],
            "native_probability": found.native_probability.flatten().tolist(),
            "path_probability": found.path_probability.flatten().tolist(),
        }
    )


def prompt_table(steps: pd.DataFrame, items, prefixes: torch.Tensor, tokenizer) -> pd.DataFrame:
    """One row per forcing, path and prompt: KL32, top-1, the article and the end of the prompt's text."""
    grouped = steps.groupby(["forcing", "path", "prompt"], sort=False)
    table = grouped.agg(kl32=("kl", "mean"), top1=("agree", "mean")).reset_index()
    texts = [tokenizer.decode(row.tolist())[-TEXT_CHARACTERS:] for row in prefixes]
    return table.assign(
        article=[items[i].article for i in table["prompt"]],
        text=[texts[i] for i in table["prompt"]],
    )


def summarise_forcing(prompts: pd.DataFrame, seed: int) -> dict:
    """Per path and paired against direct, as section 4 of the design defines them."""
    kl = prompts.pivot(index="prompt", columns="path", values="kl32").sort_index()
    top1 = prompts.pivot(index="prompt", columns="path", values="top1").sort_index()
    clusters = prompts[prompts["path"] == "direct"].sort_values("prompt")["article"].tolist()
    paths = {}
    for name in PATHS:
        found = describe(kl[name])
        paths[name] = {
            "kl32": {key: found[key] for key in ("mean", "se", "median", "q10", "q90")},
            "top1": float(top1[name].mean()),
            "prompts": len(kl),
        }
    comparisons = {
        f"{name}-direct": paired(
            (kl[name] - kl["direct"]).tolist(), clusters, baseline=kl["direct"].tolist(), seed=seed
        )
        | {"top1_difference": float((top1[name] - top1["direct"]).mean())}
        for name in ("learned", "ridge")
    }
    return {"paths": paths, "paired": comparisons}
