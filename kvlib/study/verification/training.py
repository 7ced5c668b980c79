"""The records of one training, compared with one another: how it ended, its curve, its checkpoints, its scores."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvlib.maps import load_map
from kvlib.maps.base import map_provenance
from kvlib.study.learning import CURVE, Task, checkpoint_file, checkpoint_provenance, last_loss, task_folder
from kvlib.study.records import read_record, read_table
from kvlib.study.screening import caches_key, scores_file, trainings_key
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records

SCORES = ["prompt", "kl32", "top1"]


@dataclass(frozen=True)
class Training:
    """A task of a stage, and where its records lie."""

    records: Records
    stage: str
    task: Task

    @property
    def key(self) -> str:
        return trainings_key(self.records.run, self.records.training_dtype)

    @property
    def folder(self) -> Path:
        return task_folder(self.records.run.stage(self.stage) / "arms", self.key, self.task)

    def ended(self) -> dict:
        keys = ("status", "reason", "parameters", "seconds", "train_loss_last")
        return read_record(self.folder / "trained.json", *keys)

    def curve(self) -> pd.DataFrame:
        return read_table(self.folder / "curve.parquet")

    def scores(self, step: int, scale: float) -> pd.DataFrame:
        return pd.DataFrame(read_record(self.folder / scores_file(step, scale), *SCORES))[SCORES]

    def check(self, check: Check) -> dict:
        """Compare the task's own records, and return how it ended."""
        ended, table, task = self.ended(), self.curve(), self.task
        where, place = self.records.name(self.folder), f"{self.records.name(self.folder)}/curve.parquet"
        check.same(f"{place}, columns", list(table.columns), CURVE)
        finished, steps = ended["status"] == "finished", table["step"].tolist()
        owner = (
            [[task.arm.id, task.seed]] if steps else []
        )  # a loss that was not finite at once leaves no row
        check.same(f"{place}, arm and seed", _rows(table, "arm", "seed"), owner)
        check.same(f"{place}, step", steps, list(range(1, (task.steps if finished else len(steps)) + 1)))
        warm = min(task.arm.warmup_steps, len(steps))
        phases = ["warmup"] * warm + ["kl"] * (len(steps) - warm)
        check.same(f"{place}, phase", table["phase"].tolist(), phases)
        loss = last_loss(table.to_dict("records"))
        check.same(f"{where}/trained.json, train_loss_last", ended["train_loss_last"], loss)
        check.same(f"{where}/trained.json, reason", ended["reason"] is None, finished)
        for step in sorted({*self.records.run.profile.screening.checkpoints, task.steps}):
            if step <= len(steps):
                path = self.folder / checkpoint_file(step)
                with check.reading(self.records.name(path)):
                    loaded = load_map(path, pair=self.records.pair)
                    wanted = checkpoint_provenance(self.key, task, step)
                    check.same(f"{self.records.name(path)}, provenance", map_provenance(path), wanted)
                    parameters = f"{self.records.name(path)}, learned numbers"
                    check.same(parameters, loaded.parameters, ended["parameters"])
        return ended


def _rows(table: pd.DataFrame, *columns: str) -> list[list]:
    return table[list(columns)].drop_duplicates().to_numpy().tolist()


def scores_by(table: pd.DataFrame, *columns: str) -> dict:
    """The scores of each map in a table of many: by the column's value, by several columns' values otherwise."""
    by = columns[0] if len(columns) == 1 else list(columns)
    groups = table.groupby(by, sort=False)
    return {key: rows[SCORES].reset_index(drop=True) for key, rows in groups}


def check_windows(records: Records, stage: str, windows: int, check: Check) -> None:
    """The stored windows, where they have not been deleted to save room, are those of the ridge map, and all are there.

    They are not read: they are gigabytes, and a stage that goes on from them compares each with its checksum.
    """
    key, folder = caches_key(records.run, records.training_dtype), records.run.stage(stage)
    stored = folder / f"windows-{key}"
    if not stored.exists():
        return
    where = records.name(stored / "windows.json")
    with check.reading(where):
        record = read_record(stored / "windows.json", "windows", "checksums")
        check.same(f"{where}, checksums", len(record["checksums"]), windows)
        fitted = map_provenance(folder / f"ridge-{key}.safetensors")["windows"]
        check.same(f"{where}, windows", record["windows"], fitted)
    for name in ("source.bin", "target.bin", "hidden.bin"):
        there = (stored / name).is_file()
        check.holds(
            there, f"{records.name(stored / name)}: found no file, expected the caches of {windows} windows"
        )
