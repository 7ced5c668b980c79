"""Stage 04: time to first token and peak memory of the frozen maps, on real tokens."""

import time
from functools import partial

import torch

from kvlib.attaching import compute_dtype
from kvlib.cache import PrefixCache
from kvlib.compiled import SAMPLE_TOKENS, compiled_correction, no_compiler
from kvlib.floor import step_bytes
from kvlib.geometry import Geometry, rotary_of
from kvlib.latency import MadeCaches, TargetPath, memory_bandwidth_gb_s
from kvlib.maps import load_map
from kvlib.study.describing import environment
from kvlib.study.gate import gates
from kvlib.study.latency_tables import crossovers, floor_rows, mode_rows, summarise
from kvlib.study.models import OneModel, load_pair_model, load_pair_tokenizer, place_of
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.pipelining import pipeline_medians
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, write_table
from kvlib.study.run import Run, device_of
from kvlib.study.screening import check_fingerprint
from kvlib.study.timing import latency_units, measure_latency, other_ways, times_the_source

MAPS = ("ridge", "learned")


def run_latency(run: Run) -> dict:
    """Measure and write `latency/`: summary.json, raw.parquet, memory.parquet, breakdown.parquet, pipeline.parquet."""
    confirmation, pair = run.require("confirmation", "latency"), run.require("pair", "latency")
    summary = run.finished("latency")
    if summary and summary["frozen"] == confirmation["manifest_hash"]:
        return summary
    started, config, folder = time.time(), run.profile.latency, run.stage("latency")
    files = {name: run.stage("confirmation") / f"{name}.safetensors" for name in MAPS}
    maps = {name: load_map(file, pair=recorded_fingerprint(pair)) for name, file in files.items()}
    prefixes = load_partitions(run).tokens("latency", load_pair_tokenizer(run)).to(device_of(run.profile))
    maps = {name: cache_map.to(prefixes.device) for name, cache_map in maps.items()}  # before any clock runs
    models = OneModel(run, partial(check_fingerprint, pair))
    if times_the_source(config):
        source = load_pair_model(run, "source")
        check_fingerprint(pair, "source", source)
    else:  # one model after the other: what fits a card that does not hold both
        source = MadeCaches.of(models.get("source"), prefixes[:, : max(config.prefix_tokens)])
    target = models.get("target")
    device, dtype = next(target.parameters()).device, next(target.parameters()).dtype
    modes, left_out = other_ways(config, maps, no_compiler(device))
    progress = Progress("latency", latency_units(config, maps, modes, len(prefixes)))
    passed = gates(
        target, prefixes[:1], config.prefix_tokens, 0, run.profile.evaluation.gate_tolerance, progress
    )
    bandwidth = memory_bandwidth_gb_s(device)
    compile_seconds = _compile(target, [path for path in modes if path.compiled], dtype, device)
    measured = measure_latency(
        target, source, maps, modes, prefixes, config, folder, seed=run.profile.seed,
        key=parts_key(run, confirmation["manifest_hash"]), progress=progress,
        target_folder=place_of(run, "target"), map_files=files,
    )  # fmt: skip
    for name, table in vars(measured).items():
        write_table(folder / f"{name}.parquet", table)
    rows, here = summarise(measured.raw, measured.memory), environment(device)
    return run.publish(
        "latency",
        {
            "rows": rows,
            "crossover": crossovers(rows),
            "modes": mode_rows(measured.raw, measured.memory, compile_seconds),
            "left_out": left_out,
            "floor": floor_rows(
                config.prefix_tokens, step_bytes(target), Geometry.of(target), dtype, bandwidth
            ),
            "breakdown": measured.breakdown.to_dict("records"),
            "pipeline": pipeline_medians(measured.pipeline),
            "device": here["device"] if here["device"] != "cpu" else here["processor"],
            "dtype": pair["target"]["dtype"],
            "threads": torch.get_num_threads(),
            "memory_bandwidth_gb_s": bandwidth,
            "warmups": dict(zip(map(str, config.prefix_tokens), config.warmups)),
            "prompts": len(prefixes),
            "frozen": confirmation["manifest_hash"],
            "gates": passed,
        },
        started,
    )


def _compile(target, compiled: list[TargetPath], dtype: torch.dtype, device: torch.device) -> float | None:
    """Have every correction compiled that will be timed, so that no clock sees it; seconds, None without any."""
    seconds = None
    shape = Geometry.of(target)
    for path in compiled:
        empty = torch.zeros(1, shape.heads, SAMPLE_TOKENS, shape.head_dim, dtype=dtype, device=device)
        prefix = PrefixCache([empty] * shape.layers, [empty] * shape.layers)
        cache_map = path.cache_map.to(device, compute_dtype(target))
        rotary = rotary_of(target) if cache_map.needs_rotary else None
        seconds = compiled_correction(cache_map, prefix, cache_map.angles(rotary, prefix))[1]
    return seconds


def parts_key(run: Run, manifest_hash: str) -> str:
    """Stands for everything that the times depend on."""
    return hash_json([run.key("latency"), manifest_hash])
