"""Units of work: what a stage hands to an executor, and what comes back."""

from dataclasses import asdict, dataclass

import pandas as pd

from kvlib.study.arms import Arm
from kvlib.study.learning import Task


@dataclass(frozen=True)
class Unit:
    """One training of an arm with the scorings that go with it: what one worker does without asking another.

    name: unlike any other of its stage; for people. note: said while it is at work.
    scorings: (checkpoint step, residual scales), done where the training came to its end.
    trained: whether an earlier unit trained it, so that only the scorings are left and no step is counted twice.
    """

    name: str
    task: Task
    note: str
    scorings: tuple[tuple[int, tuple[float, ...]], ...] = ()
    trained: bool = False

    def record(self) -> dict:
        """As JSON can say it."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict) -> "Unit":
        """The unit that gave this record, which JSON may have been through."""
        task = Task(**record["task"] | {"arm": Arm(**record["task"]["arm"])})
        scorings = tuple((step, tuple(scales)) for step, scales in record["scorings"])
        return cls(**record | {"task": task, "scorings": scorings})


@dataclass(frozen=True)
class Done:
    """What became of a unit.

    ended: the training's record. curve: its losses. tables: (step, scale) -> scores, one row per prompt.
    ran: where it was trained, as `where` says it; None where an older kvlib trained it.
    """

    ended: dict
    curve: pd.DataFrame
    tables: dict[tuple[int, float], pd.DataFrame]
    ran: dict | None


@dataclass(frozen=True)
class Opening:
    """What a stage finds before its first unit: the gates that were passed, and the two maps without training scored.

    articles: of each validation prompt. windows: how many are trained on. training_dtype: as torch names it.
    """

    gates: list[dict]
    tables: dict[str, pd.DataFrame]
    articles: list[str]
    windows: int
    training_dtype: str
