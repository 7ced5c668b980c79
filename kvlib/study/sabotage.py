"""A run in a process of its own that is killed, held, or met by a full disk at one chosen call of one function."""

import contextlib
import errno
import fnmatch
import functools
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, set_start_method
from pathlib import Path
from typing import Literal

from kvlib.errors import KvlibError

PATIENCE_S = 120  # a held process goes on by itself after so long
ROOT = Path(__file__).resolve().parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Moment:
    """The `call`-th call of `function` (a dotted name) one of whose texts, paths or notes, fits the pattern `matching`.

    when: before or after the call; or half, after the file that it writes or moves was cut in half.
    """

    function: str
    matching: str = "*"
    call: int = 1
    when: Literal["before", "half", "after"] = "before"

    def __str__(self) -> str:
        nth = f", call {self.call}" if self.call > 1 else ""
        return f"{self.when} {self.function.rsplit('.', 1)[-1]} of {self.matching}{nth}"


@dataclass(frozen=True)
class FileLimit:
    """No file may grow beyond so many bytes: the operating system itself refuses, in the middle of a write."""

    bytes: int

    def __str__(self) -> str:
        return f"files limited to {self.bytes} bytes"


@dataclass(frozen=True)
class Life:
    """How a process ended: killed, done, refused with a sentence, or failed with another exception."""

    end: Literal["killed", "done", "refused", "failed"]
    said: str = ""


class Started:
    """A process that works. `held` waits until one that is told to hold does so, `go` lets it go on, `life` waits for its end."""

    def __init__(self, job: tuple, act: str, moment, log: Path):
        context = _context()
        self.ours, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(job, act, moment, str(log), theirs), daemon=True)
        self.process.start()
        theirs.close()

    def held(self) -> bool:
        return self.ours.poll(PATIENCE_S) and self.ours.recv()[0] == "held"

    def go(self) -> None:
        self.ours.send("go")

    def life(self) -> Life:
        try:
            life = Life(*self.ours.recv())
        except (EOFError, ConnectionResetError):
            life = None
        self.process.join()
        if life is None:
            killed = self.process.exitcode == -signal.SIGKILL
            life = Life("killed") if killed else Life("failed", f"exit status {self.process.exitcode}")
        self.ours.close()
        self.process.close()
        return life


def _context():
    """Processes forked from one that has imported everything: importing takes seconds, forking milliseconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["kvlib.study.stages", "kvlib.study.sabotage", "datasets"])
    with _environment(
        {**QUIET, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _live(job: tuple, act: str, moment, log: str, pipe) -> None:
    """What the process does: the job, disturbed at the moment, and one message about its end."""
    import torch

    torch.set_num_threads(1)
    set_start_method(
        "fork", force=True
    )  # locks that libraries make need no name then, which a kill would leave behind
    with open(f"{log}.said", "ab") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    acts = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "full": _no_space,
        "hold": lambda: _hold(pipe),
    }
    _record_trainings(log)
    if isinstance(moment, FileLimit):
        _limit_files(moment.bytes)
    elif moment is not None:
        disturb(moment, acts[act])
    try:
        JOBS[job[0]](*job[1:])
        pipe.send(("done", ""))
    except KvlibError as error:
        pipe.send(("refused", str(error)))
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))


def _no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _hold(pipe) -> None:
    pipe.send(("held", ""))
    pipe.poll(PATIENCE_S)


def _limit_files(size: int) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def disturb(moment: Moment, act: Callable[[], None]) -> None:
    """Put `act` into the function, for the rest of this process."""
    owner, name = _owner(moment.function)
    static = isinstance(vars(owner).get(name), staticmethod) if isinstance(owner, type) else False
    original, calls = getattr(owner, name), [0]

    @functools.wraps(original)
    def disturbed(*args, **kwargs):
        texts = [text for value in (*args, *kwargs.values()) for text in _texts(value)]
        fits = moment.matching == "*" or any(fnmatch.fnmatch(text, moment.matching) for text in texts)
        calls[0] += fits
        if not fits or calls[0] != moment.call:
            return original(*args, **kwargs)
        result = None
        moves = moment.function == "os.replace"  # it finds its file written; others write it themselves
        if moment.when == "after" or (moment.when == "half" and not moves):
            result = original(*args, **kwargs)
        if moment.when == "half":
            _cut(args, texts[:1] if moves else texts)
        act()
        return result if moment.when == "after" else original(*args, **kwargs)

    setattr(owner, name, staticmethod(disturbed) if static else disturbed)


def _owner(dotted: str) -> tuple[object, str]:
    """(module or class, name) of a dotted name."""
    *parts, name = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            owner = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            owner = getattr(owner, part)
        return owner, name
    raise KvlibError(f"{dotted} given, expected a function's dotted name: correct it")


def _texts(value) -> list[str]:
    if isinstance(value, (str, os.PathLike)):
        return [os.fspath(value)]
    return [value.name] if isinstance(getattr(value, "name", None), str) else []  # an open file


def _cut(args: tuple, texts: list[str]) -> None:
    for value in args:
        if hasattr(value, "flush"):
            value.flush()
    file = [text for text in texts if os.path.isfile(text)][-1]
    os.truncate(file, os.path.getsize(file) // 2)


def _record_trainings(log: str) -> None:
    """One line in the log for every training step, and one for every arm whose training was finished."""
    from kvlib.study import learning

    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # survives a kill
    steps, whole, current = learning.train, learning.Trainer.train, [""]

    def counted(*args, **kwargs):
        for step in steps(*args, **kwargs):
            os.write(handle, f"step {current[0]}\n".encode())
            yield step

    def noted(self, task, *args, **kwargs):
        current[0] = self.place(task).name
        record = whole(self, task, *args, **kwargs)
        os.write(handle, f"finished {current[0]}\n".encode())
        return record

    learning.train, learning.Trainer.train = counted, noted


def _run_stages(results: str, profile: str, names: tuple[str, ...]) -> None:
    from kvlib.study import stages

    run = stages.open_run(profile, results=results)
    for name in names:
        getattr(stages, f"run_{name}")(run)


def _fetch(cache: str, listing: str) -> None:
    from kvlib.study.assets import fetch

    fetch("weights", Path(cache), assets_file=Path(listing), progress=lambda done, total: None)


JOBS = {"stages": _run_stages, "fetch": _fetch}
