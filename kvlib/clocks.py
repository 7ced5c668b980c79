"""What times are taken with: a clock that waits for the device, percentiles, and the bandwidth that floors rest on."""

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Iterable

import numpy as np
import torch

P95_MIN_REPETITIONS = 20  # below, the 95th percentile is the maximum by another name
BANDWIDTH_BYTES = 2**29  # far larger than any processor's cache


@contextlib.contextmanager
def clock(device: torch.device):
    """A function that reads milliseconds since entering, the device synchronised before each look."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        synchronise(device)
        start = time.perf_counter()

        def read() -> float:
            synchronise(device)
            return (time.perf_counter() - start) * 1e3

        yield read
    finally:
        if collecting:
            gc.enable()


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was given; a CPU always has."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def percentiles(ms: Iterable[float]) -> tuple[float, float | None]:
    """(p50, p95); p95 is None below 20 repetitions."""
    ms = list(ms)
    return statistics.median(ms), float(np.percentile(ms, 95)) if len(ms) >= P95_MIN_REPETITIONS else None


@torch.no_grad()
def memory_bandwidth_gb_s(
    device: torch.device | str = "cpu", *, size_bytes: int = BANDWIDTH_BYTES, repetitions: int = 10
) -> float:
    """Reading memory: 10⁹ bytes per second, the best of several row sums of one large float32 matrix.

    Bytes read count, once each; next to nothing is written. The best and not the median: it serves as a
    floor, what this machine can do when nothing else is in the way.
    """
    device = torch.device(device)
    matrix = torch.ones(max(1, size_bytes // 2**14), 2**12, device=device)  # rows of 16 KiB
    best = math.inf
    for _ in range(repetitions + 1):
        with clock(device) as read:
            matrix.sum(1)
            best = min(best, read())
    return matrix.numel() * matrix.element_size() / best / 1e6
