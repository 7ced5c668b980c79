"""Workers that take one call after another: who does what, what the progress says, what happens when one of them dies."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.progress import Progress, read_progress

POLL_S = 0.5
ATTEMPTS = 3  # of a call, and of starting workers in a row
SHOWN = 3  # calls of which the progress says how far they are


class Lost(Exception):
    """A worker died; the text says why, as far as that is known."""


@dataclass(eq=False)
class Call:
    """A method of the bench for some worker to call, its report, and how many workers have died over it."""

    name: str
    method: str
    arguments: tuple
    report: Path
    opening: bool = False
    lost: int = 0


@dataclass(eq=False)
class Hired:
    """A worker: how to reach it, where it said that it is, and what it does now."""

    handle: object
    at: str = ""
    call: Call | None = None


@dataclass
class Crew:
    """At most `most` workers. Subclasses say how one is started, given a call and heard.

    progress: of the stage. scratch: a folder for the workers' reports, which every worker sees.
    """

    progress: Progress
    scratch: Path
    most: int
    idle: list[Hired] = field(default_factory=list)
    busy: list[Hired] = field(default_factory=list)  # starting, or at a call
    made: int = 0  # calls so far
    failed: int = 0  # workers in a row that died before they could be given anything

    kind = "workers"
    start_remedy = shortage_remedy = ""  # what helps when none can start, and when all die over one call

    def start(self) -> Hired:
        raise NotImplementedError

    def give(self, worker: Hired, call: Call) -> None:
        raise NotImplementedError

    def heard(self, seconds: float) -> list[tuple[Hired, object]]:
        """What busy workers have to say, waiting so long for the first: of one that has started, whatever `welcome` takes;
        of one at a call, ("done", value, counts) or ("refused", sentence, ()); a `Lost`, or the error to raise."""
        raise NotImplementedError

    def welcome(self, worker: Hired, said) -> None:
        """A worker has started."""

    def dismiss(self) -> None:
        """End all workers, whatever they are doing."""
        raise NotImplementedError

    def call(self, name: str, method: str, arguments: tuple, opening: bool = False) -> Call:
        self.made += 1
        return Call(name, method, arguments, self.scratch / f"{self.made}.json", opening)

    def answers(self, calls: list[Call]) -> Iterator[tuple[Call, object]]:
        """Each call with what it returned, as they end. A call whose worker died goes to another one."""
        queue, left = deque(calls), len(calls)
        self.counted = [self.progress.done, self.progress.initial]
        while left:
            while len(self.idle) + len(self.busy) < min(left, self.most):
                self.busy.append(self.start())
            while queue and self.idle:
                self._hand(self.idle.pop(), queue.popleft())
            for worker, answer in self.heard(POLL_S):
                self.busy.remove(worker)
                call, worker.call = worker.call, None
                if isinstance(answer, Lost):
                    self._lost(worker, call, answer, queue)
                    continue
                self.idle.append(worker)
                if isinstance(answer, Exception):
                    raise answer
                if call is None:
                    self.failed = 0
                    self.welcome(worker, answer)
                    continue
                how, value, counted = answer
                if how == "refused":
                    raise KvlibError(value)
                left, self.counted = left - 1, [a + b for a, b in zip(self.counted, counted)]
                self._show(f"{call.name}: done{_on(worker)}")
                yield call, value
            if left:
                self._show()

    def _hand(self, worker: Hired, call: Call) -> None:
        call.report.unlink(missing_ok=True)  # what a worker that died had counted
        worker.call = call
        self.busy.append(worker)
        self.give(worker, call)

    def _lost(self, worker: Hired, call: Call | None, why: Lost, queue: deque) -> None:
        """A worker died: its call goes to another worker, unless it has cost too many."""
        said = f"the last one{_on(worker)} ({str(why).rstrip('.')})"
        if call is None:
            self.failed += 1
            if self.failed >= ATTEMPTS:
                raise KvlibError(
                    f"{ATTEMPTS} {self.kind} in a row could not start, {said}: {self.start_remedy}, then run the same command "
                    "again; finished work is kept"
                )
            return
        call.lost += 1
        if call.lost >= ATTEMPTS:
            raise KvlibError(
                f"{call.name} was begun {ATTEMPTS} times and its worker died each time, {said}: {self.shortage_remedy}, then run "
                "the same command again; finished work is kept"
            )
        queue.appendleft(call)

    def _show(self, note: str = "") -> None:
        """The progress of all: what has ended, and what those at work report."""
        at_work = [worker for worker in self.busy if worker.call is not None]
        states = [(worker, state) for worker in at_work if (state := read_progress(worker.call.report))]
        done, initial = (
            number + sum(state[name] for _, state in states)
            for number, name in zip(self.counted, ("done", "initial"))
        )
        notes = [f"{state['note']}{_on(worker)}" for worker, state in states if state["note"]]
        more = [f"{len(notes) - SHOWN} more"] if len(notes) > SHOWN else []
        waiting = [] if at_work or self.idle or note else [f"waiting for {self.kind} to start"]
        self.progress.show(done, initial, "; ".join([*filter(None, [note]), *notes[:SHOWN], *more, *waiting]))


def _on(worker: Hired) -> str:
    return f" on {worker.at}" if worker.at else ""
