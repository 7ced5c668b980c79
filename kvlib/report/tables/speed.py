"""Tables of the latency chapter: the frontier, other ways of one map, the floor, a step's parts, what was to be reached."""

import pandas as pd

from kvlib.report.palette import PATHS, path_label
from kvlib.report.speed import Target, cold_ratios, floor_of, mode_of, ratio_at, row_of, share, way_of
from kvlib.report.summaries import headline, prefix_lengths

MIB = 2**20


def _table(rows: list[dict], columns: list[str] | None = None) -> pd.DataFrame:
    """Absent values as None, so that cells show a dash and whole numbers stay whole."""
    return pd.DataFrame(rows, columns=columns).astype(object).pipe(lambda t: t.where(t.notna(), None))


def cold(raw: pd.DataFrame) -> pd.DataFrame:
    """Every cold repetition, and native's own, over native's median at its length."""
    found = cold_ratios(raw)
    names = {
        "path": "path",
        "prefix_tokens": "prefix (tokens)",
        "repetition": "repetition",
        "ms": "time (ms)",
        "ratio": "÷ native's median",
        "native_of": "native's repetitions",
    }
    return found.assign(path=found.path.map(path_label))[list(names)].rename(columns=names)


def _peak(row: dict | None) -> float | None:
    return None if row is None or row["peak_extra_bytes"] is None else row["peak_extra_bytes"] / MIB


def moved_frontier(final: dict, latency: dict) -> pd.DataFrame:
    """The chart in numbers: per length and point, fidelity, time and memory, and both against direct reuse."""
    quality, rows = headline(final)["paths"], []
    for tokens in prefix_lengths(latency):
        direct = row_of(latency, tokens, "direct")
        points = [(p, path_label(p), row_of(latency, tokens, p)) for p in PATHS if p in quality]
        points.append(("learned", "learned, written out", mode_of(latency, tokens, "materialised")))
        for path, label, row in points:
            if row is not None:
                rows.append(
                    {
                        "prefix (tokens)": tokens,
                        "path": label,
                        "mode": way_of(row),
                        "KL32 (nats)": quality[path]["kl32"]["mean"],
                        "TTFT (ms, p50)": row["p50_ms"],
                        "÷ direct": share(row, direct),
                        "peak extra memory (MiB)": _peak(row),
                    }
                )
    return _table(rows)


def modes(latency: dict) -> pd.DataFrame:
    """Every way in which the learned map was applied, its own choice first, against direct reuse at the same length."""
    rows = []
    compile_known = any(
        row.get("compile_seconds") is not None for row in [*latency["modes"], *latency["rows"]]
    )
    for tokens in prefix_lengths(latency):
        chosen, direct = row_of(latency, tokens, "learned"), row_of(latency, tokens, "direct")
        ways = [("as handed over", chosen)] if chosen else []
        ways += [("asked for", row) for row in latency["modes"] if row["prefix_tokens"] == tokens]
        for why, row in ways:
            rows.append(
                {
                    "prefix (tokens)": tokens,
                    "mode": way_of(row),
                    "chosen": why,
                    "p50 (ms)": row["p50_ms"],
                    "p95 (ms)": row["p95_ms"],
                    "÷ direct": share(row, direct),
                    "peak extra memory (MiB)": _peak(row),
                    "repetitions": row["repetitions"],
                }
                | (
                    {"compiled, or found compiled, in (s)": row.get("compile_seconds")}
                    if compile_known
                    else {}
                )
            )
    return _table(rows)


def left_out(latency: dict) -> pd.DataFrame:
    rows = [[path_label(r["path"]), r["mode"].replace("_", " "), r["reason"]] for r in latency["left_out"]]
    return pd.DataFrame(rows, columns=["path", "mode that was left out", "why"])


def floor(latency: dict) -> pd.DataFrame:
    """What one step must read and how long that takes, and how far above it the paths are."""
    rows = []
    for tokens in prefix_lengths(latency):
        found, direct = floor_of(latency, tokens), row_of(latency, tokens, "direct")
        learned = row_of(latency, tokens, "learned")
        rows.append(
            {
                "prefix (tokens)": tokens,
                "weights (MiB)": found["weight_bytes"] / MIB,
                "cache (MiB)": found["cache_bytes"] / MIB,
                "floor (ms)": found["floor_ms"],
                "direct (ms, p50)": direct["p50_ms"],
                "direct ÷ floor": ratio_at(latency, "direct_floor", tokens),
                "learned ÷ floor": learned["p50_ms"] / found["floor_ms"] if learned else None,
            }
        )
    return _table(rows)


def step_parts(latency: dict) -> pd.DataFrame:
    """One row per part, one column per path and length; the last row is the profiled step as a whole."""
    wide: dict[str, dict[str, float]] = {}
    for row in latency["breakdown"]:
        column = f"{row['path']}, {row['prefix_tokens']:,} tokens (ms)"
        wide.setdefault(column, {})[row["part"]] = row["ms"]
    table = pd.DataFrame(wide)
    table.loc["the profiled step"] = table.sum()
    return table.rename_axis("part").reset_index()


def pipeline(latency: dict) -> pd.DataFrame:
    rows = [
        {
            "prefix (tokens)": r["prefix_tokens"],
            "path": path_label(r["path"]),
            "source's prefill alone (ms)": r["source_prefill_p50_ms"],
            "one after the other (ms)": r["serial_p50_ms"],
            "in a pipeline (ms)": r["pipelined_p50_ms"],
            "saved (%)": 100 * (1 - r["pipelined_p50_ms"] / r["serial_p50_ms"]),
            "after the source's prefill (ms)": r["serial_handoff_p50_ms"],
            "cache resident (ms)": r["resident_p50_ms"],
            "repetitions": r["repetitions"],
        }
        for r in latency["pipeline"]
    ]
    columns = ["prefix (tokens)", "path", "one after the other (ms)", "in a pipeline (ms)"]
    return _table(rows) if rows else pd.DataFrame(columns=columns)


def targets(found: list[Target]) -> pd.DataFrame:
    """What was to be reached: this run's ratio, its limits, whether it is met, and the record that it comes from."""
    rows = []
    for one in found:
        sign = {"lower": "≤", "higher": "≥"}[one.better]
        rows.append(
            {
                "what": one.what,
                "this run": one.value,
                "at (tokens)": one.tokens,
                "must hold": f"{sign} {one.at_least:g}",
                "aim": None if one.aim is None else f"{sign} {one.aim:g}",
                "result": one.result,
                "record": one.record,
            }
        )
    return _table(rows)
