"""The executor that needs nothing but this machine: units in this process, or in several at once where that is faster."""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from kvlib.errors import KvlibError
from kvlib.study.bench import Bench
from kvlib.study.device import device_of
from kvlib.study.executors import Settings
from kvlib.study.executors.processes import Errand, ProcessCrew
from kvlib.study.executors.sizing import share_out
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.records import PARTIAL
from kvlib.study.run import Run
from kvlib.study.shares import Share
from kvlib.study.units import Done, Opening, Unit

STAGES = {"screen": "screening", "confirm": "confirmation"}
OPENED = "kvlib.study.bench:Bench.open"


class LocalExecutor:
    """Everything but the units is done in this process, with all of torch's threads. `sizing` says who does the units.

    Args: as `executor_of`. With `threads_per_unit`, torch has that many threads here as long as the executor is open.
        open_bench: the dotted name of what worker processes open, for tests.
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        pair: dict,
        progress: Progress,
        settings: Settings,
        open_bench: str = OPENED,
    ):
        self.run, self.stage, self.pair, self.progress, self.settings = run, stage, pair, progress, settings
        self.open_bench, self.crew = open_bench, None
        if settings.workers not in (None, 1) and device_of(run.profile).type == "cuda":
            raise KvlibError(
                f"workers {settings.workers} given for a run on a card, where executor local has one: add `--executor ray`, or "
                "leave --workers out"
            )

    def __enter__(self) -> "LocalExecutor":
        self.threads, self.hired = torch.get_num_threads(), contextlib.ExitStack()
        torch.set_num_threads(self.settings.threads_per_unit or self.threads)
        return self

    def __exit__(self, *_) -> None:
        self._dismiss()
        torch.set_num_threads(self.threads)

    @cached_property
    def bench(self) -> Bench:
        return Bench.open(self.run, self.stage, self.pair, self.progress)

    def opening(self) -> Opening:
        return self.bench.opening(self.progress)

    def each(self, units: list[Unit]) -> Iterator[tuple[Unit, Done]]:
        left = []
        for unit in units:
            if self.bench.finished(unit):
                yield unit, self.bench.do(unit, self.progress)
            else:
                left.append(unit)
        if left:
            share = share_out(self.run, STAGES[self.stage], units, len(left), self.threads, self.settings)
            yield from self._here(left, share) if share.workers == 1 else self._elsewhere(left, share)

    def _here(self, units: list[Unit], share: Share) -> Iterator[tuple[Unit, Done]]:
        self._dismiss()  # workers of earlier units would only hold memory
        with torch_threads(share.threads):
            for unit in units:
                yield unit, self.bench.do(unit, self.progress)

    def _elsewhere(self, units: list[Unit], share: Share) -> Iterator[tuple[Unit, Done]]:
        crew, named = self._crew(share), {unit.name: unit for unit in units}
        unseen = Progress("", 1, path=crew.scratch / "read.json")
        for call, _ in crew.answers([crew.call(unit.name, "do", (unit,)) for unit in units]):
            yield named[call.name], self.bench.do(named[call.name], unseen)  # it finds all in the records

    def _crew(self, share: Share) -> ProcessCrew:
        """Those of earlier units, where they have as many threads."""
        if self.crew is None or self.crew.errand.threads != share.threads:
            self._dismiss()
            scratch = tempfile.TemporaryDirectory(prefix=f"{PARTIAL}local-", dir=self.run.folder)
            place = Path(self.hired.enter_context(scratch))
            errand = Errand(self.run, self.stage, self.pair, share.threads, self.open_bench)
            self.crew = ProcessCrew(self.progress, place, share.workers, errand=errand)
            self.hired.callback(self.crew.dismiss)
        self.crew.most = share.workers
        return self.crew

    def _dismiss(self) -> None:
        self.hired.close()
        self.crew = None

    def save(self, maps: dict[str, tuple[Task, float] | None], provenance: dict) -> None:
        self.bench.save(maps, provenance, self.progress)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch has so many threads in this process while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
