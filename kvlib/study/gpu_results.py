"""What `benchmarks/gpu.py` wrote, read back and checked, so that a page shows no other file by mistake."""

import math
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.records import parse_json

LABELS = ("true shapes, random weights", "tiny shapes, random weights")
ROW = {
    "prefix_tokens": int, "path": str, "residency": str, "p50_ms": float, "p95_ms": float | None,
    "handoff_p50_ms": float | None, "repetitions": int, "peak_extra_bytes": int | None, "mode": str,
    "compiled": bool, "kind": str | None,
}  # fmt: skip
TABLES = {
    "rows": ROW,
    "compiled": {**ROW, "first_call_ms": float},
    "memory": {"prefix_tokens": int, "path": str, "mode": str, "compiled": bool, "peak_extra_bytes": int | None},
    "correctness": {
        "prefix_tokens": int, "path": str, "kind": str, "mode": str, "logit_scale": float, "map_effect": float,
        "noise": float, "max_difference": float, "relative_difference": float, "argmax_agreement": float,
        "error": float | None, "materialised_error": float | None,
    },
    "floor": {"prefix_tokens": int, "weight_bytes": int, "cache_bytes": int, "floor_ms": float},
    "ratios": {"prefix_tokens": int},
}  # fmt: skip


def read_gpu(path: Path) -> dict:
    """The results of `benchmarks/gpu.py`, as gpu.py's first lines describe them.

    Raises: KvlibError for a file that is missing, cut, or of something else, saying what is wrong with it.
    """
    try:
        record = parse_json(path)
    except KvlibError as error:
        reason = "is missing" if not Path(path).exists() else "is no readable JSON"
        raise _refusal(path, reason) from error
    if not isinstance(record, dict) or record.get("benchmark") != "gpu":
        raise _refusal(path, "is not of the benchmark gpu")
    if record.get("label") not in LABELS:
        raise _refusal(path, f"is labelled {record.get('label')!r}")
    for name, kind in (("machine", dict), ("pair", dict), ("left_out", list)):
        if not isinstance(record.get(name), kind):
            raise _refusal(path, f"has no {name!r}")
    bandwidth = record["machine"].get("memory_bandwidth_gb_s")
    if not isinstance(record["machine"].get("name"), str) or not _is(bandwidth, float):
        raise _refusal(path, "does not say on which machine it was measured")
    if not all(isinstance(record["pair"].get(model), dict) for model in ("target", "source")):
        raise _refusal(path, "does not say in which shapes it was measured")
    if not _is(record.get("seconds"), float):
        raise _refusal(path, "has no 'seconds'")
    for table, columns in TABLES.items():
        _check_rows(path, table, record.get(table), columns)
    return record


def _check_rows(path, table: str, rows, columns: dict) -> None:
    if not isinstance(rows, list):
        raise _refusal(path, f"has no {table!r}")
    for number, row in enumerate(rows):
        for column, kind in columns.items():
            if not isinstance(row, dict) or column not in row or not _is(row[column], kind):
                raise _refusal(path, f"lacks a usable {column!r} in row {number} of {table!r}")


def _is(value, kind) -> bool:
    """JSON writes a whole float as it likes, and bool is an int to Python; NaN is no figure."""
    if kind in (float, float | None) and isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(value)
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)


def _refusal(path, what: str) -> KvlibError:
    return KvlibError(
        f"{path} {what}, expected a file that benchmarks/gpu.py wrote: run `python benchmarks/gpu.py --out {path}` on the GPU machine"
    )
