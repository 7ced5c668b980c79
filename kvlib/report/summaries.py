"""What charts, tables and sentences all look up in the summaries, in one place."""

from pathlib import Path

import yaml

from kvlib.errors import KvlibError
from kvlib.study.final_tables import main_forcing as forcing_of_the_headline


def main_forcing(final: dict) -> str:
    """The forcing that the headline rests on: the oracle's where it was run."""
    return forcing_of_the_headline(list(final["forcing"]))


def headline(final: dict) -> dict:
    """The main forcing's "paths" and "paired"."""
    return final["forcing"][main_forcing(final)]


def prefix_lengths(latency: dict) -> list[int]:
    return sorted({row["prefix_tokens"] for row in latency["rows"]})


def lengths_around(latency: dict, tokens: float) -> str:
    """The two measured lengths around a crossover: what lies between them was not measured."""
    lengths = prefix_lengths(latency)
    above = next((length for length in lengths if length > tokens), lengths[-1])
    below = max((length for length in lengths if length < above and length <= tokens), default=lengths[0])
    return f"{below:,} and {above:,}"


def median_times(latency: dict, prefix_tokens: int) -> dict[tuple[str, str], float | None]:
    """(path, residency) -> p50 in ms at one length. Native needs no source: one time stands for both."""
    rows = [row for row in latency["rows"] if row["prefix_tokens"] == prefix_tokens]
    times = {(row["path"], row["residency"]): row["p50_ms"] for row in rows}
    known = times.get(("native", "resident"), times.get(("native", "cold")))
    return times | {("native", "resident"): known, ("native", "cold"): known}


def read_shipped(path: Path, what: str):
    """A YAML file that comes with the project. Raises KvlibError where it is missing; what: in words, what it holds."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise KvlibError(f"{path} is missing, expected {what}: restore it from the repository") from error
