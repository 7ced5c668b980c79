"""The latency stage's measuring part: every length timed, every probe of memory taken, each once and kept."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pandas as pd
import torch

import kvlib
from kvlib.errors import KvlibError
from kvlib.latency import (
    Round,
    Sample,
    TargetPath,
    crossover,
    measure,
    percentiles,
    schedule,
    standard_paths,
)
from kvlib.maps import CacheMap
from kvlib.memory import resident_bytes, run_probes
from kvlib.study.profile import Latency
from kvlib.study.progress import Progress
from kvlib.study.records import read_table, write_table

PROBES_AT_A_TIME = 2  # memory is no timing
ORDER = ("native", "direct", "direct_stock", "ridge", "learned")
MEMORY_COLUMNS = ("prefix_tokens", "path", "peak_extra_bytes", "mode")


def latency_units(config: Latency, maps: dict[str, CacheMap], prefixes: int) -> float:
    """What `measure_latency` will count on its `Progress` in all. prefixes: how many there are."""
    paths, total = standard_paths(maps), 0.0
    for index, tokens in enumerate(config.prefix_tokens):
        total += _length_units(_rounds(config, index, paths, prefixes, seed=0), tokens)
        if config.memory:
            total += sum(_probe_units(path.name, tokens) for path in paths)
    return total


def measure_latency(
    target,
    source,
    maps: dict[str, CacheMap],
    prefixes: torch.Tensor,
    config: Latency,
    folder: Path,
    *,
    seed: int,
    key: str,
    progress: Progress,
    target_folder: str | Path,
    map_files: dict[str, Path],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Time all paths at every length and probe their memory; what an earlier call with this key did is kept.

    Args:
        maps: those of `ridge` and `learned`, by these names. prefixes: real tokens (N, the longest or more).
        folder: where each length is kept as soon as it is measured, and each probe as soon as it is taken.
        key: stands for everything that the times depend on. progress: made for `latency_units`.
        target_folder, map_files: what the process that probes memory loads.

    Returns: raw (one row per repetition: the fields of `kvlib.latency.Sample`) and memory (`MEMORY_COLUMNS`).
    """
    longest = max(config.prefix_tokens)
    if prefixes.ndim != 2 or len(prefixes) == 0 or prefixes.shape[1] < longest:
        raise KvlibError(
            f"prefixes {tuple(prefixes.shape)} given, expected (N, {longest} or more): give longer ones, or "
            "shorten latency.prefix_tokens"
        )
    paths, tables = standard_paths(maps), []
    for index, tokens in enumerate(config.prefix_tokens):
        file = part_file(folder, key, f"{tokens:05d}")
        rounds = _rounds(config, index, paths, len(prefixes), seed=f"{seed}/{tokens}")
        if file.exists():
            progress.skip(_length_units(rounds, tokens))
        else:
            samples = measure(target, source, rounds, prefixes[:, :tokens], _reporter(progress, tokens))
            columns = [field.name for field in fields(Sample)]
            write_table(file, pd.DataFrame([asdict(sample) for sample in samples], columns=columns))
        tables.append(read_table(file))
    memory_file = part_file(folder, key, "memory")
    memory = _measure_memory(target, paths, config, memory_file, progress, target_folder, map_files)
    return pd.concat(tables, ignore_index=True), memory


def part_file(folder: Path, key: str, name: str) -> Path:
    """Where a length (five digits), or the memory of all of them ("memory"), is kept as soon as it is measured."""
    return Path(folder) / "parts" / f"{name}-{key[:16]}.parquet"


def _rounds(
    config: Latency, index: int, paths: list[TargetPath], prefixes: int, seed: int | str
) -> list[Round]:
    counts = {name: getattr(config, name)[index] for name in ("warmups", "repetitions", "cold_repetitions")}
    return schedule(paths, prefixes, **counts, seed=seed)


def _reporter(progress: Progress, tokens: int) -> Callable[[str, str], None]:
    return lambda name, residency: progress.advance(
        _units(name, residency, tokens), f"{tokens} tokens, {name}"
    )


def _length_units(rounds: list[Round], tokens: int) -> float:
    clocks = [_units(path.name, residency, tokens) for one in rounds for path, residency, _ in one.clocks]
    return sum(clocks) + _units("source", "prefill", tokens) * len({one.prompt for one in rounds})


def _units(name: str, residency: str, tokens: int) -> float:
    """Weights, so that the time left can be told: about milliseconds on two cores.

    A prefill grows with the square of the length in the end; one token over a cache hardly grows at all.
    """
    prefill, one_token = tokens * (1.1 + tokens / 3800), 60 + tokens / 50
    if name == "native":
        return prefill
    return {"prefill": 0.8 * prefill, "resident": one_token, "cold": 0.8 * prefill + one_token}[residency]


def _probe_units(name: str, tokens: int) -> float:
    return 1000 + _units(name, "resident", tokens)


def _measure_memory(target, paths, config, file, progress, target_folder, map_files) -> pd.DataFrame:
    """One row per length and path, kept after every probe."""
    table = read_table(file) if file.exists() else pd.DataFrame(columns=MEMORY_COLUMNS)
    if not config.memory:
        return table
    rows = table.to_dict("records")
    found = {(row["path"], row["prefix_tokens"]) for row in rows}
    missing = []
    for tokens in reversed(config.prefix_tokens):  # the longest first: they fill two lanes best
        for path in paths:
            if (path.name, tokens) in found:
                progress.skip(_probe_units(path.name, tokens))
            else:
                missing.append((path, tokens))
    for report in _probe(target, missing, target_folder, map_files):
        rows.append(report)
        write_table(file, _memory_table(rows))
        tokens = report["prefix_tokens"]
        progress.advance(_probe_units(report["path"], tokens), f"{tokens} tokens, memory")
    return _memory_table(rows)


def _memory_table(rows: list[dict]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=MEMORY_COLUMNS)
    table = table.sort_values(["prefix_tokens", "path"], ignore_index=True)
    return table.assign(peak_extra_bytes=pd.to_numeric(table["peak_extra_bytes"]))


def _probe(target, probes, target_folder: str | Path, map_files: dict[str, Path]) -> Iterator[dict]:
    """Reports of `kvlib.memory`: from this process where the device keeps count, else from a new one."""
    weight = next(target.parameters())
    if not probes:
        return
    if weight.device.type != "cpu":
        yield from run_probes(target, probes, threads=torch.get_num_threads())
    elif resident_bytes() is None:
        unknown = dict.fromkeys(MEMORY_COLUMNS)
        yield from (unknown | {"path": path.name, "prefix_tokens": tokens} for path, tokens in probes)
    else:
        place = Path(target_folder)  # or a hub id, which is no path
        command = [
            sys.executable,
            "-m",
            "kvlib.memory",
            str(place.resolve() if place.exists() else target_folder),
        ]
        command += [f"{path.name}:{tokens}" for path, tokens in probes]
        for name, map_file in map_files.items():
            command += ["--map", f"{name}={Path(map_file).resolve()}"]
        command += ["--dtype", str(weight.dtype).removeprefix("torch.")]
        # The cores are shared out: probes that spin for one another's core take many times as long.
        threads = max(1, torch.get_num_threads() // PROBES_AT_A_TIME)
        command += ["--threads", str(threads), "--jobs", str(PROBES_AT_A_TIME)]
        yield from _lines(command)


def _lines(command: list[str]) -> Iterator[dict]:
    """JSON lines of a command as it writes them."""
    with tempfile.TemporaryFile("w+") as errors:
        place = Path(kvlib.__file__).resolve().parents[1]  # where `-m kvlib.memory` finds this very package
        process = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout:
                yield json.loads(line)
        except BaseException:  # this process was told to stop, or its caller wants no more
            process.send_signal(signal.SIGINT)  # and not a kill: it ends its own probes
            process.wait()
            raise
        finally:
            process.stdout.close()
        if process.wait() != 0:
            errors.seek(0)
            said = (errors.read().strip().splitlines() or [f"status {process.returncode}"])[-1]
            raise KvlibError(
                f"measuring memory failed ({said}), expected a figure per path and length: run it again, or "
                "set latency.memory to false"
            )


def summarise(raw: pd.DataFrame, memory: pd.DataFrame) -> list[dict]:
    """The "rows" of latency/summary.json, by length, resident before cold, then path.

    native has `resident` rows only: it reads no source cache, so the same times stand against cold. `cold`
    rows have no peak: that is measured above the state in which the source's cache is resident.
    """
    peaks = {(m["prefix_tokens"], m["path"]): m["peak_extra_bytes"] for m in memory.to_dict("records")}
    rows = []
    for (tokens, path, residency), group in raw.groupby(["prefix_tokens", "path", "residency"], sort=False):
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
            }
        )
    return sorted(rows, key=lambda r: (r["prefix_tokens"], r["residency"] == "cold", ORDER.index(r["path"])))


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
