"""The executor of many: workers of Ray, each with the stage's models, that take one unit after another."""

import contextlib
import secrets
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from kvlib.errors import KvlibError
from kvlib.study.bench import Bench
from kvlib.study.executors import Settings
from kvlib.study.executors.cluster import connected, room
from kvlib.study.executors.worker import TOKEN, Job, Worker, check_node, passed_on
from kvlib.study.learning import Task
from kvlib.study.progress import Progress, read_progress
from kvlib.study.records import PARTIAL
from kvlib.study.run import Run
from kvlib.study.units import Done, Opening, Unit

POLL_S = 0.5
ATTEMPTS = 3  # of a unit, and of starting workers in a row
SHOWN = 3  # units of which the progress says how far they are


@dataclass
class Call:
    """A method of the bench for some worker to call, its report, and how many workers have died over it."""

    name: str
    method: str
    arguments: tuple
    report: Path
    opening: bool = False
    lost: int = 0


@dataclass
class Hired:
    """A worker: the actor, where it said that it is, and what it does now."""

    actor: object
    at: str = "a node that did not answer"
    call: Call | None = None


@dataclass
class RayExecutor:
    """Args: as `executor_of`. open_bench: what a worker opens, for tests."""

    run: Run
    stage: str
    pair: dict
    progress: Progress
    settings: Settings
    open_bench: object = Bench.open
    idle: list[Hired] = field(default_factory=list)
    pending: dict = field(default_factory=dict)  # what Ray will answer -> Hired

    def __enter__(self) -> "RayExecutor":
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=f"{PARTIAL}ray-", dir=self.run.folder)
            )
            self.scratch, device = Path(scratch), self.run.profile.device
            stack.enter_context(connected(self.settings, device))
            self.room = room(self.settings, device)
            token = self.scratch / TOKEN, secrets.token_hex(16)
            token[0].write_text(token[1])
            place = self.run, self.stage, self.pair
            self.job = Job(*place, self.room.threads, token, passed_on(), self.open_bench)
            self.calls, self.failed, self.counted = 0, 0, [self.progress.done, self.progress.initial]
            stack.callback(self._dismiss)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *raised) -> None:
        self.stack.__exit__(*raised)

    def opening(self) -> Opening:
        return self._one("the stage's caches", "opening", (), opening=True)

    def each(self, units: list[Unit]) -> Iterator[tuple[Unit, Done]]:
        named = {unit.name: unit for unit in units}
        calls = [self._call(unit.name, "do", (unit,)) for unit in units]
        for call, done in self._answers(calls):
            yield named[call.name], done

    def save(self, maps: dict[str, tuple[Task, float] | None], provenance: dict) -> None:
        self._one("saving the maps", "save", (maps, provenance))

    def _one(self, *call, **options):
        return next(iter([value for _, value in self._answers([self._call(*call, **options)])]))

    def _call(self, name: str, method: str, arguments: tuple, opening: bool = False) -> Call:
        self.calls += 1
        return Call(name, method, arguments, self.scratch / f"{self.calls}.json", opening)

    def _answers(self, calls: list[Call]) -> Iterator[tuple[Call, object]]:
        """Each call with what it returned, as they end. A call whose worker died goes to another one."""
        queue, left = deque(calls), len(calls)
        while len(self.idle) + len(self.pending) < min(left, self.room.workers):
            self._hire()
        while left:
            while queue and self.idle:
                self._give(self.idle.pop(), queue.popleft())
            for reference in ray.wait(list(self.pending), timeout=POLL_S)[0]:
                worker = self.pending.pop(reference)
                call, worker.call = worker.call, None
                try:
                    answer = ray.get(reference)
                except RayTaskError as error:
                    raise error.cause from error  # an error in the code, or of a disk: as it was raised there
                except RayError as error:
                    self._lost(worker, call, error, queue)
                    continue
                self.idle.append(worker)
                if call is None:
                    self._welcome(worker, answer)
                    continue
                how, value, counted = answer
                if how == "refused":
                    raise KvlibError(value)
                left, self.counted = left - 1, [a + b for a, b in zip(self.counted, counted)]
                self._show(f"{call.name}: done on {worker.at}")
                yield call, value
            if left:
                self._show()

    def _hire(self) -> None:
        # Ray starts no actor twice by itself: what a dead one was doing is given to any that is free.
        options = {"num_cpus": self.room.threads, "num_gpus": self.room.gpus, "max_restarts": 0}
        worker = Hired(ray.remote(**options)(Worker).remote(self.job))
        self.pending[worker.actor.introduce.remote()] = worker

    def _welcome(self, worker: Hired, said: dict) -> None:
        worker.at, self.failed = f"{said['node']}, process {said['process']}", 0
        check_node(said, self.run.folder)

    def _give(self, worker: Hired, call: Call) -> None:
        call.report.unlink(missing_ok=True)  # what a worker that died had counted
        worker.call = call
        arguments = call.method, call.arguments, call.report, call.opening
        self.pending[worker.actor.call.remote(*arguments)] = worker

    def _lost(self, worker: Hired, call: Call | None, error: RayError, queue: deque) -> None:
        """A worker died, with its node or alone: its call goes to another worker, unless it has cost too many."""
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        said = f"the last one on {worker.at} ({reason.rstrip('.')})"
        if call is None:
            self.failed += 1
            if self.failed >= ATTEMPTS:
                raise KvlibError(
                    f"{ATTEMPTS} Ray workers in a row could not start, {said}: see that every node has kvlib and its packages at the "
                    "same paths and enough memory, then run the same command again; finished work is kept"
                )
        else:
            call.lost += 1
            if call.lost >= ATTEMPTS:
                raise KvlibError(
                    f"{call.name} was begun {ATTEMPTS} times and its worker died each time, {said}: most often memory is "
                    "short, so give fewer --workers, then run the same command again; finished work is kept"
                )
            queue.appendleft(call)
        self._hire()

    def _show(self, note: str = "") -> None:
        """The progress of all: what has ended, and what those at work report."""
        at_work = [worker for worker in self.pending.values() if worker.call is not None]
        states = [(worker, state) for worker in at_work if (state := read_progress(worker.call.report))]
        done, initial = (
            number + sum(state[name] for _, state in states)
            for number, name in zip(self.counted, ("done", "initial"))
        )
        notes = [f"{state['note']} on {worker.at}" for worker, state in states if state["note"]]
        more = [f"{len(notes) - SHOWN} more"] if len(notes) > SHOWN else []
        waiting = [] if at_work or self.idle or note else ["waiting for a Ray worker"]
        self.progress.show(done, initial, "; ".join([*filter(None, [note]), *notes[:SHOWN], *more, *waiting]))

    def _dismiss(self) -> None:
        for worker in (*self.idle, *self.pending.values()):
            with contextlib.suppress(RayError):
                ray.kill(worker.actor)
        self.idle, self.pending = [], {}
