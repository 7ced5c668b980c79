"""Every figure of the latency stage's summary, from its tables of times and of memory alone."""

import math
from collections.abc import Sequence

import pandas as pd
import torch

from kvlib.clocks import percentiles
from kvlib.floor import cache_bytes, floor_ms
from kvlib.geometry import Geometry
from kvlib.modes import MARK, WAYS, split_name

ORDER = ("native", "direct", "direct_stock", "ridge", "learned")


def summarise(raw: pd.DataFrame, memory: pd.DataFrame, compile_seconds: float | None = None) -> list[dict]:
    """The "rows" of latency/summary.json, by length, resident before cold, then path; of the paths alone.

    native has `resident` rows only: it reads no source cache, so the same times stand against cold. `cold`
    rows have no peak: that is measured above the state in which the source's cache is resident. compile_seconds: what
    compiling took before the clocks; it stands in the rows of a path that is handed over by a compiled pass.
    """
    peaks, rows = _peaks(memory), []
    paths = raw[~raw["path"].str.contains(MARK)]
    for (tokens, path, residency), group in paths.groupby(["prefix_tokens", "path", "residency"], sort=False):
        p50_ms, p95_ms = percentiles(group["ms"])
        peak = peaks.get((tokens, path)) if residency == "resident" else None
        rows.append(
            {
                "prefix_tokens": int(tokens),
                "path": path,
                "residency": residency,
                "p50_ms": p50_ms,
                "p95_ms": p95_ms,
                "handoff_p50_ms": percentiles(group["handoff_ms"])[0] if residency == "cold" else None,
                "repetitions": len(group),
                "peak_extra_bytes": None if pd.isna(peak) else int(peak),
                "mode": group["mode"].iloc[0],
                "compiled": bool(group["compiled"].iloc[0]),
                "compile_seconds": compile_seconds if group["compiled"].iloc[0] else None,
            }
        )
    return sorted(rows, key=lambda r: (r["prefix_tokens"], r["residency"] == "cold", ORDER.index(r["path"])))


def _peaks(memory: pd.DataFrame) -> dict[tuple[int, str], float | None]:
    return {(m["prefix_tokens"], m["path"]): m["peak_extra_bytes"] for m in memory.to_dict("records")}


def mode_rows(raw: pd.DataFrame, memory: pd.DataFrame, compile_seconds: float | None = None) -> list[dict]:
    """The "modes" of latency/summary.json: the learned map's other ways, by length, in the order they are asked for.

    compile_seconds: what the compiled way took to compile; it stands in its rows.
    """
    peaks, rows = _peaks(memory), []
    modes = raw[raw["path"].str.contains(MARK)]
    for (tokens, path), group in modes.groupby(["prefix_tokens", "path"], sort=False):
        (name, way), (p50_ms, p95_ms) = split_name(path), percentiles(group["ms"])
        peak = peaks.get((tokens, path))
        rows.append(
            {
                "prefix_tokens": int(tokens),
                "path": name,
                "mode": group["mode"].iloc[0],
                "compiled": way == "compiled",
                "compile_seconds": compile_seconds if way == "compiled" else None,
                "p50_ms": p50_ms,
                "p95_ms": p95_ms,
                "repetitions": len(group),
                "peak_extra_bytes": None if pd.isna(peak) else int(peak),
            }
        )
    return sorted(rows, key=lambda r: (r["prefix_tokens"], r["path"], r["compiled"], WAYS.index(r["mode"])))


def floor_rows(
    prefix_tokens: Sequence[int],
    weight_bytes: int,
    geometry: Geometry,
    dtype: torch.dtype,
    bandwidth_gb_s: float,
) -> list[dict]:
    """The "floor" of latency/summary.json: what one step must read, and how long that takes at this bandwidth."""
    rows = []
    for tokens in prefix_tokens:
        held = cache_bytes(geometry, tokens, dtype)
        rows.append(
            {
                "prefix_tokens": tokens,
                "weight_bytes": weight_bytes,
                "cache_bytes": held,
                "floor_ms": floor_ms(weight_bytes + held, bandwidth_gb_s),
            }
        )
    return rows


def crossovers(rows: list[dict]) -> dict:
    """The "crossover" of latency/summary.json: for each residency measured, tokens or None by path.

    "below" beside them is true when learned is faster than native at every length, the shortest included.
    """
    native = {row["prefix_tokens"]: row["p50_ms"] for row in rows if row["path"] == "native"}
    found = {}
    for residency in dict.fromkeys(row["residency"] for row in rows):
        times: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["residency"] == residency and row["path"] != "native":
                times.setdefault(row["path"], {})[row["prefix_tokens"]] = row["p50_ms"]
        crossed = {}
        for name, by_length in times.items():
            lengths = sorted(by_length)
            crossed[name] = crossover(lengths, [native[n] for n in lengths], [by_length[n] for n in lengths])
        found[residency] = {name: tokens for name, (tokens, _) in crossed.items()}
        found[residency]["below"] = "learned" in crossed and crossed["learned"][1]
    return found


def crossover(
    prefix_tokens: Sequence[int], native_ms: Sequence[float], path_ms: Sequence[float]
) -> tuple[float | None, bool]:
    """Where a path's p50 falls below native's for good; straight lines in log-log between the lengths.

    Returns: (tokens, below). tokens is None when the crossover lies below the shortest length measured (below
    is true) and when the path is slower at the longest.
    """
    gaps = [math.log(path) - math.log(native) for native, path in zip(native_ms, path_ms, strict=True)]
    slower = [i for i, gap in enumerate(gaps) if gap >= 0]
    if not slower:
        return None, True
    i = slower[-1]
    if i == len(gaps) - 1:
        return None, False
    left, right = math.log(prefix_tokens[i]), math.log(prefix_tokens[i + 1])
    return math.exp(left + (right - left) * gaps[i] / (gaps[i] - gaps[i + 1])), False
