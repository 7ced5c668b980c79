"""Executors: whoever does the units of work, the records are the same bytes; workers that die cost an attempt."""

import ast
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benches import KILLED_ARM, MeetingBench, Pretended, open_and_die_once, open_without_training
from test_execution import alive, interruptible, wait_for
from tiny import refused

from kvlib.study import execution, names
from kvlib.study.arms import all_arms
from kvlib.study.executors import Settings, cluster, crew
from kvlib.study.executors import ray as on_ray
from kvlib.study.executors.cluster import Room, connected
from kvlib.study.executors.worker import Job, Worker, check_node
from kvlib.study.freezing import openings
from kvlib.study.learning import Task
from kvlib.study.profile import load_profile
from kvlib.study.progress import Progress
from kvlib.study.records import read_json, stage_lock
from kvlib.study.resilience import quality_records
from kvlib.study.stages import open_run, run_confirmation, run_frozen_evaluation, run_pair, run_screening
from kvlib.study.units import Unit

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])  # of workers: they open what is in benches.py
TWO = Settings(executor="ray", workers=2, threads_per_unit=1)
ALONE = Settings(threads_per_unit=1)
ARM = all_arms(load_profile("smoke").screening)[0]


@pytest.fixture(scope="module")
def ray():
    """One Ray for the tests of this file: it takes seconds to start."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATHS)
        with connected(TWO, "cpu"):
            yield ray


def run_stage(stage, folder: Path, settings: Settings, open_bench=None) -> dict:
    """A stage of the run in a folder, executed as the settings say; open_bench: what workers of Ray open."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.environment().items():
            patch.setenv(name, value)
        if open_bench is not None:
            chosen = functools.partial(on_ray.RayExecutor, open_bench=open_bench)
            patch.setattr(on_ray, "RayExecutor", chosen)
        return stage(open_run("smoke", results=folder))


def made(run_folder: Path, stage: str) -> dict:
    return read_json(run_folder / stage / "made.json")["ran"]


def ended(run_folder: Path) -> dict[str, dict]:
    """How every training ended, without the seconds that it took."""
    paths = sorted(run_folder.glob("*/arms/*/trained.json"))
    return {str(path.relative_to(run_folder)): {**read_json(path), "seconds": None} for path in paths}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Runs that have their pair and nothing else are copied from here."""
    folder = tmp_path_factory.mktemp("prepared")
    run_stage(run_pair, folder, ALONE)
    return folder


@pytest.fixture(scope="module")
def by_one(prepared, tmp_path_factory) -> Path:
    """The run folder that one process leaves."""
    folder = shutil.copytree(prepared, tmp_path_factory.mktemp("one") / "results")
    run_stage(run_screening, folder, ALONE)
    run_stage(run_confirmation, folder, ALONE)
    return folder / "smoke"


@pytest.fixture(scope="module")
def by_two(ray, prepared, tmp_path_factory) -> Path:
    """The run folder that two workers leave, one of which was killed in the middle of an arm."""
    folder = shutil.copytree(prepared, tmp_path_factory.mktemp("two") / "results")
    run_stage(run_screening, folder, TWO, open_and_die_once)
    run_stage(run_confirmation, folder, TWO, MeetingBench.open)
    return folder / "smoke"


def test_two_workers_leave_the_bytes_that_one_process_leaves(by_one, by_two):
    one, two = quality_records(by_one), quality_records(by_two)
    kinds = ("curve.parquet", "step-00012.safetensors", "scored-00012-1.0.json", "summary.json")
    assert all(sum(name.endswith(kind) for name in one) >= 2 for kind in kinds)
    assert one == two
    assert len(ended(by_one)) == 20 + 6 + 1 and ended(by_one) == ended(by_two)


def test_the_records_say_where_each_arm_was_trained(by_one, by_two):
    arms = {arm.id for arm in all_arms(load_profile("smoke").screening)}
    for folder, processes in ((by_one, 1), (by_two, 2)):
        for stage in ("screening", "confirmation"):
            ran = made(folder, stage)
            assert len({entry["process"] for entry in ran.values()}) >= processes
            for entry in ran.values():
                assert set(entry) == {"node", "process", "device", "threads", "attempt"}
                assert entry["device"] == "cpu" and entry["threads"] == 1
        assert set(made(folder, "screening")) == arms and len(made(folder, "confirmation")) == 7


def test_an_arm_whose_worker_was_killed_is_trained_by_another_one(by_two):
    killed, ran = int((by_two.parent / "killed").read_text()), made(by_two, "screening")
    assert {name for name, entry in ran.items() if entry["attempt"] > 1} == {KILLED_ARM}
    assert ran[KILLED_ARM]["attempt"] == 2 and ran[KILLED_ARM]["process"] != killed


def test_nothing_runs_and_nothing_half_written_is_left(by_two):
    processes = [
        entry["process"] for s in ("screening", "confirmation") for entry in made(by_two, s).values()
    ]
    for process in set(processes):
        assert wait_for(lambda: not alive(process), 30)
    assert not list(by_two.glob(".partial-*"))


def test_finished_arms_are_found_by_other_workers_and_by_one_process(by_two, tmp_path):
    folder = shutil.copytree(by_two.parent, tmp_path / "results")
    before = quality_records(folder / "smoke")
    (folder / "smoke" / "screening" / "summary.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlib.study.learning.train", lambda *a, **k: pytest.fail("an arm was trained again"))
        run_stage(run_screening, folder, ALONE)
    assert quality_records(folder / "smoke") == before
    (folder / "smoke" / "screening" / "summary.json").unlink()
    run_stage(run_screening, folder, TWO.model_copy(update={"workers": 1}), open_without_training)
    assert quality_records(folder / "smoke") == before


# Below, workers only pretend: no model is loaded, and two of them serve all.


@pytest.fixture(scope="module")
def pretending(ray, tmp_path_factory):
    """An executor whose units do what their notes say."""
    run = open_run("smoke", results=tmp_path_factory.mktemp("pretended") / "results")
    with on_ray.RayExecutor(run, "screen", {}, Progress("test", 12), TWO, Pretended.open) as executor:
        yield executor


def unit(note: str, number: int = 0) -> Unit:
    return Unit(f"{note} {number}", Task(ARM, number, 12), note)


def test_units_end_in_any_order_and_all_are_counted(pretending):
    units = [unit("work", number) for number in range(4)]
    found = {done.name for done, _ in pretending.each(units)}
    assert found == {unit.name for unit in units}
    assert pretending.progress.done == 12 and "done on" in pretending.progress.note


def test_a_mistake_in_a_unit_comes_back_as_its_sentence(pretending):
    refused(lambda: list(pretending.each([unit("refuse")])), match="^a rank of 3 given, .* add one$")


def test_any_other_error_comes_back_as_it_was_raised(pretending):
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        list(pretending.each([unit("fail")]))
    with pytest.raises(OSError, match="No space left") as full:
        list(pretending.each([unit("fill the disk")]))
    assert full.value.filename == "/some/file"


def test_a_unit_that_costs_every_worker_is_given_up(pretending, monkeypatch):
    monkeypatch.setattr(crew, "ATTEMPTS", 2)
    refused(lambda: list(pretending.each([unit("die")])), match="die 0 was begun 2 times and its worker died")
    attempts = (pretending.run.folder.parent / "attempts of die 0").read_text().split()
    assert len(attempts) == len(set(attempts)) == 2
    assert len(list(pretending.each([unit("work")]))) == 1  # and others still find a worker


def test_a_node_that_is_not_like_this_one_is_refused(tmp_path):
    token = tmp_path / "token", "a word"
    worker = Worker(Job(open_run("smoke", results=tmp_path), "screen", {}, 1, token, {}))
    refused(lambda: check_node(worker.introduce(), tmp_path), match="does not see .* put it on a shared disk")
    token[0].write_text("another word")
    refused(lambda: check_node(worker.introduce(), tmp_path), match="does not see")
    token[0].write_text("a word")
    said = worker.introduce()
    check_node(said, tmp_path)
    other = {**said, "versions": {**said["versions"], "torch": "1.0"}}
    refused(lambda: check_node(other, tmp_path), match="has torch 1.0, expected .* as here: install")


SCRIPT = """
import sys
import tempfile
from benches import Pretended
from test_executors import TWO, unit
from kvlib.study.executors.ray import RayExecutor
from kvlib.study.progress import Progress
from kvlib.study.stages import open_run
run = open_run("smoke", results=sys.argv[1])
with RayExecutor(run, "screen", {}, Progress("test", 6), TWO, Pretended.open) as executor:
    list(executor.each([unit("sleep")]))
"""


@pytest.fixture
def short_folder():
    """Ray's sockets need a short path, which a test's own folder is not."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_process_takes_its_workers_along(tmp_path, short_folder, number):
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "TMPDIR": short_folder}
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, stdout=said, stderr=said,
            preexec_fn=interruptible,
        )  # fmt: skip
    mark = tmp_path / "attempts of sleep 0"
    try:
        began = lambda: mark.exists() and mark.read_text().endswith("\n")
        wait_for(lambda: began() or process.poll() is not None, 300)
        assert process.poll() is None, (tmp_path / "said").read_text()
        worker = int(mark.read_text())
        process.send_signal(number)
        process.wait(90)
    finally:
        process.kill()
    assert wait_for(lambda: not alive(worker), 90)
    if number == signal.SIGINT:
        assert not list((tmp_path / "smoke").glob(".partial-*")) and not os.listdir(short_folder)


def test_ray_that_is_missing_is_one_sentence(monkeypatch, kvlib):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(Settings(executor="ray").check, match="install it with `pip install -r requirements-ray.txt")
    status, _, said = kvlib("run", "--profile", "smoke", "--executor", "ray")
    assert status == 2 and "requirements-ray.txt" in said


def test_one_process_needs_no_ray():
    using = set()
    for path in (ROOT / "kvlib").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # what is imported with the file
            named = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            named += [node.module] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "ray" or name.endswith("executors.ray") for name in named):
                using.add(path.name)
    assert using == {"ray.py"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"executor": "slurm"}, "executor is 'slurm', expected 'local' or 'ray'"),
        ({"address": "auto"}, "address auto was given without executor ray"),
        ({"executor": "ray", "gpus_per_unit": 2}, "gpus_per_unit is 2"),
        ({"executor": "ray", "threads_per_unit": 0}, "threads_per_unit is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, said):
    with pytest.raises(execution.KvlibError, match=said):
        Settings.of(**given)


def test_settings_pass_through_the_environment(monkeypatch):
    settings = Settings(executor="ray", address="auto", gpus_per_unit=0.5, threads_per_unit=3, workers=2)
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    assert Settings.from_environment() == settings
    assert Settings.from_environment(workers=4) == settings.model_copy(update={"workers": 4})


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:9", "expected a running Ray cluster"),
        ("127.0.0.1:99999", "expected a running Ray cluster"),
        ("ray://10.0.0.1:10001", "run the command on a node of the cluster"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_sentence(address, said):
    refused(lambda: cluster.join(address), match=said)


NODES = [
    {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
    {"Alive": True, "Resources": {"CPU": 8.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


@pytest.mark.parametrize(
    ("settings", "device", "room"),
    [
        ({}, "auto", Room(4, 1.0, 2)),
        ({"gpus_per_unit": 0.5}, "cuda", Room(4, 0.5, 4)),
        ({"gpus_per_unit": 0.5, "workers": 3}, "auto", Room(4, 0.5, 3)),
        ({"gpus_per_unit": 0.5, "threads_per_unit": 8}, "auto", Room(8, 0.5, 2)),
        ({}, "cpu", Room(4, 0.0, 6)),
        ({"threads_per_unit": 1}, "cpu", Room(1, 0.0, 24)),
    ],
)
def test_there_is_room_for_what_the_living_nodes_have(ray, monkeypatch, settings, device, room):
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    assert cluster.room(Settings(executor="ray", **settings), device) == room


def test_what_no_node_has_is_refused(ray, monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: NODES[1:])
    refused(
        lambda: cluster.room(Settings(executor="ray", threads_per_unit=9), "cpu"),
        match="asks for 9 processor threads",
    )
    refused(lambda: cluster.room(Settings(executor="ray"), "cuda"), match="none of Ray's 1 nodes has a GPU")


NOTEBOOK = """\
# %% tags=["parameters"]
profile = "smoke"  # the profile
run = None  # the run

# %%
import os
print(sorted(name + "=" + os.environ[name] for name in os.environ if name.startswith(("KVLIB_RAY", "KVLIB_EX", "KVLIB_TH", "KVLIB_WO"))))
"""


def test_the_commands_options_reach_the_kernel_and_make_no_other_notebook(kvlib, tmp_path, monkeypatch):
    (tmp_path / "00_test.py").write_text(NOTEBOOK)
    monkeypatch.setattr(names, "SCRIPTS", tmp_path)
    options = ("--executor", "ray", "--threads-per-unit", "1", "--workers", "2", "--gpus-per-unit", "0.5")
    status, _, said = kvlib("run", "00_test", "--profile", "smoke", *options)
    assert status == 0, said
    notebook = (execution.run_folder("smoke") / "notebooks" / "00_test.ipynb").read_text()
    for wanted in ("KVLIB_EXECUTOR=ray", "KVLIB_THREADS=1", "KVLIB_WORKERS=2", "KVLIB_RAY_GPUS=0.5"):
        assert wanted in notebook
    assert "KVLIB_EXECUTOR" not in os.environ
    assert "nothing has changed" in kvlib("run", "00_test", "--profile", "smoke")[2]


def test_no_executor_comes_near_the_final_prompts(by_one):
    using = [
        path.relative_to(ROOT / "kvlib" / "study").as_posix()
        for path in (ROOT / "kvlib" / "study").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and any(name.name == "executor_of" for name in node.names)
    ]
    assert sorted(using) == ["confirmation.py", "screening.py"]
    with stage_lock(by_one):
        refused(
            lambda: run_stage(run_frozen_evaluation, by_one.parent, TWO), match="in use by another process"
        )
    assert openings(open_run("smoke", results=by_one.parent)) == []
