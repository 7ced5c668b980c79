"""What the benchmarks share: the machine's description, interleaved clocks, tables; models and maps are in shapes.py.

Every time stands beside the others of its run: ratios are within one run, never between two.
"""

import contextlib
import gc
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `import kvlib` from a checkout that is not installed

import torch  # noqa: E402
import transformers  # noqa: E402

from kvlib.cache import Geometry  # noqa: E402
from kvlib.clocks import memory_bandwidth_gb_s, percentiles, synchronise  # noqa: E402
from kvlib.errors import KvlibError  # noqa: E402

LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
TINY_LENGTHS = (16, 32, 64)
TINY_BANDWIDTH_BYTES = 2**24
CUDA_BANDWIDTH_BYTES = 2**32  # a GPU reads less in no time at all
PARTIAL = ".partial-"


# --- the machine and the tables


def machine(device: torch.device | str = "cpu", *, tiny: bool = False) -> dict:
    """What the times depend on. `tiny` measures the bandwidth of a few MiB: quick, and no figure to quote."""
    device = torch.device(device)
    size = {"size_bytes": TINY_BANDWIDTH_BYTES} if tiny else {}
    if device.type == "cuda" and not tiny:
        size = {"size_bytes": CUDA_BANDWIDTH_BYTES}
    return {
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "memory_bandwidth_gb_s": memory_bandwidth_gb_s(device, **size),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_table(path: Path | None, name: str, rows: list[dict], **extra) -> dict:
    """Print `rows` and, where a path is given, write {"benchmark": name, "machine", "rows", **extra} as JSON.

    Args:
        extra: more keys; machine=machine(device) where the times are a GPU's, this processor's otherwise.

    Returns: what is written. Raises KvlibError when it cannot be; the file is then as it was before.
    """
    record = {"benchmark": name, "machine": extra.pop("machine", None) or machine(), "rows": rows, **extra}
    print(f"\n{name} on {record['machine']['name']}\n{aligned(rows)}", flush=True)
    if path is not None:
        write_json(path, record)
        print(f"written to {path}", flush=True)
    return record


def write_json(path: Path, record: dict) -> None:
    """Whole or not at all."""
    path, temporary = Path(path), None
    try:
        text = json.dumps(record, indent=1, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL)
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, ValueError, TypeError) as error:
        raise KvlibError(
            f"{path} could not be written ({error}), expected a writable place and figures that are finite: choose another --out"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def aligned(rows: list[dict]) -> str:
    """Rows as text: columns in the first row's order, then those that only later rows have; numbers to the right."""
    if not rows:
        return "(no rows)"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns] + [[_cell(row.get(name)) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    number = [any(isinstance(row.get(n), int | float) for row in rows) for n in columns]
    return "\n".join(
        "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in zip(line, widths, number)).rstrip()
        for line in lines
    )


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


# --- clocks


@dataclass(frozen=True, eq=False)
class Clocked:
    """One thing to time. `prepare` is off the clock, what it returns is given to `run`, which is on it.

    `run` may return (anything, milliseconds): those are then kept beside the whole, as its part. Of the repetitions
    after the warm-ups, it takes part in every `every`-th.
    """

    name: str
    run: Callable
    prepare: Callable[[], object] | None = None
    every: int = 1


@dataclass(frozen=True)
class Timing:
    """ms: one per repetition. part_ms: what `run` itself reported. first_ms: the very first call, warm-ups included."""

    ms: list[float]
    part_ms: list[float]
    first_ms: float


@torch.no_grad()
def interleave(
    calls: Iterable[Clocked],
    *,
    warmups: int,
    repetitions: int,
    seed: int,
    device: torch.device | str = "cpu",
    enough: Callable[[int], bool] | None = None,
) -> dict[str, Timing]:
    """Time each call once per round, in an order drawn anew: drift and the first one's bad luck hit all alike.

    Args:
        enough: called before each further round with the repetitions that are complete, below 0 while warming up.
            True ends the warm-ups, or the whole after at least one repetition.
    """
    draw, device = random.Random(seed), torch.device(device)
    order = list(calls)
    timings: dict[str, Timing] = {}
    for done in range(-warmups, repetitions):
        if enough is not None and done not in (-warmups, 0) and enough(done):
            if done > 0:
                break
            continue
        draw.shuffle(order)
        for call in order:
            if done > 0 and done % call.every:
                continue
            ms, part_ms = _timed(call, device)
            kept = timings.setdefault(call.name, Timing([], [], ms))
            if done >= 0:
                kept.ms.append(ms)
                kept.part_ms.extend(part_ms)
    return timings


def _timed(call: Clocked, device: torch.device) -> tuple[float, list[float]]:
    """(milliseconds, those that the call reported itself), the device synchronised on both sides."""
    given = () if call.prepare is None else (call.prepare(),)
    collecting = gc.isenabled()
    gc.disable()
    try:
        synchronise(device)
        start = time.perf_counter()
        result = call.run(*given)
        synchronise(device)
        ms = (time.perf_counter() - start) * 1e3
    finally:
        if collecting:
            gc.enable()
    reported = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], float)
    return ms, [result[1]] if reported else []


def floor_row(model, prefix_tokens: int, bandwidth_gb_s: float) -> dict:
    """What a step after `prefix_tokens` − 1 cached positions must read at least, and how long reading takes.

    Every parameter once, a tied head once, of an untied embedding one row.
    """
    shape = Geometry.of(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(p.numel() for p in model.parameters())
    if head is not embedding:
        weights -= embedding.numel() - embedding.shape[1]
    size = embedding.element_size()
    cache = 2 * shape.layers * shape.heads * (prefix_tokens - 1) * shape.head_dim
    return {
        "prefix_tokens": prefix_tokens, "weight_bytes": weights * size, "cache_bytes": cache * size,
        "floor_ms": (weights + cache) * size / bandwidth_gb_s / 1e6,
    }  # fmt: skip


def timing_row(timing: Timing) -> dict:
    p50_ms, p95_ms = percentiles(timing.ms)
    return {"p50_ms": p50_ms, "p95_ms": p95_ms, "repetitions": len(timing.ms)}
