"""`watch` builds a page again when its script, a chart or a hand-written page changes, and trains nothing."""

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvlib.report import watching
from kvlib.report.watching import CHARTS, SCRIPTS, affected, differences
from kvlib.study.execution import NotebookError
from kvlib.study.records import run_lock
from kvlib.study.run import ROOT, Run

NAMES = ["00_pair", "03_frozen_evaluation", "10_study_and_run"]
COPIED = ("kvlib", "notebooks", "book", "data", "_config.yml", "jupytext.toml", "requirements.lock")


def test_files_that_were_written_made_or_deleted_are_seen(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    assert differences({a: (1, 1), b: (1, 1)}, {a: (2, 1), c: (1, 1)}) == {a, b, c}


def test_what_pages_are_made_of_is_watched():
    seen = watching.snapshot()
    assert {
        SCRIPTS / "00_pair.py",
        CHARTS / "palette.py",
        watching.BOOK / "index.md",
        watching.CONFIG,
    } <= seen.keys()
    assert not [path for path in seen if "chapters" in path.parts or "_build" in path.parts]


@pytest.mark.parametrize(
    ("changed", "batches"),
    [
        ([SCRIPTS / "00_pair.py"], [["00_pair"]]),
        ([watching.BOOK / "index.md"], [[]]),
        ([SCRIPTS / "evidence.py"], [[]]),  # not executed in this run
        ([CHARTS / "figures" / "final.py"], [["03_frozen_evaluation"], ["00_pair", "10_study_and_run"]]),
        ([CHARTS / "palette.py"], [["00_pair", "03_frozen_evaluation", "10_study_and_run"]]),
    ],
)
def test_a_change_concerns_the_pages_that_may_show_it_the_nearest_first(changed, batches):
    assert affected(changed, NAMES) == batches


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """What a rebuild does to a run whose stages count as finished; `fails` names notebooks that fail."""
    run, done, fails = Run.open("smoke", "mine", results=tmp_path / "results"), [], set()
    (run.folder / "notebooks").mkdir()
    for name in NAMES:
        (run.folder / "notebooks" / f"{name}.ipynb").write_text(
            '{"metadata": {"papermill": {"parameters": {"profile": "smoke", "run": "mine", "steps": 3}}}}'
        )

    def run_notebook(script, profile, name, parameters, force):
        done.append((script.stem, profile, name, parameters))
        if script.stem in fails:
            raise NotebookError("cell 2 failed")

    monkeypatch.setattr(watching, "run_notebook", run_notebook)
    monkeypatch.setattr(watching, "_build", lambda run, say: done.append("book") or True)
    monkeypatch.setattr(
        watching, "standing", lambda run, stage: type("Standing", (), {"state": watching.DONE})
    )
    return run, done, fails


def test_a_script_runs_again_with_the_parameters_that_its_page_was_made_with(steps):
    run, done, _ = steps
    watching.rebuild(run, {SCRIPTS / "00_pair.py"}, lambda sentence: None)
    assert done == [("00_pair", "smoke", "mine", {"steps": 3}), "book"]


def test_a_failing_script_is_said_and_the_book_is_left_alone(steps):
    (run, done, fails), said = steps, []
    fails.add("00_pair")
    watching.rebuild(run, {SCRIPTS / "00_pair.py"}, said.append)
    assert "book" not in done
    assert said[-1] == "00_pair failed, and its last good page stays: cell 2 failed"


def test_a_page_whose_stage_would_have_to_work_is_left_as_it_was(steps, monkeypatch):
    (run, done, _), said = steps, []
    monkeypatch.setattr(
        watching, "standing", lambda run, stage: type("Standing", (), {"state": "out of date"})
    )
    watching.rebuild(run, {SCRIPTS / "00_pair.py"}, said.append)
    assert done == ["book"]
    assert "00_pair is left as it was: 00_pair is not finished" in said[-1]


def test_while_another_command_is_at_work_the_change_waits(steps):
    run, done, _ = steps
    with run_lock(run.folder), pytest.raises(watching.Busy, match="in use by another process"):
        watching.rebuild(run, {SCRIPTS / "00_pair.py"}, lambda sentence: None)
    assert not done


class Watched:
    """The command at work on a copy of the project, and the lines that it says."""

    def __init__(self, project: Path):
        self.lines, environment = queue.Queue(), {**os.environ, "PYTHONPATH": str(project)}
        environment.pop("KVLIB_HOME", None)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "kvlib", "watch", "smoke"],
            cwd=project, env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with self.process.stderr as said:
            for line in said:
                self.lines.put(line)

    def wait_for(self, words: str, seconds: float = 120) -> str:
        deadline, said = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            try:
                said.append(self.lines.get(timeout=1))
            except queue.Empty:
                continue
            if words in said[-1]:
                return said[-1]
        pytest.fail(f"{words!r} was not said, only: {''.join(said)}")


def test_editing_a_script_changes_its_page_and_nothing_else(smoke_run, tmp_path):
    project = tmp_path / "project"
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, project / name)
    run = shutil.copytree(smoke_run.folder, project / "results" / "smoke")
    records = {
        p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.parent.parent.name != "smoke"
    }
    records = {
        p: t
        for p, t in records.items()
        if not {"notebooks", "book", "book.json"} & set(p.relative_to(run).parts)
    }
    script, page = project / "notebooks" / "00_pair.py", run / "book" / "chapters" / "00_pair.html"
    whole, watched = script.read_text(), Watched(project)
    try:
        watched.wait_for("watching")
        script.write_text(whole + "\n# %% [markdown]\n# A remark of mine.\n")
        watched.wait_for("00_pair: run again")
        watched.wait_for("The book is ready")
        assert "A remark of mine." in page.read_text()
        script.write_text(whole + "\n# %%\n1 / 0\n")
        assert "ZeroDivisionError" in watched.wait_for("its last good page stays")
        assert "A remark of mine." in page.read_text()
        watched.process.send_signal(signal.SIGINT)
        watched.wait_for("no longer watching")
        assert watched.process.wait(60) == 0
    finally:
        watched.process.kill()
        watched.process.wait()
    assert records == {path: path.stat().st_mtime_ns for path in records}
