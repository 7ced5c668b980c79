"""What of a run can be removed: caches and pages that can be made again, and what belongs to settings it no longer has.

Records are never among it: no summary, no table, no map, no ledger, and no arm of the run's present settings.
"""

import contextlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from kvlib.study.arms import all_arms
from kvlib.study.evaluation import work_folder
from kvlib.study.latency import parts_key
from kvlib.study.learning import Task, task_folder
from kvlib.study.names import extra_scripts, scripts
from kvlib.study.records import PARTIAL, remove
from kvlib.study.run import Run
from kvlib.study.screening import caches_key, trainings_key
from kvlib.study.standing import DAMAGED, DONE, STALE, frozen_hash, standing

TRAINED = ("screening", "confirmation")  # stages with caches and arms of their own


@dataclass(frozen=True)
class Part:
    """A file or folder of a run, and in words why it may go."""

    path: Path
    why: str

    @property
    def bytes(self) -> int:
        if self.path.is_symlink():
            return 0
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def caches(run: Run) -> list[Part]:
    """Stored caches: stages whose records are whole never read them again, and others fill them anew."""
    found = [
        Part(
            path,
            "caches of the training windows" if path.name.startswith("windows") else "caches of the prompts",
        )
        for stage in TRAINED
        for path in _matching(run.stage(stage), "windows-*", "prompts-*")
    ]
    return found + [
        Part(path, "caches of the final prompts")
        for path in _matching(run.stage("frozen_evaluation"), "work-*/prompts-*.safetensors")
        if standing(run, "frozen_evaluation").state == DONE
    ]


def pages(run: Run) -> list[Part]:
    """Executed notebooks, the book and what killed commands left: they are made again from the records.

    Only by the names that kvlib gives: a file that someone else put into the run's folder is none of them.
    """
    executed = [
        path for name in scripts() | extra_scripts() for path in (f"{name}.ipynb", f"{name}.failed.ipynb")
    ]
    said = dict.fromkeys((f"notebooks/{name}" for name in executed), "an executed notebook") | {
        "book": "the book",
        "book.json": "what was noted of the book's build",
        "book.log": "what was noted of the book's build",
        "book.pdf": "the book as a PDF",
        ".book-*": "left by a build that was killed",
        f"**/{PARTIAL}*": "left by a write that was killed",
    }
    return [Part(path, why) for pattern, why in said.items() for path in _matching(run.folder, pattern)]


def stale(run: Run) -> list[Part]:
    """Arms, caches and timings of settings that the run no longer has; nothing where the present ones cannot be told.

    A stage whose summary is itself of other settings keeps all that it rests on, until it was run again.
    """
    found: list[Part] = []
    if standing(run, "pair").state == DONE:
        dtype = getattr(torch, run.require("pair", "clean")["training_dtype"])
        key, arms = caches_key(run, dtype), trainings_key(run, dtype)
        for stage in [stage for stage in TRAINED if standing(run, stage).state not in (STALE, DAMAGED)]:
            for path in _matching(run.stage(stage), "windows-*", "prompts-*", "ridge-*"):
                if path.name.split("-", 1)[1].partition(".")[0] != key:
                    found.append(Part(path, "made for other settings"))
            wanted = _present_arms(run, stage, arms)
            for path in _matching(run.stage(stage) / "arms", "*"):
                if path not in wanted:
                    found.append(Part(path, "an arm of other settings"))
    frozen = frozen_hash(run)
    if frozen is not None:
        work, timed = work_folder(run, frozen), parts_key(run, frozen)[:16]
        for path in _matching(run.stage("frozen_evaluation"), "work-*/prompts-*.safetensors"):
            if path.parent != work:
                found.append(Part(path, "caches of the final prompts, for other settings"))
        measured = standing(run, "latency").state not in (STALE, DAMAGED)
        for path in _matching(run.stage("latency") / "parts", "*.parquet") if measured else []:
            if not path.stem.endswith(f"-{timed}"):
                found.append(Part(path, "times of other settings"))
    return found


def _present_arms(run: Run, stage: str, key: str) -> set[Path]:
    """The folders of every training that the stage may ask for in the run's present settings."""
    profile, arms = run.profile, all_arms(run.profile.screening)
    screening = run.finished("screening")
    if stage == "screening":
        tasks = [Task(arm, profile.training.seed, profile.training.steps) for arm in arms]
    else:
        finalists = [arm for arm in arms if screening is None or arm.id in screening["finalists"]]
        choices = product(finalists, profile.confirmation.seeds, profile.screening.checkpoints, (False, True))
        tasks = [Task(*choice) for choice in choices]
    return {task_folder(run.stage(stage) / "arms", key, task) for task in tasks}


def _matching(folder: Path, *patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern)})


def delete(parts: list[Part]) -> list[Part]:
    """Remove them; those of which something is left. The caller holds the run's lock, and no stage may be at work either."""
    for part in parts:
        with contextlib.suppress(OSError):
            remove(part.path)
    return [part for part in parts if part.path.exists() or part.path.is_symlink()]
