"""A stage's models and caches in the process that computes with them, and the units of work done there."""

import os
import platform
from dataclasses import dataclass

import torch

from kvlib.maps import DirectMap, save_map
from kvlib.study.learning import Task, Trainer
from kvlib.study.progress import Progress
from kvlib.study.records import read_record, write_json
from kvlib.study.run import Run
from kvlib.study.scoring import Scorer
from kvlib.study.screening import SCORE_STEPS, prepare, scored_tables, scores_file, stage_gates
from kvlib.study.units import Done, Opening, Unit

RAN = "ran.json"  # beside an arm's records: where its training was begun last


@dataclass(frozen=True)
class Bench:
    """Everything that the units of one stage share. Opened once per process, since that loads both models."""

    run: Run
    trainer: Trainer
    scorer: Scorer

    @classmethod
    def open(cls, run: Run, stage: str, pair: dict, progress: Progress, filled: bool = False) -> "Bench":
        """stage: "screen" or "confirm". pair: the pair stage's summary. filled: as for `prepare`."""
        return cls(run, *prepare(run, stage, pair, progress, filled=filled))

    @property
    def score_cost(self) -> float:
        """What scoring one map counts in the progress."""
        return self.scorer.prompts * SCORE_STEPS

    def opening(self, progress: Progress) -> Opening:
        """Pass the gates and score the maps that need no training. Raises KvlibError where a gate is not passed."""
        passed, tables = stage_gates(self.run, self.trainer, self.scorer, progress), {}
        for name, cache_map in (("direct", DirectMap()), ("ridge", self.trainer.ridge)):
            tables[name] = self.scorer.table(cache_map)
            progress.advance(self.score_cost, f"{name} scored")
        dtype = str(next(self.trainer.target.parameters()).dtype).removeprefix("torch.")
        return Opening(passed, tables, self.scorer.articles, len(self.trainer.store.windows), dtype)

    def finished(self, unit: Unit) -> bool:
        """Whether `do` would find everything in the records."""
        ended, place = self.trainer.finished(unit.task), self.trainer.place(unit.task)
        if ended is None or ended["status"] != "finished":
            return ended is not None
        files = (scores_file(step, scale) for step, scales in unit.scorings for scale in scales)
        return all((place / name).exists() for name in files)

    def do(self, unit: Unit, progress: Progress) -> Done:
        """Train and score what is not in the records yet; the rest is read from there."""
        task, place = unit.task, self.trainer.place(unit.task) / RAN
        ended = self.trainer.finished(task)
        if ended is None:
            write_json(place, self._where(place))
        if not unit.trained:
            ended = self.trainer.train(task, progress, unit.note)
        tables = {}
        for step, scales in unit.scorings if ended["status"] == "finished" else ():
            found = scored_tables(
                self.trainer, self.scorer, task, step, list(scales), progress, self.score_cost
            )
            tables |= {(step, scale): table for scale, table in found.items()}
        ran = read_record(place, "attempt") if place.exists() else None
        return Done(ended, self.trainer.curve(task), tables, ran)

    def save(self, maps: dict[str, tuple[Task, float] | None], provenance: dict, progress: Progress) -> None:
        """Write maps into the stage's folder.

        maps: file name -> (training, residual scale) of its last checkpoint; None for the ridge map.
        """
        for name, made_of in maps.items():
            if made_of is None:
                cache_map = self.trainer.ridge
            else:
                task, scale = made_of
                cache_map = self.trainer.load(task, task.steps).with_scale(scale)
            path = self.trainer.folder.parent / f"{name}.safetensors"
            save_map(cache_map, path, pair=self.trainer.pair, provenance={"map": name, **provenance})

    def _where(self, place) -> dict:
        """Which process begins a training, and how many began it before: those died, or were stopped."""
        before = read_record(place, "attempt")["attempt"] if place.exists() else 0
        return {**where(self.trainer.target), "attempt": before + 1}


def where(model) -> dict:
    """{"node", "process", "device", "threads"} of this process and of the device that holds a model.

    Trained weights are the same bytes wherever device and threads are the same.
    """
    device = next(model.parameters()).device
    name = str(device)
    if device.type == "cuda":
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        name = f"{torch.cuda.get_device_name(device)} ({device} of {shown or 'all'})"
    return {
        "node": platform.node(),
        "process": os.getpid(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
