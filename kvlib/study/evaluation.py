"""Stage 03: four paths, controls and noise on the final prompts, opened only with the frozen manifest in hand."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from kvlib.cache import PrefixCache, prefill
from kvlib.divergence import Divergence, Reference, divergence, native_logits, path_divergence
from kvlib.handoff import handoff
from kvlib.maps import CacheMap, DirectMap, load_map
from kvlib.pair import rotary_of
from kvlib.study.controls import CONTROLS, NOISE, Content, control_maps, donors_of
from kvlib.study.describing import commit
from kvlib.study.device import device_of, training_dtype
from kvlib.study.final_tables import (
    PATHS,
    checked_steps,
    lean_table,
    prompt_table,
    step_table,
    summarise_final,
)
from kvlib.study.freezing import check_manifest, openings, record_opening
from kvlib.study.gate import agreement, gates
from kvlib.study.lowering import PROMPTS, room
from kvlib.study.models import OneModel, load_pair_model, load_pair_tokenizer
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.profile import Evaluation
from kvlib.study.progress import Progress
from kvlib.study.prompts import TOO_MANY, PromptStore
from kvlib.study.records import hash_json, write_table
from kvlib.study.run import Run
from kvlib.study.screening import check_fingerprint

PREFILL_UNITS, PATH_UNITS = 3, 1
ROUGH = "native_training_dtype"  # noise that is there only where training computes in another number format


def run_frozen_evaluation(run: Run) -> dict:
    """Evaluate and write `frozen_evaluation/`: summary.json, prompts, steps and controls.parquet, ledger.jsonl."""
    summary = run.finished("frozen_evaluation")
    if summary and summary["frozen"] == run.require("confirmation", "frozen_evaluation")["manifest_hash"]:
        return summary
    pair, started, profile = run.require("pair", "frozen_evaluation"), time.time(), run.profile
    manifest = check_manifest(run)
    folder, tokenizer = run.stage("frozen_evaluation"), load_pair_tokenizer(run)
    settings, count = profile.evaluation, profile.partitions.final.items
    maps = {
        name: load_map(run.stage("confirmation") / f"{name}.safetensors", pair=recorded_fingerprint(pair))
        for name in manifest["weights"]
    } | {"direct": DirectMap()}
    device, own = device_of(profile), getattr(torch, profile.pair.dtype)
    rough = training_dtype(profile.training.dtype, device)
    rows = measured(manifest["weights"], own, rough)
    units = {name: len(paths) * len(settings.forcings) * PATH_UNITS for name, paths in rows.items()}
    progress = Progress("frozen_evaluation", count * (PREFILL_UNITS + sum(units.values())))
    work = work_folder(run, manifest["hash"])
    record_opening(run, manifest["hash"], work)
    partitions = load_partitions(run)  # every article and prompt checked against the hashes in the manifest
    tokens, items = partitions.tokens("final", tokenizer), partitions.items("final")
    prompt, at_once = profile.prompt, settings.batch_prompts
    fits = room(folder, *PROMPTS, at_once, TOO_MANY, progress)
    store = PromptStore(work, tokens, prompt.prefix_tokens, settings.forcings, at_once, fits)
    models = OneModel(run, partial(check_fingerprint, pair))
    store.fill_with("source", lambda: models.get("source"), progress, PREFILL_UNITS)
    target = models.get("target")
    passed = gates(
        target, tokens, [prompt.prefix_tokens], prompt.forced_steps, settings.gate_tolerance, progress
    )
    store.fill_with("native", lambda: target, progress, PREFILL_UNITS)
    low = load_pair_model(run, "target", rough) if ROUGH in rows["controls"] else None
    maps = {name: cache_map.to(device) for name, cache_map in maps.items()}
    agreed = ways_agree(store, target, maps, settings)
    bench = Bench(store, target, low, maps, donors_of([item.article for item in items]), profile.seed)
    write = {"steps": lambda *batch: bench.paths(*batch, tokenizer), "controls": bench.controls}

    tables: dict[str, list] = {name: [] for name in rows}
    missing = [s for s in store.starts if not all((work / batch_file(name, s)).exists() for name in rows)]
    with store.stream(missing, device) as stream:
        for start in store.starts:
            batch = range(start, min(start + at_once, count))
            caches = next(stream) if start in missing else None
            for name, paths in rows.items():
                path = work / batch_file(name, start)
                if path.exists():
                    progress.skip(len(batch) * units[name])
                else:
                    write_table(path, write[name](start, *caches))
                    what = "paths" if name == "steps" else "controls"
                    progress.advance(len(batch) * units[name], f"{what} over prompt {batch.stop} of {count}")
                tables[name].append(checked_steps(path, settings.forcings, paths, batch, prompt.forced_steps))
    steps, lean = (pd.concat(tables[name], ignore_index=True) for name in rows)
    prompts = prompt_table(steps, items, tokens[:, : prompt.prefix_tokens], tokenizer)
    for name, table in (("steps", steps), ("prompts", prompts), ("controls", lean)):
        write_table(folder / f"{name}.parquet", table)
    return run.publish(
        "frozen_evaluation",
        {
            **summarise_final(steps, prompts, lean, settings.forcings, profile.seed),
            "articles": int(prompts["article"].nunique()),
            "frozen": manifest["hash"],
            "commit": commit(),
            "gates": passed,
            "agreement": agreed,
            "modes": modes(maps),
        },
        started,
        {"opened": len(openings(run))},
    )


def ways_agree(store: PromptStore, target, maps: dict[str, CacheMap], settings: Evaluation) -> list[dict]:
    """`agreement` of the frozen maps over the first prompts, along the first forcing's tokens."""
    prefix, references = store.batch(0)
    inputs, device = references[settings.forcings[0]].inputs, next(target.parameters()).device
    frozen = {name: maps[name] for name in PATHS if name in maps and name != "direct"}
    return agreement(target, prefix.to(device), inputs.to(device), frozen, settings.gate_tolerance)


def work_folder(run: Run, manifest_hash: str) -> Path:
    """Where the batches of an evaluation under this manifest and these settings are kept."""
    name = hash_json([manifest_hash, run.profile.evaluation.model_dump(mode="json")])[:10]
    return run.stage("frozen_evaluation") / f"work-{name}"


def batch_file(table: str, start: int) -> str:
    """The name of the batch of `steps` or `controls` that begins at prompt `start`."""
    return f"{table}-{start:04d}.parquet"


def measured(maps: Iterable[str], dtype: torch.dtype, rough: torch.dtype) -> dict[str, list[str]]:
    """Table -> the paths in it. maps: those that were frozen. dtype, rough: the pair's and training's."""
    there = {"own", "direct", "permuted", *maps}
    controls = [name for name, (_, of, _) in CONTROLS.items() if of in there]
    noise = [name for name in NOISE if name != ROUGH or rough != dtype]
    return {"steps": list(PATHS), "controls": [*controls, *noise]}


def modes(maps: dict[str, CacheMap]) -> dict[str, str]:
    """How the handoff applies each path's map."""
    return {
        name: "in_place" if cache_map.why_not_affine else "absorbed"
        for name, cache_map in maps.items()
        if name in PATHS
    }


@dataclass(frozen=True)
class Bench:
    """What every batch of final prompts is measured with.

    low: the target in the number format of training, or None where that is the pair's own. donors: for each prompt the
    one whose cache stands in for a wrong prompt's.
    """

    store: PromptStore
    target: object
    low: object | None
    maps: dict[str, CacheMap]
    donors: list[int]
    seed: int

    @torch.no_grad()
    def paths(
        self, start: int, prefix: PrefixCache, references: dict[str, Reference], tokenizer
    ) -> pd.DataFrame:
        """One row per forcing, path, prompt and step of the batch that begins at prompt `start`."""

        def measure(few: slice) -> dict[tuple[str, str], Divergence]:
            cache, found = prefix.select(few), {}
            for forcing, whole in references.items():
                reference = whole.select(few)
                logits = native_logits(self.target, reference)  # of all paths
                for name in PATHS:
                    if name == "native":  # by definition its own reference
                        found[forcing, name] = divergence(logits, logits, reference.forced)
                    else:
                        found[forcing, name] = path_divergence(
                            self.target, cache, self.maps[name], reference, native=logits
                        )
            return found

        frames = [
            step_table(found, references[forcing].forced, start, tokenizer).assign(forcing=forcing, path=name)
            for (forcing, name), found in self._over(prefix.batch, measure).items()
        ]
        return pd.concat(frames, ignore_index=True)

    def _over(self, prompts: int, measure: Callable[[slice], dict]) -> dict[tuple[str, str], Divergence]:
        """`measure` over a batch's prompts, as many at a time as there is room for."""
        parts = self.store.room.over(prompts, measure)
        return {key: Divergence.cat([part[key] for part in parts]) for key in parts[0]}

    @torch.no_grad()
    def controls(self, start: int, prefix: PrefixCache, references: dict[str, Reference]) -> pd.DataFrame:
        """One row per forcing, control or noise, prompt and step of the batch that begins at prompt `start`."""
        donors = self.store.caches([self.donors[start + n] for n in range(prefix.batch)])

        def measure(few: slice) -> dict[tuple[str, str], Divergence]:
            some = {forcing: reference.select(few) for forcing, reference in references.items()}
            return self._controls(
                start + few.start, prefix.select(few), donors.select(few).to(prefix.device), some
            )

        frames = [
            lean_table(found, start).assign(forcing=forcing, path=name)
            for (forcing, name), found in self._over(prefix.batch, measure).items()
        ]
        return pd.concat(frames, ignore_index=True)

    def _controls(self, start: int, prefix, donors, references) -> dict[tuple[str, str], Divergence]:
        """(forcing, control or noise) -> divergence, of prompts that go through the model together."""
        content = Content(prefix, donors, rotary_of(self.target), self.seed, start)
        maps = control_maps(self.maps)
        caches = {
            kind: content.cache(kind) for kind in dict.fromkeys(kind for kind, _, _ in CONTROLS.values())
        }
        head = self.store.tokens[start : start + prefix.batch, : self.store.prefix_tokens - 1].to(
            prefix.device
        )
        half = -(-head.shape[1] // 2)
        native = {
            "native_own_cache": prefill(self.target, head),
            "native_two_parts": prefill(self.target, head, chunk_tokens=half),
        }
        rough = prefill(self.low, head) if self.low is not None else None
        found = {}
        for forcing, reference in references.items():
            logits = native_logits(self.target, reference)  # of all controls
            against_native = partial(path_divergence, self.target, reference=reference, native=logits)
            for name, (kind, of, _) in CONTROLS.items():
                if of in maps:
                    found[forcing, name] = against_native(caches[kind], maps[of])
            for name, cache in native.items():
                found[forcing, name] = against_native(cache, DirectMap())
            if rough is not None:
                found[forcing, ROUGH] = self._rough(rough, reference)
        return found

    def _rough(self, prefix, reference: Reference) -> Divergence:
        """The body in training's number format, the head in the pair's: as training computes its loss."""
        with handoff(self.low, prefix, DirectMap()) as active:
            hidden = active.hidden(reference.inputs)
        head = self.target.get_output_embeddings()
        return divergence(head(reference.hidden), head(hidden.to(reference.hidden.dtype)), reference.forced)
