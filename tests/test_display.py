"""What the terminal is told about a running notebook."""

import io
import time

import pytest

from kvlib.study import display
from kvlib.study.display import Display, describe, duration
from kvlib.study.progress import Progress, read_progress


@pytest.fixture
def state(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    monkeypatch.setenv("KVLIB_PROGRESS", str(path))
    return path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (42, "42 s"), (89, "89 s"), (120, "2 min"), (3600, "60 min"), (5400, "1 h 30 min")],
)
def test_durations_are_in_the_unit_that_fits(seconds, words):
    assert duration(seconds) == words


def test_work_found_finished_says_nothing_about_the_time_left(state):
    progress = Progress("screening", 20, done=10)
    assert describe(read_progress(state)) == "50 %"
    progress.started -= 30
    progress.advance(5, "arm 15 of 20")
    progress._write(force=True)
    assert describe(read_progress(state)) == "75 %, about 30 s left, arm 15 of 20"


def test_elsewhere_than_on_a_terminal_there_is_a_line_now_and_then(state, monkeypatch):
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.2)
    monkeypatch.setattr(display, "POLL_S", 0.05)
    stream = io.StringIO()
    Progress("screening", 20, done=10)
    with Display(state, "[1/5] 01_screening", stream):
        time.sleep(0.7)
    lines = stream.getvalue().splitlines()
    assert 1 <= len(lines) <= 4
    assert set(lines) == {"[1/5] 01_screening: 50 %"}


def test_on_a_terminal_there_is_one_bar_that_goes_away(state, monkeypatch):
    monkeypatch.setattr(display, "POLL_S", 0.05)
    stream = Terminal()
    Progress("screening", 20, done=10)
    with Display(state, "[1/5] 01_screening", stream):
        time.sleep(0.4)
    shown = stream.getvalue()
    assert "50%" in shown and "\n" not in shown
    assert shown.endswith("\r")


def test_sums_that_miss_zero_or_the_whole_by_rounding_are_neither_below_nor_above():
    state = {"total": 3.0, "initial": 0.0, "started": 0.0, "updated": 1.0, "note": ""}
    assert describe({**state, "done": -1e-13}) == "0 %"
    assert describe({**state, "done": 3.0 + 1e-9}).startswith("100 %")
