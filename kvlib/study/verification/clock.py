"""Checks of the latency stage: tables from their parts, rows and crossovers from the tables."""

import pandas as pd

from kvlib.study.latency import parts_key
from kvlib.study.timing import ORDER, crossovers, part_file, summarise
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records

STAGE = "latency"
MEASURED = ("gates", "device", "threads", "memory_bandwidth_gb_s")


def check_latency(records: Records, check: Check) -> None:
    """`latency/summary.json`, raw.parquet and memory.parquet."""
    run, config = records.run, records.run.profile.latency
    frozen = records.json("confirmation", "manifest.json")["hash"]
    raw, memory = (records.table(STAGE, f"{name}.parquet") for name in ("raw", "memory"))
    key = parts_key(run, frozen)

    def part(name: str) -> pd.DataFrame:
        path = part_file(run.stage(STAGE), key, name)
        return records.table(STAGE, str(path.relative_to(run.stage(STAGE))))

    with check.reading("latency/raw.parquet"):
        parts = [part(f"{tokens:05d}") for tokens in config.prefix_tokens]
        check.table("latency/raw.parquet", raw, pd.concat(parts, ignore_index=True))
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
            where = f"latency/raw.parquet, repetitions of {path}, {residency}, over {tokens} tokens"
            check.same(where, int(count), wanted[config.prefix_tokens.index(tokens)])
        check.same("latency/raw.parquet, paths", sorted({*raw["path"]}), sorted(ORDER))
    if config.memory:
        with check.reading("latency/memory.parquet"):
            kept = part("memory").sort_values(["prefix_tokens", "path"], ignore_index=True)
            check.table("latency/memory.parquet", memory, kept)
            probed = len(config.prefix_tokens) * len(ORDER)
            check.same("latency/memory.parquet, rows", len(memory), probed)
    rows = summarise(raw, memory)
    expected = {
        "rows": rows,
        "crossover": crossovers(rows),
        "dtype": run.profile.pair.dtype,
        "warmups": dict(zip(map(str, config.prefix_tokens), config.warmups)),
        "prompts": run.profile.partitions.latency.items,
        "frozen": frozen,
    }
    records.same_summary(check, STAGE, expected, MEASURED)
