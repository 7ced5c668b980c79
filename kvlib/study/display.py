"""Show in the terminal how far a notebook is, from the progress file that its kernel writes."""

import sys
import threading
import time
from pathlib import Path

from kvlib.study.progress import read_progress, seconds_left

POLL_S = 0.5
LINE_EVERY_S = 30  # where output is no terminal


class Display:
    """A context manager: one bar with the time left on a terminal, elsewhere a line every half minute."""

    def __init__(self, state: Path, label: str, stream=None):
        self.state, self.label, self.stream = Path(state), label, stream or sys.stderr
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Display":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        if self.stream.isatty():
            self._bar()
        else:
            self._lines()

    def _bar(self) -> None:
        from tqdm import tqdm  # not for those who only ask how long something takes

        with tqdm(
            total=1.0, desc=self.label, file=self.stream, leave=False, dynamic_ncols=True, disable=False,
            bar_format="{desc} {percentage:3.0f}%|{bar:24}| {elapsed}{postfix}",
        ) as bar:  # fmt: skip
            while not self._end.wait(POLL_S):
                state = read_progress(self.state)
                if state:
                    bar.n = min(state["done"] / state["total"], 1.0)
                    bar.set_postfix_str(
                        ", ".join(filter(None, [time_left(state), state["note"]])), refresh=False
                    )
                bar.refresh()

    def _lines(self) -> None:
        said = time.monotonic()
        while not self._end.wait(POLL_S):
            if time.monotonic() - said < LINE_EVERY_S:
                continue
            said = time.monotonic()
            state = read_progress(self.state)
            if state:
                self.stream.write(f"{self.label}: {describe(state)}\n")
                self.stream.flush()


def describe(state: dict) -> str:
    """`31 %, about 4 min left, arm 4 of 20`."""
    share = min(
        max(state["done"] / state["total"], 0.0), 1.0
    )  # sums of parts may miss either end by rounding
    return ", ".join(filter(None, [f"{100 * share:.0f} %", time_left(state), state["note"]]))


def time_left(state: dict) -> str:
    """`about 3 min left`, or nothing before it can be told."""
    left = seconds_left(state)
    if left is None or state["done"] >= state["total"]:
        return ""
    left -= time.time() - state["updated"]  # a unit that takes longer than the others leaves nothing to say
    return f"about {duration(left)} left" if left > 0 else ""


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `1 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
