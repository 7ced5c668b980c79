"""Train one arm on stored windows: seeded data order, checkpoints, and a record of how it ended."""

import contextlib
import math
import random
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch

from kvlib.errors import KvlibError
from kvlib.maps import ResidualMap, RidgeMap, load_map, save_map
from kvlib.maps.base import map_provenance
from kvlib.study.arms import Arm
from kvlib.study.lowering import STEP, room
from kvlib.study.profile import Profile
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_record, read_table, write_json, write_table
from kvlib.study.store import WindowStore
from kvlib.training import Frozen, train

CURVE = ["arm", "seed", "step", "phase", "loss"]
ENDS = ("finished", "not_finite")


@dataclass(frozen=True)
class Task:
    """One training: an arm, a seed, and the step at which to stop (the schedule is the whole screen's).

    wrong_prompts: every prompt comes with the source's cache of another article: a control for what can be
    learnt without the right content.
    """

    arm: Arm
    seed: int
    steps: int
    wrong_prompts: bool = False


def task_folder(folder: Path, key: str, task: Task) -> Path:
    """The task's folder; tasks of other settings have others, so that nothing finished is overwritten.

    folder, key: the stage's `arms` folder, and what stands for everything but the arm and the seed.
    """
    settings = [task.arm.record(), task.seed, task.steps, *(["wrong prompts"] if task.wrong_prompts else [])]
    wrong = "-wrong-prompts" if task.wrong_prompts else ""
    return folder / f"{task.arm.id}-seed{task.seed}{wrong}-{hash_json([key, *settings])[:10]}"


def checkpoint_file(step: int) -> str:
    return f"step-{step:05d}.safetensors"


def checkpoint_provenance(key: str, task: Task, step: int) -> dict:
    """What a checkpoint's file says of where it came from."""
    wrong = {"wrong_prompts": True} if task.wrong_prompts else {}
    return {"arm": task.arm.record(), "seed": task.seed, "step": step, "stage_key": key, **wrong}


def last_loss(rows: list[dict]) -> float | None:
    """Mean KL loss over the last ten steps of a curve; None where none of them was of that phase."""
    tail = [row["loss"] for row in rows[-10:] if row["phase"] == "kl"]
    return sum(tail) / len(tail) if tail else None


@dataclass
class Trainer:
    """What every arm of a stage shares. `target` is in the dtype that training computes in."""

    profile: Profile
    store: WindowStore
    target: object
    head_weight: torch.Tensor  # (V, C) float32
    ridge: RidgeMap
    scale: tuple[torch.Tensor, torch.Tensor]  # σ of keys and values, each (L, H)
    pair: str  # fingerprint
    folder: Path
    key: str  # of everything but the arm and the seed
    articles: list[str]  # of each window
    noted: Path  # the folder of the stage whose record says what memory did not suffice for

    @cached_property
    def frozen(self) -> Frozen:
        """Weights as they multiply fastest: laid out once for all arms."""
        settings = self.profile.training
        rows = (settings.micro_batch or settings.prompts_per_step) * self.profile.prompt.forced_steps
        return Frozen.of(self.target, self.head_weight, rows, settings.checkpoint_activations)

    @property
    def micro_batch(self) -> int:
        """Prompts that go through the target at once while there is memory for them."""
        settings = self.profile.training
        size = min(settings.prompts_per_step, len(self.store.windows))
        return min(settings.micro_batch or size, size)

    def place(self, task: Task) -> Path:
        return task_folder(self.folder, self.key, task)

    def checkpoint(self, task: Task, step: int) -> Path:
        return self.place(task) / checkpoint_file(step)

    def load(self, task: Task, step: int) -> ResidualMap:
        path = self.checkpoint(task, step)
        loaded, wanted = load_map(path, pair=self.pair), checkpoint_provenance(self.key, task, step)
        if map_provenance(path) != wanted:
            raise KvlibError(
                f"{path} is not the checkpoint of {task.arm.id} at step {step}: delete its folder and run the stage again"
            )
        return loaded

    def finished(self, task: Task) -> dict | None:
        path = self.place(task) / "trained.json"
        if not path.exists():
            return None
        record = read_record(path, "status", "reason", "parameters", "seconds")
        if record["status"] not in ENDS or type(record["parameters"]) is not int:
            raise KvlibError(
                f"{path} does not say how a training ended: delete its folder and run the stage again"
            )
        return record

    def curve(self, task: Task) -> pd.DataFrame:
        path = self.place(task) / "curve.parquet"
        table = read_table(path)
        fits = list(table.columns) == CURVE and set(zip(table["arm"], table["seed"])) <= {
            (task.arm.id, task.seed)
        }
        fits = fits and table["step"].tolist() == list(range(1, len(table) + 1))
        whole = len(table) == task.steps or self.finished(task)["status"] == "not_finite"
        if not (fits and whole and table["loss"].map(math.isfinite).all()):
            raise KvlibError(
                f"{path} is not the whole curve of {task.arm.id}: delete its folder and run the stage again"
            )
        return table

    def train(self, task: Task, progress: Progress, note: str) -> dict:
        """Train unless a record says it was done; the record is written last.

        Returns: {"status": "finished" | "not_finite", "reason", "parameters", "seconds", "train_loss_last"}.
        """
        record = self.finished(task)
        if record is not None:
            progress.skip(task.steps)
            return record
        started, settings, arm, seed = time.time(), self.profile.training, task.arm, task.seed
        initial = ResidualMap.initial(
            *self.scale, self.store.geometry.head_dim, arm.rank, residual=arm.residual, features=arm.features,
            base=self.ridge if arm.base == "ridge" else None, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        keep = {*self.profile.screening.checkpoints, task.steps}
        rows, status, reason, device = [], "finished", None, next(self.target.parameters()).device
        help_ = "lower partitions.window_tokens or prompt.forced_steps"
        if not settings.checkpoint_activations:
            help_ = f"set training.checkpoint_activations to true, or {help_}"
        fits = room(self.noted, *STEP, self.micro_batch, help_, progress)
        with contextlib.closing(train(
            self.target, initial.to(device), lambda number, warm: self.batch(task, number, warm), steps=settings.steps,
            warmup_steps=arm.warmup_steps, learning_rate=arm.learning_rate, head_weight=self.head_weight,
            micro_batch=fits, frozen=self.frozen,
        )) as steps:  # fmt: skip
            for step in steps:
                if not math.isfinite(step.loss):
                    status, reason = (
                        "not_finite",
                        f"the {step.phase} loss became {step.loss} at step {step.number}",
                    )
                    break
                rows.append(
                    {"arm": arm.id, "seed": seed, "step": step.number, "phase": step.phase, "loss": step.loss}
                )
                if step.number in keep:
                    path = self.checkpoint(task, step.number)
                    provenance = checkpoint_provenance(self.key, task, step.number)
                    save_map(step.map, path, pair=self.pair, provenance=provenance)
                progress.advance(1, f"{note}, step {step.number} of {task.steps}")
                if step.number == task.steps:
                    break
        write_table(
            self.place(task) / "curve.parquet",
            pd.DataFrame(rows, columns=CURVE),
        )
        record = {
            "status": status, "reason": reason, "parameters": initial.parameters,
            "seconds": round(time.time() - started, 1), "train_loss_last": last_loss(rows),
        }  # fmt: skip
        if fits.most < self.micro_batch:  # said where it is not what the profile asks for
            record["micro_batch"] = fits.most
        write_json(self.place(task) / "trained.json", record)
        return record

    def batch(self, task: Task, number: int, warm: bool):
        """Step `number`'s windows and cuts: a function of the seed alone, so that arms see the same data."""
        settings, windows, seed = self.profile.training, self.store.windows, task.seed
        rng = random.Random(f"{seed}/{number}")
        steps = self.profile.prompt.forced_steps
        # A pass takes every window once, in an order of its own, before any comes again.
        count, size = len(windows), min(settings.prompts_per_step, len(windows))
        chosen = []
        for draw in range(number * size, (number + 1) * size):
            order = random.Random(f"{seed}/pass/{draw // count}").sample(range(count), count)
            chosen.append(order[draw % count])
        cuts = [rng.randint(settings.min_prefix_tokens, windows.shape[1] - steps) for _ in chosen]
        others = [self._other(n, rng) for n in chosen] if task.wrong_prompts else None
        return self.store.batch(chosen, cuts, steps, with_target=warm, source_of=others)

    def _other(self, window: int, rng: random.Random) -> int:
        """A window of another article; of the same one where there is no other."""
        count = range(len(self.store.windows))
        foreign = [n for n in count if self.articles[n] != self.articles[window]]
        return rng.choice(foreign or [n for n in count if n != window])
