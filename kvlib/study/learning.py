"""Train one arm on stored windows: seeded data order, checkpoints, and a record of how it ended."""

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from kvlib.maps import ResidualMap, RidgeMap, load_map, save_map
from kvlib.study.arms import Arm
from kvlib.study.profile import Profile
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_json, read_table, write_json, write_table
from kvlib.study.store import WindowStore
from kvlib.training import train


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

    def place(self, arm: Arm, seed: int) -> Path:
        """The arm's folder; arms of other settings have others, so that nothing finished is overwritten."""
        return self.folder / f"{arm.id}-seed{seed}-{hash_json([self.key, arm.record(), seed])[:10]}"

    def checkpoint(self, arm: Arm, seed: int, step: int) -> Path:
        return self.place(arm, seed) / f"step-{step:05d}.safetensors"

    def load(self, arm: Arm, seed: int, step: int) -> ResidualMap:
        return load_map(self.checkpoint(arm, seed, step), pair=self.pair)

    def finished(self, arm: Arm, seed: int) -> dict | None:
        path = self.place(arm, seed) / "trained.json"
        return read_json(path) if path.exists() else None

    def curve(self, arm: Arm, seed: int) -> pd.DataFrame:
        return read_table(self.place(arm, seed) / "curve.parquet")

    def train(self, arm: Arm, seed: int, steps: int, progress: Progress, note: str) -> dict:
        """Train unless a record says it was done; the record is written last.

        Returns: {"status": "finished" | "not_finite", "reason", "parameters", "seconds", "train_loss_last"}.
        """
        record = self.finished(arm, seed)
        if record is not None:
            progress.skip(steps)
            return record
        started, settings = time.time(), self.profile.training
        initial = ResidualMap.initial(
            *self.scale, self.store.geometry.head_dim, arm.rank, residual=arm.residual, features=arm.features,
            base=self.ridge if arm.base == "ridge" else None, generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        keep = {*self.profile.screening.checkpoints, steps}
        rows, status, reason = [], "finished", None
        for step in train(
            self.target, initial, lambda number, warm: self.batch(seed, number, warm), steps=steps,
            warmup_steps=arm.warmup_steps, learning_rate=arm.learning_rate, head_weight=self.head_weight,
            micro_batch=settings.micro_batch,
        ):  # fmt: skip
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
                save_map(step.map, self.checkpoint(arm, seed, step.number), pair=self.pair,
                         provenance={"arm": arm.record(), "seed": seed, "step": step.number, "stage_key": self.key})  # fmt: skip
            progress.advance(1, f"{note}, step {step.number} of {steps}")
        write_table(
            self.place(arm, seed) / "curve.parquet",
            pd.DataFrame(rows, columns=["arm", "seed", "step", "phase", "loss"]),
        )
        tail = [row["loss"] for row in rows[-10:] if row["phase"] == "kl"]
        record = {
            "status": status, "reason": reason, "parameters": initial.parameters,
            "seconds": round(time.time() - started, 1), "train_loss_last": sum(tail) / len(tail) if tail else None,
        }  # fmt: skip
        write_json(self.place(arm, seed) / "trained.json", record)
        return record

    def batch(self, seed: int, number: int, warm: bool):
        """Step `number`'s windows and cuts: a function of the seed alone, so that arms see the same data."""
        settings, windows = self.profile.training, self.store.windows
        rng = random.Random(f"{seed}/{number}")
        steps = self.profile.prompt.forced_steps
        # A pass takes every window once, in an order of its own, before any comes again.
        count, size = len(windows), min(settings.prompts_per_step, len(windows))
        chosen = []
        for draw in range(number * size, (number + 1) * size):
            order = random.Random(f"{seed}/pass/{draw // count}").sample(range(count), count)
            chosen.append(order[draw % count])
        cuts = [rng.randint(settings.min_prefix_tokens, windows.shape[1] - steps) for _ in chosen]
        return self.store.batch(chosen, cuts, steps, with_target=warm)
