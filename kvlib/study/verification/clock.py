"""Checks of the latency stage: tables from their parts, every figure of the summary from the tables."""

import math

import pandas as pd
import torch
from transformers import AutoModelForCausalLM

from kvlib.breakdown import PARTS
from kvlib.cold import WAYS
from kvlib.compiled import NO_COMPILER
from kvlib.floor import step_bytes
from kvlib.geometry import Geometry
from kvlib.maps import load_map
from kvlib.modes import MARK
from kvlib.study.latency import parts_key
from kvlib.study.latency_tables import ORDER, crossovers, floor_rows, mode_rows, summarise
from kvlib.study.models import load_pair_config
from kvlib.study.pipelining import PIPELINE_COLUMNS, PIPELINED, pipeline_medians
from kvlib.study.timing import (
    BREAKDOWN_COLUMNS,
    BROKEN_DOWN,
    MODES_OF,
    broken_down,
    has_pipeline,
    native_repetitions,
    other_ways,
    part_file,
    probed,
    together,
)
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records

STAGE = "latency"
MEASURED = ("gates", "device", "threads", "memory_bandwidth_gb_s")


def check_latency(records: Records, check: Check) -> None:
    """`latency/summary.json` and its four tables."""
    run, config = records.run, records.run.profile.latency
    frozen = records.json("confirmation", "manifest.json")["hash"]
    raw, memory, parts, pipeline = (
        records.table(STAGE, f"{name}.parquet") for name in ("raw", "memory", "breakdown", "pipeline")
    )
    maps = {MODES_OF: load_map(run.stage("confirmation") / f"{MODES_OF}.safetensors", pair=records.pair)}
    # whether a compiler was there is the recording machine's, not this one's
    by_itself = bool(raw.loc[raw["path"] == MODES_OF, "compiled"].all())
    without = None if by_itself or (raw["path"] == f"{MODES_OF}{MARK}compiled").any() else NO_COMPILER
    modes, left_out = other_ways(config, maps, without, by_itself)
    summary = records.summary(STAGE)
    stated = {row["compile_seconds"] for row in [*summary["rows"], *summary["modes"]] if row["compiled"]}
    seconds = stated.pop() if stated else None
    paths = [*ORDER, *(path.name for path in modes)]
    key = parts_key(run, frozen)

    def part(name: str) -> pd.DataFrame:
        path = part_file(run.stage(STAGE), key, name)
        return records.table(STAGE, str(path.relative_to(run.stage(STAGE))))

    with check.reading("latency/raw.parquet"):
        timed = [part(f"{tokens:05d}") for tokens in config.prefix_tokens]
        check.table("latency/raw.parquet", raw, pd.concat(timed, ignore_index=True))
        times = raw["ms"]
        check.holds(
            bool((times > 0).all() and (times < float("inf")).all()),
            "latency/raw.parquet, ms: found a time that is not positive and finite",
        )
        within = raw["handoff_ms"].isna() | (raw["handoff_ms"] <= times)
        check.holds(bool(within.all()), "latency/raw.parquet, handoff_ms: found more than the whole clock")
        counts = raw.groupby(["prefix_tokens", "path", "residency"]).size()
        for (tokens, path, residency), count in counts.items():
            wanted = config.repetitions if residency == "resident" else config.cold_repetitions
            wanted = native_repetitions(config) if path == "native" else wanted
            where = f"latency/raw.parquet, repetitions of {path}, {residency}, over {tokens} tokens"
            check.same(where, int(count), wanted[config.prefix_tokens.index(tokens)])
        check.same("latency/raw.parquet, paths", sorted({*raw["path"]}), sorted(paths))
        cold = raw[raw["path"].str.contains(MARK) & (raw["residency"] != "resident")]
        check.same("latency/raw.parquet, cold repetitions of another way", len(cold), 0)
    if config.memory:
        with check.reading("latency/memory.parquet"):
            kept = part("memory").sort_values(["prefix_tokens", "path"], ignore_index=True)
            check.table("latency/memory.parquet", memory, kept)
            wanted = len(config.prefix_tokens) * (len(ORDER) + len(probed(modes)))
            check.same("latency/memory.parquet, rows", len(memory), wanted)
    with check.reading("latency/breakdown.parquet"):
        kept = [part(f"breakdown-{tokens:05d}") for tokens in broken_down(config)]
        check.table("latency/breakdown.parquet", parts, together(kept, BREAKDOWN_COLUMNS))
        asked = [[t, path, name] for t in broken_down(config) for path in BROKEN_DOWN for name in PARTS]
        check.same(
            "latency/breakdown.parquet, parts",
            parts[["prefix_tokens", "path", "part"]].to_numpy().tolist(),
            asked,
        )
        check.holds(
            bool(parts["ms"].between(0, math.inf, "left").all()),
            "latency/breakdown.parquet, ms: found a time that is negative or not finite",
        )
    with check.reading("latency/pipeline.parquet"):
        _same_pipeline(config, pipeline, part, check)
    rows = summarise(raw, memory, seconds)
    expected = {
        "rows": rows,
        "crossover": crossovers(rows),
        "modes": mode_rows(raw, memory, seconds),
        "left_out": left_out,
        "floor": _floor(records, config.prefix_tokens),
        "breakdown": parts.to_dict("records"),
        "pipeline": pipeline_medians(pipeline),
        "dtype": run.profile.pair.dtype,
        "warmups": dict(zip(map(str, config.prefix_tokens), config.warmups)),
        "prompts": run.profile.partitions.latency.items,
        "frozen": frozen,
    }
    records.same_summary(check, STAGE, expected, MEASURED)


def _same_pipeline(config, pipeline: pd.DataFrame, part, check: Check) -> None:
    lengths = [tokens for index, tokens in enumerate(config.prefix_tokens) if has_pipeline(config, index)]
    kept = [part(f"pipeline-{tokens:05d}") for tokens in lengths]
    check.table("latency/pipeline.parquet", pipeline, together(kept, PIPELINE_COLUMNS))
    asked = {
        (tokens, PIPELINED, way): config.pipeline_repetitions[config.prefix_tokens.index(tokens)]
        for tokens in lengths
        for way in WAYS
    }
    found = pipeline.groupby(["prefix_tokens", "path", "way"]).size().to_dict()
    check.same("latency/pipeline.parquet, repetitions", found, asked)


def _floor(records: Records, prefix_tokens: list[int]) -> list[dict]:
    """The floor from the target's shapes, which its configuration gives without its weights."""
    run, bandwidth = records.run, records.summary(STAGE)["memory_bandwidth_gb_s"]
    config, dtype = (
        load_pair_config(run, "target"),
        getattr(torch, run.profile.pair.dtype),
    )
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return floor_rows(prefix_tokens, step_bytes(target), Geometry.of(target), dtype, bandwidth)
