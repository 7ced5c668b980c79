"""Who does a stage's units of work: this machine, one or a few at once, or workers of Ray, on as many as there are.

The choice is none of a run's settings: records do not depend on it, so it travels in the environment.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlib.errors import KvlibError
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.run import Run
from kvlib.study.units import Done, Opening, Unit
from kvlib.study.yaml_files import describe_error

VARIABLES = {  # field of Settings -> environment variable
    "executor": "KVLIB_EXECUTOR",
    "address": "KVLIB_RAY_ADDRESS",
    "gpus_per_unit": "KVLIB_RAY_GPUS",
    "threads_per_unit": "KVLIB_THREADS",
    "workers": "KVLIB_WORKERS",
}


class Settings(BaseModel):
    """How units are executed.

    executor: `local` uses this machine, on a processor with as many processes as `sizing` finds room and work for, on
        a card one unit after another; `ray` does as many at once as its cluster has room for.
    address: of a Ray cluster that is running; None for a Ray of this machine's own, which ends with the stage.
    gpus_per_unit: what share of a GPU a unit asks for, where the run's device is one.
    threads_per_unit: of the processor; None shares out those that torch has for `local`, and is up to four for `ray`.
    workers: the most units at once; None for as many as fit. With 1, `local` does everything in this process.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    executor: Literal["local", "ray"] = "local"
    address: Annotated[str, Field(min_length=1)] | None = None
    gpus_per_unit: Annotated[float, Field(gt=0, le=1)] = 1.0
    threads_per_unit: Annotated[int, Field(ge=1)] | None = None
    workers: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _only_ray_has_an_address(self) -> "Settings":
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"address {self.address} was given without executor ray: add `--executor ray`")
        return self

    @classmethod
    def of(cls, **values) -> "Settings":
        """From values of which None are left out. Raises KvlibError, one sentence, for one that does not fit."""
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            raise KvlibError(f"executor: {describe_error(error)}") from error

    @classmethod
    def from_environment(cls, **values) -> "Settings":
        """From the environment, where `values` do not say otherwise."""
        there = {name: os.environ.get(variable) or None for name, variable in VARIABLES.items()}
        return cls.of(**there | {name: value for name, value in values.items() if value is not None})

    def environment(self) -> dict[str, str]:
        """The variables that say the same."""
        values = {name: getattr(self, name) for name in VARIABLES}
        return {VARIABLES[name]: str(value) for name, value in values.items() if value is not None}

    def check(self) -> "Settings":
        """Raises KvlibError where what it takes is not installed."""
        if self.executor == "ray":
            from kvlib.study.executors.cluster import require_ray

            require_ray()
        return self


class Executor(Protocol):
    """What a stage asks of an executor, inside a `with`."""

    def opening(self) -> Opening:
        """Fill the stage's caches and do what comes before the first unit."""

    def each(self, units: list[Unit]) -> Iterator[tuple[Unit, Done]]:
        """Do the units, and yield each as it ends, in whatever order they do. Raises what a unit raised."""

    def save(self, maps: dict[str, tuple[Task, float] | None], provenance: dict) -> None:
        """As `Bench.save`."""


def executor_of(
    run: Run, stage: str, pair: dict, progress: Progress, settings: Settings | None = None
) -> AbstractContextManager[Executor]:
    """The executor that the environment names, for one stage ("screen" or "confirm") of a run."""
    settings = (settings or Settings.from_environment()).check()
    # Imported by name: `local` needs no Ray, and both need the stages that call this.
    if settings.executor == "ray":
        from kvlib.study.executors.ray import RayExecutor as chosen
    else:
        from kvlib.study.executors.local import LocalExecutor as chosen
    return chosen(run, stage, pair, progress, settings)
