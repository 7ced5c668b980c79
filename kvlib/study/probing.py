"""The latency stage's memory: what each path holds at its peak above the models and the source's cache, in processes of its own."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

import kvlib
from kvlib.errors import KvlibError
from kvlib.latency import TargetPath
from kvlib.memory import resident_bytes, run_probes
from kvlib.study.latency_weights import probe_units
from kvlib.study.profile import Latency
from kvlib.study.progress import Progress
from kvlib.study.records import read_table, write_table

PROBES_AT_A_TIME = 2  # memory is no timing
MEMORY_COLUMNS = ("prefix_tokens", "path", "peak_extra_bytes", "mode")


def measure_memory(
    target,
    paths: list[TargetPath],
    config: Latency,
    file: Path,
    progress: Progress,
    target_folder: str | Path,
    map_files: dict[str, Path],
) -> pd.DataFrame:
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
                progress.skip(probe_units(path.name, tokens))
            else:
                missing.append((path, tokens))
    for report in _probe(target, missing, target_folder, map_files):
        rows.append(report)
        write_table(file, _memory_table(rows))
        tokens = report["prefix_tokens"]
        progress.advance(probe_units(report["path"], tokens), f"{tokens} tokens, memory")
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
