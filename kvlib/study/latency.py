"""Stage 04: time to first token and peak memory of the frozen maps, on real tokens."""

import time
from functools import partial

import torch

from kvlib.attaching import compute_dtype
from kvlib.cache import PrefixCache
from kvlib.clocks import memory_bandwidth_gb_s
from kvlib.compiled import SAMPLE_TOKENS, compiled_correction, no_compiler, why_not_compiled
from kvlib.errors import KvlibError
from kvlib.floor import step_bytes
from kvlib.geometry import Geometry, queries_per_head, rotary_of
from kvlib.latency import MadeCaches
from kvlib.maps import CacheMap, load_map
from kvlib.study.describing import environment
from kvlib.study.device import device_of
from kvlib.study.gate import gates
from kvlib.study.latency_tables import crossovers, floor_rows, mode_rows, summarise
from kvlib.study.models import OneModel, load_pair_model, load_pair_tokenizer, place_of
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.pipelining import pipeline_medians
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, write_table
from kvlib.study.run import Run
from kvlib.study.screening import check_fingerprint
from kvlib.study.timing import (
    MODES_OF,
    latency_units,
    learned_is_compiled,
    measure_latency,
    other_ways,
    times_the_source,
)

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
    compile_seconds, why_not = _compile(target, maps, config.modes, dtype, device)
    modes, left_out = other_ways(config, maps, why_not, learned_is_compiled(maps, device))
    progress = Progress("latency", latency_units(config, maps, modes, len(prefixes)))
    passed = gates(
        target, prefixes[:1], config.prefix_tokens, 0, run.profile.evaluation.gate_tolerance, progress
    )
    bandwidth = memory_bandwidth_gb_s(device)
    measured = measure_latency(
        target, source, maps, modes, prefixes, config, folder, seed=run.profile.seed,
        key=parts_key(run, confirmation["manifest_hash"]), progress=progress,
        target_folder=place_of(run, "target"), map_files=files,
    )  # fmt: skip
    for name, table in vars(measured).items():
        write_table(folder / f"{name}.parquet", table)
    rows, here = summarise(measured.raw, measured.memory, compile_seconds), environment(device)
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


def _compile(
    target, maps: dict[str, CacheMap], ways: list[str], dtype: torch.dtype, device: torch.device
) -> tuple[float | None, str | None]:
    """Have the learned map's correction compiled where it will be timed, so that no clock sees it.

    Returns: (seconds, None where nothing was compiled; why nothing can be compiled here, else None).
    """
    learned, why_not = maps[MODES_OF], no_compiler(device)
    wanted = "compiled" in ways or learned_is_compiled(maps, device)
    if not wanted or why_not or why_not_compiled(learned):
        return None, why_not
    shape = Geometry.of(target)
    empty = torch.zeros(1, shape.heads, SAMPLE_TOKENS, shape.head_dim, dtype=dtype, device=device)
    prefix = PrefixCache([empty] * shape.layers, [empty] * shape.layers)
    cache_map = learned.to(device, compute_dtype(target))
    rotary = rotary_of(target) if cache_map.needs_rotary else None
    try:
        angles, queries = cache_map.angles(rotary, prefix), queries_per_head(target)
        return compiled_correction(cache_map, prefix, angles, queries=queries)[1], None
    except KvlibError as error:
        return None, str(error).partition(", expected")[0]


def parts_key(run: Run, manifest_hash: str) -> str:
    """Stands for everything that the times depend on."""
    return hash_json([run.key("latency"), manifest_hash])
