"""What the latency chapter's charts, tables and sentences look up: ratios within one run, and the figures to be reached."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvlib.report.palette import PATHS
from kvlib.report.summaries import prefix_lengths, read_shipped

TARGETS = Path(__file__).resolve().parents[2] / "data" / "targets.yaml"
EVERY = "every"


def row_of(latency: dict, tokens: int, path: str, residency: str = "resident") -> dict | None:
    wanted = (tokens, path, residency)
    rows = latency["rows"]
    return next((r for r in rows if (r["prefix_tokens"], r["path"], r["residency"]) == wanted), None)


def mode_of(latency: dict, tokens: int, mode: str, compiled: bool = False) -> dict | None:
    """The learned map applied in this way: among the modes, or as the learned path itself where that is how it runs."""
    for row in latency["modes"]:
        if (row["prefix_tokens"], row["mode"], row["compiled"]) == (tokens, mode, compiled):
            return row
    learned = row_of(latency, tokens, "learned")
    return learned if learned and (learned["mode"], learned["compiled"]) == (mode, compiled) else None


def in_place_of(latency: dict, tokens: int) -> dict | None:
    """The learned map in place as a handoff does it: by the compiled pass where the run has one, else by the plain one."""
    return mode_of(latency, tokens, "in_place", True) or mode_of(latency, tokens, "in_place")


def way_of(row: dict) -> str:
    """How a row's map is applied, in words: "in place, compiled"."""
    return row["mode"].replace("_", " ") + (", compiled" if row["compiled"] else "")


def floor_of(latency: dict, tokens: int) -> dict | None:
    return next((row for row in latency["floor"] if row["prefix_tokens"] == tokens), None)


def share(part: dict | None, whole: dict | None, key: str = "p50_ms") -> float | None:
    """part ÷ whole of one key; None where either was not measured."""
    if part is None or whole is None or part[key] is None or not whole[key]:
        return None
    return part[key] / whole[key]


def _learned(latency: dict, tokens: int) -> dict | None:
    return row_of(latency, tokens, "learned")


def _direct_floor(latency: dict, tokens: int) -> float | None:
    direct, floor = row_of(latency, tokens, "direct"), floor_of(latency, tokens)
    return direct["p50_ms"] / floor["floor_ms"] if direct and floor else None


def _cold_resident(latency: dict, tokens: int) -> float | None:
    cold, resident = row_of(latency, tokens, "learned", "cold"), _learned(latency, tokens)
    return cold["handoff_p50_ms"] / resident["p50_ms"] if cold and resident else None


PEAK = "peak_extra_bytes"
RATIOS: dict[str, Callable[[dict, int], float | None]] = {
    "learned_direct": lambda run, t: share(_learned(run, t), row_of(run, t, "direct")),
    "learned_stock": lambda run, t: share(_learned(run, t), row_of(run, t, "direct_stock")),
    "native_learned": lambda run, t: share(row_of(run, t, "native"), _learned(run, t)),
    "written_direct": lambda run, t: share(mode_of(run, t, "materialised"), row_of(run, t, "direct")),
    "in_place_direct": lambda run, t: share(in_place_of(run, t), row_of(run, t, "direct")),
    "learned_direct_peak": lambda run, t: share(_learned(run, t), row_of(run, t, "direct"), PEAK),
    "learned_native_peak": lambda run, t: share(_learned(run, t), row_of(run, t, "native"), PEAK),
    "direct_floor": _direct_floor,
    "cold_resident": _cold_resident,
}


def ratio_at(latency: dict, name: str, tokens: int) -> float | None:
    """One of `RATIOS` at one length; None where it was not measured."""
    return RATIOS[name](latency, tokens)


@dataclass(frozen=True)
class Target:
    """A figure to be reached. value, tokens: this run's and its length, None where it was not measured."""

    id: str
    what: str
    better: str
    at_least: float
    aim: float | None
    record: str
    value: float | None
    tokens: int | None

    def _within(self, limit: float) -> bool:
        return self.value <= limit if self.better == "lower" else self.value >= limit

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self._within(self.at_least)

    @property
    def aimed(self) -> bool | None:
        return None if self.value is None or self.aim is None else self._within(self.aim)

    @property
    def result(self) -> str:
        if self.value is None:
            return "not measured at this length"
        if self.aimed:
            return "met, the aim too"
        return "met" if self.met else "not met"


def read_targets(path: Path = TARGETS) -> list[dict]:
    return read_shipped(path, "the figures to be reached")


def targets(latency: dict, wanted: list[dict]) -> list[Target]:
    """Each figure with this run's value; of every length, the one furthest from the limit."""
    found = []
    for entry in wanted:
        lengths = (
            prefix_lengths(latency) if entry["prefix_tokens"] == EVERY else [int(entry["prefix_tokens"])]
        )
        values = {t: RATIOS[entry["id"]](latency, t) for t in lengths}
        known = {t: value for t, value in values.items() if value is not None}
        worst = max if entry["better"] == "lower" else min
        tokens = worst(known, key=known.get) if known else None
        limits = (entry["better"], float(entry["at_least"]), entry.get("aim"))
        found.append(Target(entry["id"], entry["what"], *limits, entry["record"], known.get(tokens), tokens))
    return found


def parts_of(latency: dict, tokens: int, path: str) -> dict[str, float]:
    """part -> ms of one breakdown; empty where none was made."""
    rows = [r for r in latency["breakdown"] if (r["prefix_tokens"], r["path"]) == (tokens, path)]
    return {row["part"]: row["ms"] for row in rows}


def cold_ratios(raw: pd.DataFrame) -> pd.DataFrame:
    """The table behind `cold_ratio`: native's repetitions and each cold one, by path and length, as shares of native's median."""
    native = raw[raw.path == "native"].groupby("prefix_tokens").ms.agg(median="median", native_of="count")
    cold = raw[(raw.residency == "cold") | (raw.path == "native")]
    cold = cold[cold.path.isin(PATHS)].join(native, on="prefix_tokens", how="inner")
    cold = cold.assign(ratio=cold.ms / cold["median"], repetition=cold.repetition + 1)
    cold["of"] = cold.groupby(["path", "prefix_tokens"]).ms.transform("count")
    order = {path: place for place, path in enumerate(PATHS)}
    cold = cold.assign(place=cold.path.map(order)).sort_values(["place", "prefix_tokens", "repetition"])
    columns = ["path", "prefix_tokens", "repetition", "of", "ms", "ratio", "native_of"]
    return cold[columns].reset_index(drop=True)
