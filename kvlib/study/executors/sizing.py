"""How many processes of this machine share a stage's units, and how many threads each of them has.

On a processor, trainings side by side get more out of its cores than one after another on all of them. There are as many
workers as torch has threads here, but no more than units, than the memory that is free suffices for, and than get
WORTHWHILE operations each, by the plan's counts: a process takes seconds to start, and a run of the smoke profile is done
before it would be up. The threads that torch has are divided among them.

All units of the stage count, those too that are finished, and the division is kept with the stage: one that is stopped and
started again does what is left with the same number of threads, so that its records are the same bytes, whatever is free by
then. Only the number of workers follows what is left and free.
"""

import psutil

from kvlib.study.device import device_of, training_dtype
from kvlib.study.executors import Settings
from kvlib.study.models import load_pair_config
from kvlib.study.plan.bench import Bench as Planned
from kvlib.study.plan.memory import FLOAT32
from kvlib.study.plan.peaks import peaks_of
from kvlib.study.plan.shapes import shape_of_config
from kvlib.study.plan.work import unit_flop
from kvlib.study.run import Run
from kvlib.study.shares import Share, keep_share, share_of
from kvlib.study.units import Unit

WORTHWHILE = 5e12  # operations: about half a minute of one core
PYTHON_BYTES = 0.5e9  # of a process that has torch and transformers and no model
SPARE = 0.8  # share of the free memory that workers may plan with


def share_out(run: Run, stage: str, units: list[Unit], left: int, threads: int, settings: Settings) -> Share:
    """How the units are shared out, as the stage's folder says it from now on.

    Args:
        stage: "screening" or "confirmation". units: all of the call; left: of which so many are not finished. threads: that
        torch has here.
    """
    folder, key, count = run.stage(stage), run.key(stage), len(units)
    before = share_of(folder, key, count)
    most = settings.workers or _most(run, stage, units, threads)
    each = settings.threads_per_unit or (before and before.threads) or max(1, threads // min(most, count))
    workers = settings.workers or min(most, max(1, threads // each))
    share = Share(min(workers, left), each)
    keep_share(folder, key, count, share)
    return share


def _most(run: Run, stage: str, units: list[Unit], threads: int) -> int:
    """The most workers that are worth their start and have room. On a card, one: it has no idle cores to share out."""
    if device_of(run.profile).type != "cpu" or min(threads, len(units)) == 1:
        return 1
    planned = planned_for(run)
    worth = int(operations(planned, stage, units) // WORTHWHILE)
    fit = int(psutil.virtual_memory().available * SPARE // worker_bytes(planned, stage))
    return max(1, min(threads, len(units), worth, fit))


def planned_for(run: Run) -> Planned:
    """What the plan's counts are made from, of a run whose pair is there."""
    target, source = (shape_of_config(load_pair_config(run, role), role) for role in ("target", "source"))
    dtype = training_dtype(run.profile.training.dtype, device_of(run.profile))
    return Planned(run.profile, target, source, str(dtype).removeprefix("torch."), on_cpu=True)


def operations(planned: Planned, stage: str, units: list[Unit]) -> float:
    """Of all units: their trainings, and the scorings that go with them."""
    prompts = _prompts(planned, stage)
    return sum(
        unit_flop(
            planned, unit.task.arm, 0 if unit.trained else unit.task.steps, prompts,
            sum(len(scales) for _, scales in unit.scorings),
        )
        for unit in units
    )  # fmt: skip


def worker_bytes(planned: Planned, stage: str) -> float:
    """What a worker holds at its worst: the plan's peak of training or scoring; the target's matrices and its head, laid out
    once for each direction; the validation prompts; and Python itself. Stored windows are the system's to keep or drop."""
    target, dtype = planned.runner("target", planned.training_dtype), planned.profile.pair.dtype
    peak = max(p.total for p in peaks_of(planned)[stage] if p.phase in ("training", "scoring"))
    laid_out = 2 * (target.shape.layers * target.shape.layer * target.size + target.shape.head * FLOAT32)
    prompts = target.shape.cache_bytes(_prompts(planned, stage), planned.cached, dtype)
    return peak + laid_out + prompts + PYTHON_BYTES


def _prompts(planned: Planned, stage: str) -> int:
    partitions = planned.profile.partitions
    return (partitions.screen_validate if stage == "screening" else partitions.confirm_validate).items
