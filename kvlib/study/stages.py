"""The stages in their order, as the notebooks call them."""

from pathlib import Path

from kvlib.study.confirmation import run_confirmation
from kvlib.study.evaluation import run_frozen_evaluation
from kvlib.study.latency import run_latency
from kvlib.study.pairing import run_pair
from kvlib.study.run import NOTEBOOKS, STAGES, Run
from kvlib.study.screening import run_screening

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
