"""Workers that are processes of this machine: told what to do in lines of JSON, heard the same way, ended with this process."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvlib.study.executors.crew import Call, Crew, Hired, Lost
from kvlib.study.progress import VARIABLE
from kvlib.study.run import ROOT, Run

MODULE = "kvlib.study.executors.process"  # what every worker runs
ENDING_S = 10  # for a process whose output has ended
WORDS = 160  # characters of a dead worker's last line that are passed on


@dataclass(frozen=True)
class Errand:
    """What a worker is started for. open_bench: the dotted name of what it opens, `module:function`."""

    run: Run
    stage: str
    pair: dict
    threads: int
    open_bench: str

    def record(self) -> dict:
        """As JSON can say it."""
        run = self.run
        settings = run.profile.model_dump(mode="json")
        return {
            "profile": settings, "name": run.name, "folder": str(run.folder), "overrides": run.overrides,
            "source": run.source, "stage": self.stage, "pair": self.pair, "threads": self.threads,
            "open_bench": self.open_bench,
        }  # fmt: skip


@dataclass(frozen=True)
class Child:
    """A process, and the file that its standard error goes to."""

    process: subprocess.Popen
    log: Path

    def tell(self, what: dict) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: its end is heard next
            self.process.stdin.write(json.dumps(what).encode() + b"\n")

    def end(self) -> int:
        """Kill it, whatever it does: records are written whole or not at all. Returns how it ended."""
        self.process.kill()
        status = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        return status


@dataclass
class ProcessCrew(Crew):
    """Processes that do units. What they write to standard error stays in `scratch`, for the sentence when one dies.

    A call's value never passes through here: it is in the records, and whoever asked reads it there.
    """

    errand: Errand | None = None
    started: int = 0

    kind = "worker processes"
    start_remedy = "free some memory or give --workers 1"
    shortage_remedy = "most often memory is short, so give --workers 1"

    def start(self) -> Hired:
        self.started += 1
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(self.errand.threads)}
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | own
        log = self.scratch / f"worker-{self.started}.log"
        errand = self.scratch / "errand.json"
        if not errand.exists():  # another may be reading it
            errand.write_text(json.dumps(self.errand.record()))
        with open(log, "wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(errand)], env=environment, bufsize=0, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=said,
            )  # fmt: skip
        return Hired(Child(process, log))

    def give(self, worker: Hired, call: Call) -> None:
        (unit,) = call.arguments
        worker.handle.tell({"unit": unit.record(), "report": str(call.report)})

    def heard(self, seconds: float) -> list[tuple[Hired, object]]:
        with selectors.DefaultSelector() as selector:
            for worker in self.busy:
                selector.register(worker.handle.process.stdout, selectors.EVENT_READ, worker)
            return [(key.data, _answer(key.data.handle)) for key, _ in selector.select(seconds)]

    def dismiss(self) -> None:
        workers, self.idle, self.busy = [*self.idle, *self.busy], [], []
        for worker in workers:
            worker.handle.end()


def _answer(child: Child) -> object:
    line = child.process.stdout.readline()
    if not line.endswith(b"\n"):
        return _lost(child)
    said = json.loads(line)
    if "error" in said:
        return _error(said["error"])
    return said.get("ready") or (said["how"], said["sentence"], said["counted"])


def _error(said: dict) -> Exception:
    """What a unit raised that is no user's mistake; an error of the disk stays one, so that it gets its sentence."""
    error = OSError(*said["os"]) if said["os"] else RuntimeError(said["text"])
    error.add_note(f"in a worker process:\n{said['trace']}")
    return error


def _lost(child: Child) -> Lost:
    """How a process ended, and the last thing that it said."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(ENDING_S)  # its output ends a moment before it does
    status = child.end()
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = child.log.read_text(errors="replace").splitlines()
    words = next((line.strip() for line in reversed(lines) if line.strip()), "").replace(". ", ", ")
    return Lost(f"{how}, its last words: {words[:WORDS]}" if words else how)
