"""All checks of a run, in the order in which its stages follow one another. Nothing is trained and nothing is written.

What is found: any record that does not follow from the others by kvlib's own functions, and any file that has
another hash than the record that names it says. What is not: a folder whose every record was made anew so that
all of them agree; only running the study again answers that. The few figures that models alone give (held-out
losses, the gates' differences, the memory bandwidth) have no raw record: what can be held against them is.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.run import Run
from kvlib.study.verification.checking import Check
from kvlib.study.verification.clock import check_latency
from kvlib.study.verification.extra import check_evidence
from kvlib.study.verification.final import check_decision, check_final
from kvlib.study.verification.freeze import check_ledger, check_manifest, check_maps
from kvlib.study.verification.pair import check_models, check_pair, check_partitions
from kvlib.study.verification.reading import Records, recorded_run
from kvlib.study.verification.selecting import check_confirmation, check_screening
from kvlib.study.verification.stages import check_files, check_gates, check_notebooks, check_stages

Function = Callable[[Records, Check], None]

# name -> (the stage whose summary has to be there, or None where the check looks for itself; the check)
CHECKS: dict[str, tuple[str | None, Function]] = {
    "stages": (None, check_stages),
    "files": (None, check_files),
    "gates": (None, check_gates),
    "partitions": ("pair", check_partitions),
    "models": ("pair", check_models),
    "pair": ("pair", check_pair),
    "screening": ("screening", check_screening),
    "confirmation": ("confirmation", check_confirmation),
    "frozen maps": ("confirmation", check_maps),
    "manifest": ("confirmation", check_manifest),
    "ledger": ("frozen_evaluation", check_ledger),
    "final evaluation": ("frozen_evaluation", check_final),
    "decision": ("frozen_evaluation", check_decision),
    "latency": ("latency", check_latency),
    "notebooks": (None, check_notebooks),
}

# The seam for stages outside the sequence: stage -> the check of its summary and tables.
EXTRA_CHECKS: dict[str, Function] = {"evidence": check_evidence}


def verify(run: Run | Path | str) -> list[Check]:
    """Every check of a run, by its folder or as opened; a check whose stage has not been run has compared nothing.

    Raises: KvlibError where there is no run at all. A damaged record is a mismatch, whatever is wrong with it.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    if not (folder / "run.json").exists():
        raise KvlibError(f"{folder} given, expected the folder of a run, with a run.json in it")
    settings = Check("settings")
    found = None
    with settings.reading("run.json"):
        found = recorded_run(folder)
        settings.checked += 1 + len(found.overrides)
    if found is None:
        return [settings]
    records, checks = Records(found), [settings]
    extra = {stage: (stage, function) for stage, function in EXTRA_CHECKS.items()}
    with _quick_collections():
        for name, (stage, function) in {**CHECKS, **extra}.items():
            checks.append(_run(name, function, records, stage is None or records.has(stage)))
    return checks


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """statsmodels collects garbage after every correction of p-values: what was loaded before need not be searched."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run(name: str, function: Function, records: Records, there: bool) -> Check:
    check = Check(name)
    if there:
        with check.reading(name):
            function(records, check)
    return check


def summary(checks: list[Check]) -> list[dict]:
    """The checks as JSON types, for a page or a record."""
    return [
        {"check": check.name, "checked": check.checked, "mismatches": list(check.mismatches)}
        for check in checks
    ]
