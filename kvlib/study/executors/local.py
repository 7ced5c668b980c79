"""The executor that needs nothing: one unit after another, in this process."""

from collections.abc import Iterator
from functools import cached_property

import torch

from kvlib.study.bench import Bench
from kvlib.study.executors import Settings
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.run import Run
from kvlib.study.units import Done, Opening, Unit


class LocalExecutor:
    """Args: as `executor_of`. With `threads_per_unit`, torch has that many threads as long as the executor is open."""

    def __init__(self, run: Run, stage: str, pair: dict, progress: Progress, settings: Settings):
        self.run, self.stage, self.pair, self.progress, self.settings = run, stage, pair, progress, settings

    def __enter__(self) -> "LocalExecutor":
        self.threads = torch.get_num_threads()
        torch.set_num_threads(self.settings.threads_per_unit or self.threads)
        return self

    def __exit__(self, *_) -> None:
        torch.set_num_threads(self.threads)

    @cached_property
    def bench(self) -> Bench:
        return Bench.open(self.run, self.stage, self.pair, self.progress)

    def opening(self) -> Opening:
        return self.bench.opening(self.progress)

    def each(self, units: list[Unit]) -> Iterator[tuple[Unit, Done]]:
        for unit in units:
            yield unit, self.bench.do(unit, self.progress)

    def save(self, maps: dict[str, tuple[Task, float] | None], provenance: dict) -> None:
        self.bench.save(maps, provenance, self.progress)
