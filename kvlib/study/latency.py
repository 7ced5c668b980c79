"""Stage 04: time to first token and peak memory of the frozen maps, on real tokens."""

import time

import torch

from kvlib.floor import step_bytes
from kvlib.geometry import Geometry
from kvlib.latency import memory_bandwidth_gb_s
from kvlib.maps import load_map
from kvlib.study.describing import environment
from kvlib.study.gate import gates
from kvlib.study.latency_tables import crossovers, floor_rows, mode_rows, summarise
from kvlib.study.models import load_pair_model, load_pair_tokenizer, place_of
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, write_table
from kvlib.study.run import Run
from kvlib.study.timing import latency_units, measure_latency, other_ways

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
    prefixes = load_partitions(run).tokens("latency", load_pair_tokenizer(run))
    progress = Progress("latency", latency_units(config, maps, len(prefixes)))
    target, source = load_pair_model(run, "target"), load_pair_model(run, "source")
    passed = gates(
        target, prefixes[:1], config.prefix_tokens, 0, run.profile.evaluation.gate_tolerance, progress
    )
    bandwidth = memory_bandwidth_gb_s(next(target.parameters()).device)
    measured = measure_latency(
        target, source, maps, prefixes, config, folder, seed=run.profile.seed,
        key=parts_key(run, confirmation["manifest_hash"]), progress=progress,
        target_folder=place_of(run, "target"), map_files=files,
    )  # fmt: skip
    for name, table in vars(measured).items():
        write_table(folder / f"{name}.parquet", table)
    rows, here = summarise(measured.raw, measured.memory), environment()
    dtype = next(target.parameters()).dtype
    return run.publish(
        "latency",
        {
            "rows": rows,
            "crossover": crossovers(rows),
            "modes": mode_rows(measured.raw, measured.memory),
            "left_out": other_ways(config, maps)[1],
            "floor": floor_rows(
                config.prefix_tokens, step_bytes(target), Geometry.of(target), dtype, bandwidth
            ),
            "breakdown": measured.breakdown.to_dict("records"),
            "pipeline": measured.pipeline.to_dict("records"),
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


def parts_key(run: Run, manifest_hash: str) -> str:
    """Stands for everything that the times depend on."""
    return hash_json([run.key("latency"), manifest_hash])
