"""One check: how many numbers and hashes it compared, and a sentence for each that does not match."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvlib.errors import KvlibError
from kvlib.study.records import sha256_file

SHOWN_CHARACTERS = 80


@dataclass
class Check:
    """`name` says what is checked; `checked` counts single values, so that a table counts as its cells.

    Numbers are compared exactly: the same function on the same records gives the same number, and no tolerance is
    needed or given.
    """

    name: str
    checked: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        if self.mismatches:
            count = len(self.mismatches)
            return f"{count} {'does' if count == 1 else 'do'} not match"
        return "matches" if self.checked else "not run yet"

    def fail(self, sentence: str) -> None:
        self.checked += 1
        self.mismatches.append(sentence)

    def holds(self, condition: bool, sentence: str) -> None:
        """Count one comparison; `sentence` says what is wrong where it does not hold."""
        if condition:
            self.checked += 1
        else:
            self.fail(sentence)

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """A part of a check: what cannot be read or computed is a mismatch, and the other parts go on."""
        try:
            yield
        except KvlibError as error:
            self.fail(f"{what}: {error}")
        except Exception as error:  # whatever a damaged record makes a library raise
            said = " ".join(f"{type(error).__name__}: {error}".split())
            self.fail(f"{what}: found a record of another form than kvlib writes ({said})")

    def same(self, where: str, found, expected) -> None:
        """Compare two values of JSON types, leaf by leaf. where: the file, and the key in it."""
        if isinstance(found, dict) and isinstance(expected, dict):
            for key in sorted({*found, *expected}, key=str):
                place = f"{where}.{key}" if ", " in where else f"{where}, {key}"
                if key not in found:
                    self.fail(f"{place}: found nothing, expected {_shown(expected[key])}")
                elif key not in expected:
                    self.fail(f"{place}: found {_shown(found[key])}, expected no such key")
                else:
                    self.same(place, found[key], expected[key])
        elif isinstance(found, list) and isinstance(expected, (list, tuple)) and len(found) == len(expected):
            for index, (ours, theirs) in enumerate(zip(found, expected)):
                self.same(f"{where}[{index}]", ours, theirs)
        else:
            alike = isinstance(found, bool) == isinstance(expected, bool) and found == expected
            self.holds(alike, f"{where}: found {_shown(found)}, expected {_shown(expected)}")

    def hash(self, where: str, path: Path, expected) -> None:
        """Compare a file's SHA-256 with a recorded one."""
        if Path(path).is_file():
            self.same(where, sha256_file(path), expected)
        else:
            self.fail(f"{where}: found no file, expected one with SHA-256 {_shown(expected)}")

    def table(self, where: str, found: pd.DataFrame, expected: pd.DataFrame) -> None:
        """Compare two tables cell by cell; every column that differs is one mismatch, with its first row."""
        if list(found.columns) != list(expected.columns) or len(found) != len(expected):
            self.fail(f"{where}: found {_size(found)}, expected {_size(expected)}")
            return
        for column in found.columns:
            ours, theirs = (table[column].reset_index(drop=True) for table in (found, expected))
            differ = (ours.astype(object) != theirs.astype(object)) & ~(ours.isna() & theirs.isna())
            self.checked += len(ours)
            if differ.any():
                row = int(differ.idxmax())
                self.mismatches.append(
                    f"{where}, column {column}: found {_shown(ours[row])} in row {row}, expected {_shown(theirs[row])}; "
                    f"{int(differ.sum())} of {len(ours)} rows differ"
                )


def _shown(value) -> str:
    """A value as in JSON, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except ValueError:
        text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def _size(table: pd.DataFrame) -> str:
    return f"{len(table)} rows of {', '.join(map(str, table.columns))}"
