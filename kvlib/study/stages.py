"""The stages in their order, as the notebooks call them; one at a time in a run folder."""

import functools
from collections.abc import Callable
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study import confirmation, evaluation, latency, pairing, screening
from kvlib.study.records import stage_lock
from kvlib.study.run import NOTEBOOKS, STAGES, Run

__all__ = [
    "NOTEBOOKS",
    "STAGES",
    "open_run",
    "run_confirmation",
    "run_frozen_evaluation",
    "run_latency",
    "run_pair",
    "run_screening",
]


def open_run(profile: str, run: str | None = None, *, results: str | Path = "results", **parameters) -> Run:
    """Open or begin a run; `parameters` are dotted profile keys, and None leaves a value as the run has it."""
    return Run.open(profile, run, results=results, overrides=parameters)


def _guarded(stage: Callable[[Run], dict]) -> Callable[[Run], dict]:
    """The stage under the run's lock. Two at once would overwrite each other's records in the middle of a read."""

    @functools.wraps(stage)
    def guarded(run: Run) -> dict:
        with stage_lock(run.folder):
            try:
                return stage(run)
            except (
                OSError
            ) as error:  # a disk that is full or a folder that may not be read, wherever it is met
                raise KvlibError(
                    f"{error.filename or run.folder} could not be read or written ({error.strerror or error}), expected a "
                    "folder with room that may be read and written: free some space or fix the permissions, then run the same "
                    "command again; finished work is kept"
                ) from error

    return guarded


run_pair = _guarded(pairing.run_pair)
run_screening = _guarded(screening.run_screening)
run_confirmation = _guarded(confirmation.run_confirmation)
run_frozen_evaluation = _guarded(evaluation.run_frozen_evaluation)
run_latency = _guarded(latency.run_latency)
