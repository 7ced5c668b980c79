"""The local executor with several processes: the same bytes, deaths survived, nothing left running, no more than there is room for."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benches import KILLED_ARM, Remembering
from test_execution import alive, interruptible, wait_for
from tiny import refused

from kvlib.study.arms import all_arms
from kvlib.study.executors import Settings, crew, local
from kvlib.study.executors.local import LocalExecutor
from kvlib.study.executors.processes import Errand, ProcessCrew
from kvlib.study.learning import Task
from kvlib.study.profile import Profile, load_profile, profile_names
from kvlib.study.progress import Progress, read_progress
from kvlib.study.records import read_json
from kvlib.study.resilience import quality_records
from kvlib.study.shares import SHARES
from kvlib.study.stages import open_run, run_confirmation, run_pair, run_screening
from kvlib.study.units import Unit

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # of workers: they open what is in benches.py
ALONE = Settings(threads_per_unit=1)
TWO = Settings(threads_per_unit=1, workers=2)
ARMS = [arm for arm in all_arms(load_profile("smoke").screening) if arm.base == "direct"][:6]
SMALL = {
    "screening.arms": [arm.id for arm in ARMS],
    "screening.select": 2,
    "screening.finalists": 1,
    "confirmation.seeds": [11, 12],
}
MARK = "benches:Remembering.open"


@pytest.fixture(autouse=True)
def _paths(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATHS)


def run_stage(stage, folder: Path, settings: Settings, open_bench: str | None = None) -> dict:
    """A stage of the small run in a folder. open_bench: what worker processes open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATHS)
        for name, value in settings.environment().items():
            patch.setenv(name, value)
        if open_bench is not None:
            patch.setattr(local, "LocalExecutor", functools.partial(LocalExecutor, open_bench=open_bench))
        return stage(open_run("smoke", results=folder, **SMALL))


def made(run_folder: Path, stage: str) -> dict:
    return read_json(run_folder / stage / "made.json")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    run_stage(run_pair, folder, ALONE)
    return folder


@pytest.fixture(scope="module")
def by_one(prepared, tmp_path_factory) -> Path:
    """The run folder that this process alone leaves."""
    folder = shutil.copytree(prepared, tmp_path_factory.mktemp("one") / "results")
    run_stage(run_screening, folder, ALONE)
    run_stage(run_confirmation, folder, ALONE)
    return folder / "smoke"


@pytest.fixture(scope="module")
def by_two(prepared, tmp_path_factory) -> Path:
    """The run folder that two worker processes leave, one of which was killed in the middle of an arm."""
    folder = shutil.copytree(prepared, tmp_path_factory.mktemp("two") / "results")
    run_stage(run_screening, folder, TWO, "benches:open_and_die_once")
    run_stage(run_confirmation, folder, TWO)
    return folder / "smoke"


def test_two_processes_leave_the_bytes_that_one_leaves(by_one, by_two):
    one, two = quality_records(by_one), quality_records(by_two)
    kinds = ("curve.parquet", "step-00012.safetensors", "scored-00012-1.0.json", "summary.json")
    assert all(any(name.endswith(kind) for name in one) for kind in kinds)
    assert one == two


def test_the_record_says_how_units_were_shared_out_and_where_each_was_done(by_one, by_two):
    found, single = made(by_two, "screening"), made(by_one, "screening")
    assert found["shares"] == {name: {"workers": 2, "threads": 1} for name in ("6 units", "2 units")}
    assert single["shares"] == {name: {"workers": 1, "threads": 1} for name in ("6 units", "2 units")}
    assert made(by_two, "confirmation")["shares"]["1 unit"] == {"workers": 1, "threads": 1}
    assert {entry["process"] for entry in single["ran"].values()} == {os.getpid()}
    processes = {entry["process"] for entry in found["ran"].values()}
    assert len(processes) >= 2 and os.getpid() not in processes
    assert all(entry["threads"] == 1 for entry in found["ran"].values())
    assert not list(by_two.rglob(SHARES))


def test_an_arm_whose_process_was_killed_is_trained_by_another_one(by_two):
    killed, ran = int((by_two.parent / "killed").read_text()), made(by_two, "screening")["ran"]
    assert {name for name, entry in ran.items() if entry["attempt"] > 1} == {KILLED_ARM}
    assert ran[KILLED_ARM]["attempt"] == 2 and ran[KILLED_ARM]["process"] != killed


def test_no_process_and_no_scratch_is_left(by_two):
    ran = [entry for stage in ("screening", "confirmation") for entry in made(by_two, stage)["ran"].values()]
    others = {entry["process"] for entry in ran} - {os.getpid()}
    assert others and not any(alive(process) for process in others)
    assert not list(by_two.glob(".partial-*"))


def test_what_is_finished_starts_no_process(by_two, tmp_path, monkeypatch):
    folder = shutil.copytree(by_two.parent, tmp_path / "results")
    before = quality_records(folder / "smoke")
    for stage in ("screening", "confirmation"):
        (folder / "smoke" / stage / "summary.json").unlink()
    monkeypatch.setattr(ProcessCrew, "start", lambda self: pytest.fail("a process was started"))
    run_stage(run_screening, folder, TWO)
    run_stage(run_confirmation, folder, TWO)
    assert quality_records(folder / "smoke") == before


KILLED_RUN = """
import sys
from test_processes import TWO, run_stage
from kvlib.study.stages import run_screening
run_stage(run_screening, sys.argv[1], TWO)
"""


def test_a_run_that_was_killed_with_its_processes_goes_on_to_the_same_bytes(prepared, by_one, tmp_path):
    folder = shutil.copytree(prepared, tmp_path / "results")
    ended = lambda: list((folder / "smoke/screening/arms").glob("*/trained.json"))
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED_RUN, str(folder)], stdout=said, stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        wait_for(lambda: ended() or process.poll() is not None, 300)
        assert process.poll() is None, (tmp_path / "said").read_text()
    finally:
        process.kill()
        process.wait(90)
    ran = [read_json(path)["process"] for path in (folder / "smoke/screening/arms").glob("*/ran.json")]
    assert ran and all(wait_for(lambda one=one: not alive(one), 90) for one in ran)
    run_stage(run_screening, folder, TWO)
    run_stage(run_confirmation, folder, TWO)
    assert quality_records(folder / "smoke") == quality_records(by_one)


# Below, processes only pretend: no model is loaded.


@pytest.fixture(scope="module")
def pretending(tmp_path_factory):
    """An executor whose units do what their notes say, in two processes that serve all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATHS)
        folder = tmp_path_factory.mktemp("pretended")
        run, progress = open_run("smoke", results=folder / "results"), folder / "progress.json"
        shown = Progress("test", 12, path=progress)
        with LocalExecutor(run, "screen", {}, shown, TWO, MARK) as executor:
            executor.bench = Remembering(run)
            yield executor


def unit(note: str, number: int = 0) -> Unit:
    return Unit(f"{note} {number}", Task(ARMS[0], number, 12), note, ((12, (0.5, 1.0)),))


def several(note: str) -> list[Unit]:
    return [unit(note), unit("work", 100), unit("work", 101)]


def test_units_are_counted_once_and_those_that_are_there_are_only_found(pretending):
    units = [unit("work", number) for number in range(4)]
    found = {done.name: record.ended["status"] for done, record in pretending.each(units)}
    assert found == {unit.name: "found" for unit in units}  # by the process that asked for them
    assert pretending.progress.done == 12 and pretending.progress.initial == 0
    assert read_progress(pretending.progress.path)["note"].endswith("done")
    assert len(list(pretending.each(units))) == 4
    assert pretending.progress.done == 24 and pretending.progress.initial == 12


def test_a_mistake_in_a_unit_comes_back_as_its_sentence(pretending):
    refused(lambda: list(pretending.each(several("refuse"))), match="^a rank of 3 given, .* add one$")
    pretending._dismiss()


def test_any_other_error_comes_back_with_where_it_was_raised(pretending):
    with pytest.raises(RuntimeError, match="^ZeroDivisionError: by nothing") as failed:
        list(pretending.each(several("fail")))
    assert "benches.py" in failed.value.__notes__[0]
    pretending._dismiss()
    with pytest.raises(OSError, match="No space left") as full:
        list(pretending.each(several("fill the disk")))
    assert full.value.filename == "/some/file"
    pretending._dismiss()


def test_a_unit_that_costs_every_process_is_given_up_in_one_sentence(pretending, monkeypatch, capfd):
    monkeypatch.setattr(crew, "ATTEMPTS", 2)
    refused(
        lambda: list(pretending.each(several("say and die"))),
        match=r"say and die 0 was begun 2 times .* \(killed by SIGKILL, its last words: out of luck\): .* --workers 1",
    )
    attempts = (pretending.run.folder.parent / "attempts of say and die 0").read_text().split()
    assert len(attempts) == len(set(attempts)) == 2
    assert capfd.readouterr() == ("", "")
    pretending._dismiss()


def test_processes_that_cannot_start_are_one_sentence(pretending, monkeypatch):
    monkeypatch.setattr("kvlib.study.executors.processes.MODULE", "kvlib.no_such_module")
    refused(
        lambda: list(pretending.each([unit("late", 0), unit("late", 1)])),
        match="3 worker processes in a row could not start, .*No module named",
    )
    pretending._dismiss()


SCRIPT = """
import sys
from benches import Remembering
from test_processes import MARK, TWO, unit
from kvlib.study.executors.local import LocalExecutor
from kvlib.study.progress import Progress
from kvlib.study.stages import open_run
run = open_run("smoke", results=sys.argv[1])
with LocalExecutor(run, "screen", {}, Progress("test", 6), TWO, MARK) as executor:
    executor.bench = Remembering(run)
    list(executor.each([unit("sleep", 0), unit("sleep", 1)]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_process_takes_its_workers_along(tmp_path, number):
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=said, stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=interruptible,
        )  # fmt: skip
    marks = [tmp_path / f"attempts of sleep {n}" for n in (0, 1)]
    try:
        began = lambda: all(mark.exists() and mark.read_text().endswith("\n") for mark in marks)
        wait_for(lambda: began() or process.poll() is not None, 300)
        assert process.poll() is None, (tmp_path / "said").read_text()
        workers = [int(mark.read_text()) for mark in marks]
        process.send_signal(number)
        process.wait(90)
    finally:
        process.kill()
    assert all(wait_for(lambda one=one: not alive(one), 90) for one in workers)
    if number == signal.SIGINT:
        assert not list((tmp_path / "smoke").glob(".partial-*"))


@pytest.mark.parametrize("name", profile_names())
def test_what_a_process_is_told_is_the_whole_run(tmp_path, name):
    run = open_run("smoke", results=tmp_path)
    run.profile = load_profile(name)
    told = json.loads(json.dumps(Errand(run, "screen", {"a": 1}, 1, MARK).record()))
    assert Profile.model_validate(told["profile"]) == run.profile
    for arm in all_arms(run.profile.screening):
        one = Unit(arm.id, Task(arm, 3, 12, True), "note", ((12, (0.1, 1.0)), (8, (0.5,))), True)
        assert Unit.of(json.loads(json.dumps(one.record()))) == one
