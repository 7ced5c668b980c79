"""Make a plan: every stage's downloads, disk, device memory, operations and time, and whether it all fits."""

import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvlib.errors import KvlibError
from kvlib.study.device import training_dtype
from kvlib.study.display import duration
from kvlib.study.plan import fitting, storage
from kvlib.study.plan.bench import Bench
from kvlib.study.plan.devices import GIB, Device
from kvlib.study.plan.memory import Peak
from kvlib.study.plan.peaks import peaks_of
from kvlib.study.plan.work import Part, parts_of
from kvlib.study.profile import Profile, load_profile
from kvlib.study.records import STAGES, read_record
from kvlib.study.run import NOTEBOOKS, Run, home


@dataclass(frozen=True)
class StagePlan:
    """One stage. kept_bytes: in its folder. peaks: its worst moments in device memory. seconds: estimated; done_s: how long
    it took where it is done already."""

    stage: str
    kept_bytes: int
    peaks: list[Peak]
    parts: list[Part]
    seconds: float
    done_s: float | None = None

    @property
    def peak(self) -> Peak:
        return fitting.worst(self.peaks)

    @property
    def flop(self) -> float:
        return sum(part.times * part.cost.flop for part in self.parts)


@dataclass(frozen=True)
class Plan:
    """What `profile` means on `device`. obstacles: why it does not fit, each with what to change; none where it does."""

    profile: Profile
    device: Device
    downloads: list[storage.Download]
    stages: list[StagePlan]
    obstacles: list[str]

    @property
    def fits(self) -> bool:
        return not self.obstacles

    @property
    def seconds(self) -> float:
        """Of what is still to be done."""
        return sum(stage.seconds for stage in self.stages if stage.done_s is None)

    @property
    def download_bytes(self) -> int:
        """Of what is not here yet."""
        return sum(download.bytes for download in self.downloads if not download.here)

    @property
    def disk_bytes(self) -> int:
        """Still to be written: what is downloaded, and the folders of stages that are not done."""
        return self.download_bytes + sum(s.kept_bytes for s in self.stages if s.done_s is None)

    @property
    def verdict(self) -> str:
        """One sentence: it fits, or it does not and what to change."""
        about = f"{self.device.name} ({self.device.memory / GIB:.1f} GiB)"
        if self.fits:
            return f"profile {self.profile.name} fits {about}: {self.disk_bytes / 1e9:.1f} GB of disk, about {duration(self.seconds)}"
        return f"profile {self.profile.name} does not fit {about}: {'; '.join(self.obstacles)}"

    def record(self) -> dict:
        """As JSON keeps it."""
        return {
            "profile": self.profile.name,
            "device": {key: value for key, value in asdict(self.device).items() if value != float("inf")},
            "downloads": [asdict(download) for download in self.downloads],
            "stages": [
                {
                    "stage": s.stage, "kept_bytes": s.kept_bytes, "peak_bytes": int(s.peak.total), "flop": s.flop,
                    "seconds": s.seconds, "done_s": s.done_s, "peaks": [asdict(peak) for peak in s.peaks],
                    "parts": [asdict(part) for part in s.parts],
                }
                for s in self.stages
            ],
            "disk_bytes": self.disk_bytes, "seconds": self.seconds, "fits": self.fits, "verdict": self.verdict,
        }  # fmt: skip


def plan_run(
    profile: str,
    device: Callable[[Profile], Device],
    *,
    run: str | None = None,
    overrides: dict | None = None,
    results: str | Path = "results",
) -> Plan:
    """The plan of a run that may have begun: what it was given before holds, and nothing is written.

    Args:
        profile: a name or path. device: from the profile that results. run: its folder under `results`; the profile's name
            when None. overrides: dotted keys to values, as `Run.open` takes them.
    """
    base, given, remembered = load_profile(profile, overrides), overrides or {}, {}
    folder = home() / results / (base.name if run is None else run)
    begun = (folder / "run.json").exists()
    if begun:
        record = read_record(folder / "run.json", "profile", "overrides")
        if record["profile"] != base.name:
            raise KvlibError(
                f"{folder} is a run of profile {record['profile']!r}, profile {base.name!r} was given: name another run"
            )
        remembered = record["overrides"] if isinstance(record["overrides"], dict) else {}
    effective = load_profile(profile, {**remembered, **given})
    done = {}
    if begun:
        opened = Run(effective, folder.name, folder, {**remembered, **given}, profile)
        summaries = {stage: opened.finished(stage) for stage in STAGES}
        done = {stage: found["duration_s"] for stage, found in summaries.items() if found}
    return make_plan(effective, device(effective), done)


def make_plan(profile: Profile, device: Device, done: dict[str, float] | None = None) -> Plan:
    """The plan of a profile on a device. done: stage -> seconds that it took, of those that are done."""
    done, bench = done or {}, _bench(profile, device)
    parts, peaks, kept = parts_of(bench), peaks_of(bench), storage.kept(bench)

    def stage_plan(stage: str) -> StagePlan:
        seconds = sum(part.times * device.seconds(part.cost) for part in parts[stage])
        return StagePlan(stage, kept[stage], peaks[stage], parts[stage], seconds, done.get(stage))

    plan = Plan(profile, device, storage.downloads(bench), [stage_plan(stage) for stage in STAGES], [])
    obstacles = [*_device(plan), *_positions(bench), *_memory(plan), *_disk(plan)]
    return replace(plan, obstacles=obstacles)


def _device(plan: Plan) -> list[str]:
    if plan.profile.device == "cuda" and plan.device.is_cpu:
        return [
            "its device is cuda and torch finds none here, so name a card with --device, or set device to cpu"
        ]
    return []


def _bench(profile: Profile, device: Device) -> Bench:
    dtype = profile.training.dtype
    if dtype == "auto" and not device.is_cpu:
        dtype = "bfloat16"  # every card of data/devices.yaml has it
    elif dtype == "auto":
        dtype = str(training_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    return Bench.of(profile, dtype, device.is_cpu)


def _with(profile: Profile, settings: fitting.Overrides) -> Profile:
    """The profile under other settings, which are not validated again: peaks alone are read from it."""
    for key, value in settings.items():
        part, name = key.split(".")
        inner = getattr(profile, part).model_copy(update={name: value})
        profile = profile.model_copy(update={part: inner})
    return profile


def _memory(plan: Plan) -> list[str]:
    """One sentence's part for all stages with the same trouble."""
    found: dict[str, list[str]] = {}
    for stage in plan.stages:
        if stage.done_s is None and stage.peak.total > plan.device.room:
            found.setdefault(_too_much(plan, stage), []).append(stage.stage)
    return [f"{_listed(stages)} {trouble}" for trouble, stages in found.items()]


def _listed(stages: list[str]) -> str:
    return f"stage {stages[0]} needs" if len(stages) == 1 else f"stages {' and '.join(stages)} need"


def _too_much(plan: Plan, stage: StagePlan) -> str:
    room, peak = plan.device.room, stage.peak

    def peaks_with(settings: fitting.Overrides) -> list[Peak]:
        return peaks_of(_bench(_with(plan.profile, settings), plan.device))[stage.stage]

    needed = f"{peak.total / GIB:.1f} GiB ({peak.phase}) of {room / GIB:.1f} that can be had"
    settings = fitting.remedy(plan.profile, stage.stage, room, peaks_with)
    if settings:
        return f"{needed}, so set {fitting.said(settings)}"
    return f"{needed}, {peak.weights / GIB:.1f} of them weights, so run {NOTEBOOKS[stage.stage]} on a larger card"


def _disk(plan: Plan) -> list[str]:
    """Only where the device is this machine's: another one's disk is not known."""
    place = home()
    free = shutil.disk_usage(place).free
    if not plan.device.here or plan.disk_bytes <= free:
        return []
    windows = min(plan.profile.partitions.screen_train.items, plan.profile.partitions.confirm_train.items)
    per_window = sum(_windows_of(plan, stage) for stage in ("screening", "confirmation"))
    fewer = windows - math.ceil((plan.disk_bytes - free) / per_window) if per_window else 0
    remedy = f"free {(plan.disk_bytes - free) / 1e9:.1f} GB"
    if fewer >= 1:
        remedy += f" or set partitions.screen_train.items and partitions.confirm_train.items to {fewer}"
    return [
        f"{plan.disk_bytes / 1e9:.1f} GB of disk are needed and {place} has {free / 1e9:.1f} free, so {remedy}"
    ]


def _windows_of(plan: Plan, stage: str) -> int:
    """Bytes that one window less would save in a stage that is still to be done."""
    todo = any(one.stage == stage and one.done_s is None for one in plan.stages)
    return storage.windows_bytes(_bench(plan.profile, plan.device), 1) if todo else 0


def _positions(bench: Bench) -> list[str]:
    profile, limit = bench.profile, min(bench.target.positions, bench.source.positions)
    asked = {
        "latency.prefix_tokens": max(profile.latency.prefix_tokens),
        "partitions.window_tokens": profile.partitions.window_tokens,
        "prompt.prefix_tokens": profile.prompt.prefix_tokens + profile.prompt.forced_steps,
    }
    return [
        f"{key} asks for {count:,} positions and the pair has {limit:,}, so lower it"
        for key, count in asked.items()
        if count > limit
    ]
