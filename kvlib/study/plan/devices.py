"""Devices: what data/devices.yaml says of a card, what is found here, and how long a cost takes on it."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from kvlib.clocks import clock, memory_bandwidth_gb_s
from kvlib.errors import KvlibError
from kvlib.linear import linear
from kvlib.study.plan.operations import Cost
from kvlib.study.profile import DATA, Profile

DEVICES_FILE = DATA / "devices.yaml"
GIB = 2**30
PROBE_SIZE, PROBE_SECONDS, PROBE_BYTES = 1536, 0.15, 2**27


@dataclass(frozen=True)
class Device:
    """Speeds are what real work reaches: operations or bytes per second. memory: bytes that torch finds.

    half, single: of 16-bit and of float32 products. bandwidth: of its own memory. link: from the host's memory. layer_s: the
    least that a pass through one layer takes. reserved: bytes of `memory` that tensors cannot have. source: where the
    figures are from. here: whether this machine has it.
    """

    name: str
    half: float
    single: float
    bandwidth: float
    memory: int
    link: float
    disk: float
    layer_s: float
    reserved: float
    source: str
    here: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.link == math.inf

    @property
    def room(self) -> float:
        """Bytes that tensors can have."""
        return self.memory - self.reserved

    def seconds(self, cost: Cost) -> float:
        """How long: the slowest of arithmetic, memory, launches and transfers, which overlap; the disk comes on top."""
        arithmetic = cost.half / self.half + cost.single / self.single
        moving = cost.link / self.link
        return (
            max(arithmetic, cost.read / self.bandwidth, cost.layers * self.layer_s, moving)
            + cost.disk / self.disk
        )


def device_names(path: Path = DEVICES_FILE) -> list[str]:
    """What `device_named` knows."""
    return ["auto", "cpu", *_read(path)["devices"]]


def device_for(profile: Profile, name: str = "auto") -> Device:
    """As `device_named`; `auto` is what the profile's own device comes to on this machine."""
    return device_named("cpu" if name == "auto" and profile.device == "cpu" else name)


def device_named(name: str, path: Path = DEVICES_FILE) -> Device:
    """A device by its name in data/devices.yaml, `cpu` (measured in a second), or `auto`: the one that is found.

    Raises: KvlibError for a name that is none of these.
    """
    known, name = _read(path), name.lower()
    if name == "auto":
        return found_device(path)
    if name == "cpu":
        return measured_device("cpu", known["assumptions"])
    if name not in known["devices"]:
        raise KvlibError(
            f"device {name!r} given, expected one of auto, cpu, {', '.join(known['devices'])}: name one of these, or add yours to "
            "data/devices.yaml"
        )
    return _stated(known, name)


def found_device(path: Path = DEVICES_FILE) -> Device:
    """The first CUDA device by its stated figures, measured when data/devices.yaml does not know it; else the processor."""
    known = _read(path)
    if not torch.cuda.is_available():
        return measured_device("cpu", known["assumptions"])
    called = torch.cuda.get_device_name(0)
    for name, entry in known["devices"].items():
        if any(part in called for part in entry["match"]):
            total = torch.cuda.get_device_properties(0).total_memory
            return _stated(known, name, total)
    return measured_device("cuda", known["assumptions"])


def _stated(known: dict, name: str, memory: int | None = None) -> Device:
    entry, assumed = known["devices"][name], known["assumptions"]
    share, total = assumed["efficiency"], memory or int(entry["memory"] * GIB)
    return Device(
        entry["name"], entry["bf16"] * 1e12 * share, entry["fp32"] * 1e12 * share, entry["bandwidth"] * 1e9 * share, total,
        entry["link"] * 1e9 * share, assumed["disk"] * 1e9, assumed["layer_ms"] / 1e3, _reserved(total, assumed),
        f"{entry['source']}, {share:.0%} of its figures", memory is not None,
    )  # fmt: skip


def _reserved(total: int, assumed: dict) -> float:
    return assumed["reserved"] * GIB + assumed["slack"] * total


def measured_device(kind: str, assumed: dict) -> Device:
    """This machine's `cpu` or `cuda`, by one large product in each format and one long sum."""
    share, on_cpu = assumed["measured"], kind == "cpu"
    speeds = {dtype: share * _product_flops(kind, dtype) for dtype in (torch.bfloat16, torch.float32)}
    bandwidth = share * 1e9 * memory_bandwidth_gb_s(kind, size_bytes=PROBE_BYTES, repetitions=3)
    total = _host_memory() if on_cpu else torch.cuda.get_device_properties(0).total_memory
    threads = torch.get_num_threads()
    cores = f"{threads} thread{'s' if threads > 1 else ''} of this processor"
    name = cores if on_cpu else torch.cuda.get_device_name(0)
    return Device(
        name, speeds[torch.bfloat16], speeds[torch.float32], bandwidth, total, math.inf if on_cpu else 25e9 * share,
        assumed["disk"] * 1e9, 0.0 if on_cpu else assumed["layer_ms"] / 1e3, _reserved(total, assumed),
        f"measured just now, {share:.0%} of it", True,
    )  # fmt: skip


def _product_flops(kind: str, dtype: torch.dtype) -> float:
    x = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=kind)
    best, ends = math.inf, time.monotonic() + PROBE_SECONDS
    while best == math.inf or time.monotonic() < ends:
        with clock(x.device) as read:
            linear(x, x)  # as the models multiply
            best = min(best, read() / 1e3)
    return 2 * PROBE_SIZE**3 / best


def _host_memory() -> int:
    import psutil

    return psutil.virtual_memory().total


def _read(path: Path) -> dict:
    return yaml.safe_load(Path(path).read_text("utf-8"))
