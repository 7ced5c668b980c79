"""How far a stage is: written by the process that works, read by the one that shows it."""

import contextlib
import json
import os
import time
from pathlib import Path

VARIABLE = "KVLIB_PROGRESS"  # names the file; without it nothing is written
INTERVAL_S = 0.5


class Progress:
    """Counts units of one stage. Units are worth about the same time each, so that the rest can be told from the rate.

    Args:
        stage: what is being done. total: units in all. done: units that an earlier run left finished.
        path: the file to write instead of the one that the environment names.
    """

    def __init__(self, stage: str, total: float, done: float = 0, path: str | Path | None = None):
        self.stage, self.total, self.done = stage, max(total, 1e-9), done
        self.initial, self.started, self.written, self.note = done, time.time(), 0.0, ""
        self.path = path or os.environ.get(VARIABLE)
        self._write(force=True)

    def advance(self, units: float = 1, note: str | None = None) -> None:
        self.done += units
        self.say(note)

    def say(self, note: str | None) -> None:
        if note is not None:
            self.note = note
        self._write(force=self.done >= self.total)

    def skip(self, units: float = 1) -> None:
        """Count units that were found finished: they say nothing about the rate."""
        self.done += units
        self.initial += units
        self._write()

    def show(self, done: float, initial: float, note: str) -> None:
        """The counts as others have them, who do the work and count themselves; `initial` as `skip` adds to it."""
        self.done, self.initial = done, initial
        self.say(note)

    def _write(self, force: bool = False) -> None:
        now = time.time()
        if self.path is None or (not force and now - self.written < INTERVAL_S):
            return
        self.written = now
        state = {
            "stage": self.stage, "total": self.total, "done": self.done, "initial": self.initial,
            "started": self.started, "updated": now, "note": self.note,
        }  # fmt: skip
        path = Path(self.path)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # showing progress is no reason to end the work
            temporary.write_text(json.dumps(state))
            os.replace(temporary, path)


def read_progress(path: Path) -> dict | None:
    """The last state, or None before the first."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def seconds_left(state: dict) -> float | None:
    """From the rate since this process began; None before the first finished unit."""
    fresh = state["done"] - state["initial"]
    if fresh <= 0:
        return None
    return (state["total"] - state["done"]) * (state["updated"] - state["started"]) / fresh
