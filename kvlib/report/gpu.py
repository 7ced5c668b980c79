"""Results of the GPU benchmark in the latency chapter: random weights in true shapes, and labelled so."""

from pathlib import Path

import pandas as pd

from kvlib.report.wording import duration, gigabytes_per_second
from kvlib.study.run import home

COMMAND = "python benchmarks/gpu.py"
HEADINGS = {
    "prefix_tokens": "prefix (tokens)",
    "path": "path",
    "kind": "map",
    "mode": "mode",
    "compiled": "compiled",
    "residency": "source cache",
    "p50_ms": "p50 (ms)",
    "p95_ms": "p95 (ms)",
    "handoff_p50_ms": "handoff part (ms)",
    "compile_seconds": "compile time (s)",
    "floor_ms": "floor (ms)",
    "repetitions": "repetitions",
}
CAPTIONS = {
    "rows": "Time to first token by path, mode and prefix length.",
    "compiled": "Compiled steps, with what the first call took.",
    "ratios": "Ratios within that run.",
    "memory": "Peak extra memory by the allocator's count.",
    "left_out": "What was not measured, and why.",
    "correctness": "Absorbed against materialised: how far apart their logits are.",
    "floor": "What one step must read, and how long that takes at the bandwidth measured in the same run.",
}


def read_results(path: str | None) -> dict | None:
    """What `benchmarks/gpu.py` wrote, from a path that is taken from the project's folder; None where none is given.

    Raises: KvlibError for a file that is missing or no such record.
    """
    if path is None:
        return None
    from kvlib.study.gpu_results import read_gpu

    return read_gpu(home() / Path(path).expanduser())


def gpu_facts(found: dict | None) -> dict[str, str]:
    if found is None:
        return {
            "gpu": f"No such results were given to this book. The command “{COMMAND}” makes them, as a JSON file, on a CUDA machine "
            "without a network, and this notebook's parameter “gpu_results” is that file's path."
        }
    machine = found["machine"]
    bandwidth = machine.get("memory_bandwidth_gb_s")
    return {
        "gpu": f"{found['label'][:1].upper()}{found['label'][1:]}: what follows was measured on {machine['name']}, with models "
        "whose weights are drawn at random: times and memory mean something there, fidelity does not. "
        + (f"The memory there moves {gigabytes_per_second(bandwidth)}. " if bandwidth else "")
        + f"All of it took {duration(found['seconds'])}."
    }


def gpu_tables(found: dict | None) -> dict[str, pd.DataFrame]:
    """Caption -> table, for all that the results hold; the label stands in every caption. Empty where none were given."""
    if found is None:
        return {}
    tables = {}
    for key, caption in CAPTIONS.items():
        rows = found.get(key) or []
        if rows:
            tables[f"{caption} ({found['label']})"] = _table(rows if isinstance(rows, list) else [rows])
    return tables


def _table(rows: list[dict]) -> pd.DataFrame:
    """Rows as they were written, with headings for readers; bytes in MiB; values that are lists or keys in words."""
    rows = [row if isinstance(row, dict) else {"what": row} for row in rows]
    cells = [{_heading(key): _cell(key, value) for key, value in row.items()} for row in rows]
    return pd.DataFrame(cells).astype(object).pipe(lambda t: t.where(t.notna(), None))


def _heading(key: str) -> str:
    if key.endswith("_bytes"):
        return f"{key.removesuffix('_bytes').replace('_', ' ')} (MiB)"
    return HEADINGS.get(key, key.replace("_", " "))


def _cell(key: str, value):
    if key.endswith("_bytes") and value is not None:
        return value / 2**20
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {each}" for name, each in value.items())
    return str(value) if isinstance(value, list) else value
