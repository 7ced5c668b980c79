"""The executor of many machines: workers of Ray, each with the stage's models, that take one unit after another."""

import contextlib
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from kvlib.study.bench import Bench
from kvlib.study.executors import Settings
from kvlib.study.executors.cluster import Room, connected, room
from kvlib.study.executors.crew import Call, Crew, Hired, Lost
from kvlib.study.executors.worker import TOKEN, Job, Worker, check_node, passed_on
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.records import PARTIAL
from kvlib.study.run import Run
from kvlib.study.units import Done, Opening, Unit

UNKNOWN = "a node that did not answer"


@dataclass
class RayCrew(Crew):
    """Actors of Ray. job: what each of them is started for. room: what each of them asks for."""

    job: Job | None = None
    room: Room | None = None
    pending: dict = field(default_factory=dict)  # what Ray will answer -> worker

    kind = "Ray workers"
    start_remedy = "see that every node has kvlib and its packages at the same paths and enough memory"
    shortage_remedy = "most often memory is short, so give fewer --workers"

    def start(self) -> Hired:
        # Ray starts no actor twice by itself: what a dead one was doing is given to any that is free.
        options = {"num_cpus": self.room.threads, "num_gpus": self.room.gpus, "max_restarts": 0}
        worker = Hired(ray.remote(**options)(Worker).remote(self.job), UNKNOWN)
        self.pending[worker.handle.introduce.remote()] = worker
        return worker

    def welcome(self, worker: Hired, said: dict) -> None:
        worker.at = f"{said['node']}, process {said['process']}"
        check_node(said, self.job.run.folder)

    def give(self, worker: Hired, call: Call) -> None:
        arguments = call.method, call.arguments, call.report, call.opening
        self.pending[worker.handle.call.remote(*arguments)] = worker

    def heard(self, seconds: float) -> list[tuple[Hired, object]]:
        ready = ray.wait(list(self.pending), timeout=seconds)[0]
        return [(self.pending.pop(reference), _answer(reference)) for reference in ready]

    def dismiss(self) -> None:
        for worker in (*self.idle, *self.busy):
            with contextlib.suppress(RayError):
                ray.kill(worker.handle)
        self.idle, self.busy, self.pending = [], [], {}


def _answer(reference) -> object:
    """What a call returned, or the exception that says what became of it."""
    try:
        return ray.get(reference)
    except RayTaskError as error:  # an error in the code, or of a disk: as it was raised there
        error.cause.__cause__ = error
        return error.cause
    except RayError as error:
        lines = (line.strip() for line in str(error).splitlines() if line.strip())
        return Lost(next(lines, type(error).__name__))


@dataclass
class RayExecutor:
    """Args: as `executor_of`. open_bench: what a worker opens, for tests."""

    run: Run
    stage: str
    pair: dict
    progress: Progress
    settings: Settings
    open_bench: object = Bench.open

    def __enter__(self) -> "RayExecutor":
        with contextlib.ExitStack() as stack:
            scratch = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PARTIAL}ray-", dir=self.run.folder))
            )
            device = self.run.profile.device
            stack.enter_context(connected(self.settings, device))
            found = room(self.settings, device)
            token = scratch / TOKEN, secrets.token_hex(16)
            token[0].write_text(token[1])
            place = self.run, self.stage, self.pair
            job = Job(*place, found.threads, token, passed_on(), self.open_bench)
            self.crew = RayCrew(self.progress, scratch, found.workers, job=job, room=found)
            stack.callback(self.crew.dismiss)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *raised) -> None:
        self.stack.__exit__(*raised)

    def opening(self) -> Opening:
        return self._one("the stage's caches", "opening", (), opening=True)

    def each(self, units: list[Unit]) -> Iterator[tuple[Unit, Done]]:
        named = {unit.name: unit for unit in units}
        for call, done in self.crew.answers([self.crew.call(unit.name, "do", (unit,)) for unit in units]):
            yield named[call.name], done

    def save(self, maps: dict[str, tuple[Task, float] | None], provenance: dict) -> None:
        self._one("saving the maps", "save", (maps, provenance))

    def _one(self, *call, **options):
        return next(iter([value for _, value in self.crew.answers([self.crew.call(*call, **options)])]))
