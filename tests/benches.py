"""What workers open in tests: benches that meet, die, refuse or only pretend, in processes of their own."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvlib.errors import KvlibError
from kvlib.study import learning
from kvlib.study.bench import Bench
from kvlib.study.progress import Progress
from kvlib.study.units import Done, Unit

PATIENCE_S = 120
KILLED_ARM, KILLED_AT = "direct-linear-own-r8-lr0.01-w4", 9  # a checkpoint at step 8 is written then


def meet(folder: Path, count: int = 2) -> None:
    """Wait for as many processes as are wanted, so that none of them does all the work before another is there."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.iterdir())) < count and time.monotonic() < deadline:
        time.sleep(0.02)


class MeetingBench(Bench):
    """The real one, which begins its first unit when a second process does."""

    def do(self, unit: Unit, progress: Progress) -> Done:
        meet(self.run.folder.parent / f"met-{self.trainer.folder.parent.name}")
        return super().do(unit, progress)


def open_and_die_once(run, stage, pair, progress, filled=False) -> Bench:
    """A bench in whose process one arm ends in its middle, the first time that it is trained."""
    mark, train = run.folder.parent / "killed", learning.train

    def dying(target, initial, *arguments, **settings):
        for step in train(target, initial, *arguments, **settings):
            yield step
            chosen = initial.base is None and settings["learning_rate"] == 0.01
            if chosen and step.number == KILLED_AT and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)

    learning.train = dying
    return MeetingBench.open(run, stage, pair, progress, filled)


def open_without_training(run, stage, pair, progress, filled=False) -> Bench:
    def refused(*_, **__):
        raise RuntimeError("an arm was trained again")

    learning.train = refused
    return Bench.open(run, stage, pair, progress, filled)


@dataclass(frozen=True)
class Pretended:
    """A bench without models: a unit does what its note says."""

    run: object

    @classmethod
    def open(cls, run, stage, pair, progress, filled=False) -> "Pretended":
        return cls(run)

    def do(self, unit: Unit, progress: Progress) -> Done:
        progress.advance(3, unit.note)
        attempts = self.run.folder.parent / f"attempts of {unit.name}"
        attempts.open("a").write(f"{os.getpid()}\n")
        match unit.note:
            case "refuse":
                raise KvlibError("a rank of 3 given, expected one of 4, 8 and 16: add one")
            case "fail":
                raise ZeroDivisionError("by nothing")
            case "fill the disk":
                raise OSError(28, "No space left on device", "/some/file")
            case "say and die":
                print("nothing that anyone reads")
                print("out of luck", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(PATIENCE_S)
        return Done({"status": "finished"}, pd.DataFrame({"loss": [0.1, 0.2]}), {}, None)


class Remembering(Pretended):
    """A pretended bench whose units leave a record, in which another process finds them done."""

    def finished(self, unit: Unit) -> bool:
        return (self.run.folder.parent / f"{unit.name} is done").exists()

    def do(self, unit: Unit, progress: Progress) -> Done:
        if self.finished(unit):
            progress.skip(3)
            return Done({"status": "found"}, pd.DataFrame(), {}, None)
        done = super().do(unit, progress)
        (self.run.folder.parent / f"{unit.name} is done").touch()
        return done
