"""The attacks on small runs, made once for the code that is there and kept with a run, for the book to show."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from kvlib.study.describing import commit
from kvlib.study.records import PARTIAL, read_record, write_json
from kvlib.study.resilience import attack
from kvlib.study.run import Run, code_hash

FILE = "attacks.json"


def run_attacks(run: Run, say: Callable[[str], None] = lambda sentence: None) -> tuple[dict, bool]:
    """(the record `evidence/attacks.json`, whether it had to be made): see `kvlib.study.resilience.attack`.

    What is attacked is kvlib as it is, on runs of the smoke profile in a folder that is removed afterwards; a record
    of other code is made again.
    """
    path = run.stage("evidence") / FILE
    if path.exists():
        record = read_record(path, "kvlib", "attacks", "commit")
        if record["kvlib"] == code_hash():
            return record, False
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=run.folder) as scratch:
        found = attack(Path(scratch), say=say)
    record = {"kvlib": code_hash(), "commit": commit(), "attacks": found}
    write_json(path, record)
    return record, True


def recorded_attacks(run: Run) -> dict | None:
    """The record of the attacks, if they were made for this run."""
    path = run.stage("evidence") / FILE
    return read_record(path, "kvlib", "attacks", "commit") if path.exists() else None
