"""What a worker is: a process that opens a stage's bench once and does units with it; with Ray, on any node."""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from kvlib.errors import KvlibError
from kvlib.study.bench import Bench
from kvlib.study.progress import VARIABLE, Progress
from kvlib.study.run import HOME_VARIABLE, Run, code_hash

PASSED_ON = (HOME_VARIABLE, "KVLIB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ALIKE = ("torch", "transformers", "numpy", "pandas", "safetensors")  # packages that records depend on
TOKEN = "token"


@dataclass(frozen=True)
class Job:
    """What a worker is started for. token: a file in the run's folder, and what it says; None where nobody asks for it."""

    run: Run
    stage: str
    pair: dict
    threads: int
    token: tuple[Path, str] | None
    environment: dict[str, str]
    open_bench: Callable[..., Bench] = Bench.open


def passed_on() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def versions() -> dict[str, str]:
    """What must be the same on every node, so that records do not depend on where they were made."""
    return {"kvlib's code": code_hash()[:12]} | {name: importlib.metadata.version(name) for name in ALIKE}


def check_node(said: dict, folder: Path) -> None:
    """Raises KvlibError where a worker, as it introduced itself, is not fit for the run in `folder`."""
    if not said["shared"]:
        raise KvlibError(
            f"a Ray worker on node {said['node']} does not see {folder}, expected the run's folder at the same path on every "
            "node: put it on a shared disk (KVLIB_HOME names another place for results), or leave the address out"
        )
    for name, here in versions().items():
        if said["versions"][name] != here:
            raise KvlibError(
                f"a Ray worker on node {said['node']} has {name} {said['versions'][name]}, expected {here} as here: install the "
                "same versions on every node"
            )


class Worker:
    """What answers calls, as an actor of Ray or in a process of this machine. Users' mistakes come back as sentences."""

    def __init__(self, job: Job):
        self.job = job
        os.environ.update(job.environment)
        os.environ.pop(VARIABLE, None)  # the file is the driver's to write
        torch.set_num_threads(job.threads)

    def introduce(self) -> dict:
        """Where this worker is, whether it sees the run's folder, and what it is made of."""
        place, word = self.job.token
        try:
            shared = place.read_text() == word
        except OSError:
            shared = False
        return {
            "node": platform.node(),
            "process": os.getpid(),
            "shared": shared,
            "versions": versions(),
        }

    @cached_property
    def _bench(self) -> Bench:
        job = self.job
        return job.open_bench(job.run, job.stage, job.pair, Progress(job.stage, 1), filled=True)

    def call(self, method: str, arguments: tuple, report: Path, opening: bool) -> tuple[str, object, tuple]:
        """Call a method of the bench.

        report: the file that says how far it is. opening: whether to count what opening the bench takes: of all the
        workers only the first one's, which fills the caches that the others find.

        Returns: ("done", what the method returned, (counted, of which found finished)), or ("refused", sentence, ()).
        """
        progress, job = Progress(self.job.stage, 1, path=report), self.job
        try:
            if opening and "_bench" not in self.__dict__:
                self.__dict__["_bench"] = job.open_bench(job.run, job.stage, job.pair, progress)
            value = getattr(self._bench, method)(*arguments, progress)
        except KvlibError as error:
            return "refused", str(error), ()
        return "done", value, (progress.done, progress.initial)
