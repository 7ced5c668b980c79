"""What all tests share: no network for the libraries, one smoke run for those that need a book, time left."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("kvlib", deadline=None, derandomize=True)  # a busy machine is no fault of the code
settings.load_profile("kvlib")

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
    os.environ[name] = "1"

ROOT = Path(__file__).resolve().parents[1]
SAY_EVERY_S = 20
# Seconds that the files with long tests take on two cores, for a first run; later ones remember.
TYPICAL_S = {
    "test_browser.py": 150, "test_browser_reading.py": 60,
    "test_readme.py": 80, "test_cli.py": 60, "test_study.py": 30, "test_real_pair.py": 150,
    "test_evidence_stage.py": 50, "test_verification.py": 110, "test_resilience.py": 90, "test_bad_records.py": 80,
    "test_executors.py": 100, "test_processes.py": 60, "test_paper.py": 110, "test_hub.py": 15, "test_first_evening.py": 20,
    "test_card.py": 60, "test_one_model.py": 60, "test_kernels.py": 30, "test_warmup_kernel.py": 25,
    "test_pdf.py": 40, "test_watch.py": 35, "test_completion.py": 15,
}  # fmt: skip
OTHERWISE_S = 8


@dataclass(frozen=True)
class SmokeRun:
    """The smoke profile, run from nothing to its book with its evidence by the command line, in a folder of its own."""

    home: Path
    folder: Path
    book: Path
    output: str


@pytest.fixture(scope="session")
def smoke_run(tmp_path_factory, request) -> SmokeRun:
    home = tmp_path_factory.mktemp("smoke")
    terminal = request.config.pluginmanager.getplugin("capturemanager")
    output = _run_command(["run", "--profile", "smoke"], home, terminal)
    output += _run_command(["evidence", "smoke", "--no-attacks"], home, terminal)
    folder = home / "results" / "smoke"
    return SmokeRun(home, folder, folder / "book", output)


def _run_command(arguments: list[str], home: Path, terminal) -> str:
    """What a command of kvlib said, shown while it runs: it takes a minute or more."""
    command, lines = [sys.executable, "-m", "kvlib", *arguments], []
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "KVLIB_HOME": str(home), "OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        for line in process.stdout:
            lines.append(line)
            with terminal.global_and_fixture_disabled():
                sys.stderr.write(f"\n    smoke run {line.rstrip()}")
    output = "".join(lines)
    if process.returncode:
        pytest.fail(f"the smoke run ended with status {process.returncode}:\n{output}", pytrace=False)
    return output


@pytest.fixture
def kvlib(capsys, monkeypatch, tmp_path):
    """Runs a command in this process; gives (status, standard output, standard error)."""
    from kvlib.cli import app
    from kvlib.terminal import run_app

    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            run_app(app, list(arguments))
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    yield command
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _one_thread(request):
    """Tiny tensors are slower on several threads, much slower on a busy machine; `all_cores` tests take them all."""
    import torch

    before = torch.get_num_threads()
    if request.node.get_closest_marker("all_cores") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def compiled_code(tmp_path_factory):
    """Compiled code is kept for the tests, and not among the user's: a handoff may compile without being asked."""
    folder = tmp_path_factory.getbasetemp() / "compiled"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests stay in one process, and so do all files that need the smoke run: there is one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = file_of(nodeid)
            return "smoke run" if "smoke_run" in (ROOT / "tests" / name).read_text() else name

    return ByFile(config, log)


def pytest_collection_modifyitems(config, items) -> None:
    """Quick tests first, where there is one process; with several, one of them begins with the files of the smoke run."""
    if hasattr(config, "workerinput"):
        with_smoke = {item.path.name for item in items if "smoke_run" in item.fixturenames}
        items.sort(key=lambda item: item.path.name not in with_smoke)
    else:
        items.sort(key=lambda item: "smoke_run" in item.fixturenames)


def pytest_configure(config) -> None:
    if not hasattr(config, "workerinput"):  # in the process that the person looks at
        config.pluginmanager.register(TimeLeft(config), "kvlib-time-left")


class TimeLeft:
    """Says now and then about how long the tests still take, from how long they took last time."""

    def __init__(self, config):
        self.config, self.left, self.took = config, {}, {}
        self.processes = 1
        self.said = time.monotonic()

    def pytest_collection_finish(self, session) -> None:
        if session.items:  # with several processes, only they have any
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids) -> None:
        """Every process of pytest-xdist has found the same tests."""
        self.processes = node.workerinput["workercount"]
        if not self.left:
            self._begin(ids)

    def _begin(self, ids: list[str]) -> None:
        known = self.config.cache.get("kvlib/durations", {}) if hasattr(self.config, "cache") else {}
        by_file = Counter(file_of(nodeid) for nodeid in ids)
        for nodeid in ids:
            name = file_of(nodeid)
            self.left[nodeid] = known.get(nodeid, TYPICAL_S.get(name, OTHERWISE_S) / by_file[name])
        shared = "" if self.processes == 1 else f" in {self.processes} processes"
        self._say(f"{len(ids)} tests{shared}, about {self._minutes()}")

    def pytest_runtest_logreport(self, report) -> None:
        nodeid = report.nodeid
        self.took[nodeid] = self.took.get(nodeid, 0.0) + report.duration
        if report.when == "teardown":
            self.left.pop(nodeid, None)
            if time.monotonic() - self.said > SAY_EVERY_S and self.left:
                self._say(f"{len(self.left)} tests left, about {self._minutes()}")

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "cache") and self.took:
            known = self.config.cache.get("kvlib/durations", {})
            self.config.cache.set("kvlib/durations", {**known, **self.took})

    def _minutes(self) -> str:
        seconds = sum(self.left.values()) / self.processes
        return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

    def _say(self, sentence: str) -> None:
        self.said = time.monotonic()
        terminal = self.config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"    {sentence}")


def file_of(nodeid: str) -> str:
    return Path(nodeid.split("::")[0]).name
