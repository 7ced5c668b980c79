"""Checks of stages outside the sequence: the evidence, every figure of it from its tables."""

from kvlib.study.evidence.learning import window_facts
from kvlib.study.evidence.stage import facts, summarise_tables
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records

STAGE = "evidence"


def check_evidence(records: Records, check: Check) -> None:
    """`evidence/summary.json` from the stage's tables and the final evaluation's; it is of the map that is frozen now."""
    run, confirmation = records.run, records.summary("confirmation")
    windows = window_facts(run, records.articles("confirm_train"))
    expected = facts(run, confirmation["frozen"], confirmation["manifest_hash"]) | summarise_tables(
        run, windows
    )
    records.same_summary(check, STAGE, expected)
