"""How time and peak memory of a handoff grow with prefix length, prompts, arms and layers.

    python benchmarks/scale.py               # SmolLM2-135M's shape on a CPU, Llama 3.1 8B's on CUDA
    python benchmarks/scale.py --tiny

One axis at a time, the others at their smallest, on the whole depth where layers are not the axis. For each
quantity that has an expectation, the exponent of a straight line in log-log stands beside it, with a verdict:
printed and written, never enforced. An arm is one more map evaluated on the same prefix. Times are interleaved;
memory on a CPU is taken in a process of its own for every figure.
"""

import math
import multiprocessing

import numpy as np
import torch
from common import Clocked, interleave, machine, timing_row, write_table
from paths import DIRECT, Entry, clocked, entry
from shapes import Shape, chosen, random_maps, random_model, random_prefix, shape_options

from kvlib.errors import KvlibError
from kvlib.memory import PeakMemory, keep_no_freed_pages, return_freed_pages

AXES = ("prefix_tokens", "prompts", "arms", "layers")
MODES = ("direct", "absorbed", "in_place", "materialised")
VALUES = {
    "prefix_tokens": (1024, 2048, 4096, 8192), "prompts": (1, 2, 4, 8), "arms": (1, 2, 4, 8),
    "layers": (8, 16, 24, 32),
}  # fmt: skip
TINY_VALUES = {"prefix_tokens": (32, 128), "prompts": (1, 2), "arms": (1, 2), "layers": (1, 3)}
SLACK = 0.25  # exponents are fitted to few points
# (axis, mode, quantity) -> the exponent that theory gives; extra_ms is the time above direct's
EXPECTED = {
    ("prefix_tokens", "absorbed", "extra_ms"): (
        0.0,
        "absorbed: what the map adds does not depend on the prefix",
    ),
    ("prefix_tokens", "in_place", "extra_ms"): (1.0, "in place: every position is corrected once"),
    ("prefix_tokens", "materialised", "peak_extra_bytes"): (1.0, "materialised: a second cache"),
    ("prompts", "materialised", "peak_extra_bytes"): (1.0, "materialised: a second cache for each prompt"),
    ("arms", "absorbed", "p50_ms"): (
        1.0,
        "absorbed: one step for each arm, nothing shared and nothing copied",
    ),
    ("arms", "absorbed", "peak_extra_bytes"): (0.0, "absorbed: arms leave no cache behind"),
    ("layers", "direct", "p50_ms"): (1.0, "direct: layer by layer"),
    ("layers", "absorbed", "p50_ms"): (1.0, "absorbed: layer by layer"),
    ("layers", "materialised", "peak_extra_bytes"): (1.0, "materialised: a second cache in every layer"),
}


def exponent(values, figures) -> float | None:
    """The slope of log(figure) over log(value); None where fewer than two figures are positive."""
    points = [(math.log(v), math.log(f)) for v, f in zip(values, figures) if f is not None and f > 0]
    if len(points) < 2:
        return None
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


class Scene:
    """A model, a prefix and as many maps as there are arms, for one point of one axis."""

    def __init__(self, shape: Shape, at: dict, device: str, dtype: torch.dtype):
        shape = shape.with_layers(at["layers"])
        self.target = random_model(shape, device=device, dtype=dtype)
        self.prefix = random_prefix(
            shape.geometry, at["prefix_tokens"] - 1, batch=at["prompts"], device=device, dtype=dtype
        )
        generator = torch.Generator().manual_seed(0)
        size = (at["prompts"], at["prefix_tokens"])
        self.prompt = torch.randint(shape.vocabulary, size, generator=generator).to(device)
        self.maps = [
            random_maps(shape.geometry, device=device, seed=arm)["linear"] for arm in range(at["arms"])
        ]

    def call(self, mode: str) -> Clocked:
        """Every arm in turn on the prefix; in place, each on a copy made off the clock."""
        arms = [self._entry(mode, cache_map) for cache_map in self.maps]
        calls = [clocked(arm, self.target, self.prompt, self.prefix) for arm in arms]

        def prepare():
            return [() if call.prepare is None else (call.prepare(),) for call in calls]

        def run(prepared):
            for call, given in zip(calls, prepared):
                call.run(*given)

        return Clocked(mode, run, prepare)

    @staticmethod
    def _entry(mode: str, cache_map) -> Entry:
        return DIRECT if mode == "direct" else entry("learned", cache_map, mode)


def points_of(values: dict, smallest: dict):
    """(axis, value, where) for every point; where: the value on each axis."""
    for axis in AXES:
        for value in values[axis]:
            yield axis, value, {**smallest, axis: value}


def measure_scale(
    shape: Shape,
    values: dict,
    *,
    device: str,
    dtype: torch.dtype,
    warmups: int,
    repetitions: int,
    memory: bool = True,
) -> list[dict]:
    """One row per axis, value and mode. Raises KvlibError when a process that measures memory dies."""
    smallest = {axis: min(values[axis]) for axis in AXES}
    smallest["layers"] = max(values["layers"])
    points, rows = list(points_of(values, smallest)), []
    peaks = {}
    if memory:
        for axis, value, at in points:
            peaks |= {(axis, value, mode): _peak(shape, at, mode, device, dtype) for mode in MODES}
            print(f"{axis} {value}: memory", flush=True)
    for axis, value, at in points:
        scene = Scene(shape, at, device, dtype)
        counts = {"warmups": warmups, "repetitions": repetitions, "seed": value, "device": device}
        timings = interleave([scene.call(mode) for mode in MODES], **counts)
        direct_ms = timing_row(timings["direct"])["p50_ms"]
        for mode in MODES:
            times = timing_row(timings[mode])
            rows.append(
                {
                    "axis": axis,
                    "value": value,
                    "mode": mode,
                    **times,
                    "extra_ms": times["p50_ms"] - direct_ms if mode != "direct" else None,
                    "peak_extra_bytes": peaks.get((axis, value, mode)),
                }
            )
        print(f"{axis} {value}: time", flush=True)
    return rows


def growth(rows: list[dict]) -> list[dict]:
    """Each quantity's exponent, with what was expected and a verdict where something was."""
    table = []
    for axis in AXES:
        for mode in MODES:
            own = [row for row in rows if (row["axis"], row["mode"]) == (axis, mode)]
            if not own:
                continue
            for quantity in ("p50_ms", "extra_ms", "peak_extra_bytes"):
                found = exponent([row["value"] for row in own], [row[quantity] for row in own])
                expected, sentence = EXPECTED.get((axis, mode, quantity), (None, None))
                if expected is None and found is None:
                    continue
                verdict = None if expected is None else _verdict(own, quantity, found, expected)
                table.append(
                    {
                        "axis": axis, "mode": mode, "quantity": quantity, "exponent": found, "expected": expected,
                        "verdict": verdict, "expectation": sentence,
                    }
                )  # fmt: skip
    return table


def _verdict(rows: list[dict], quantity: str, found: float | None, expected: float) -> str:
    if quantity == "extra_ms" and expected == 0:
        # Next to nothing has no slope: it must stay below a twentieth of the step, wherever it is.
        shares = [row["extra_ms"] / row["p50_ms"] for row in rows]
        return "as expected" if max(shares) < 0.05 else f"otherwise: up to {max(shares):.0%} of the step"
    if found is None:
        return "not measured"
    return "as expected" if abs(found - expected) <= SLACK else "otherwise"


def _peak(shape: Shape, at: dict, mode: str, device: str, dtype: torch.dtype) -> int | None:
    """Peak extra bytes of one call; on a CPU in a process that has done nothing else."""
    if torch.device(device).type != "cpu":
        return _probe(shape, at, mode, device, dtype)
    context = multiprocessing.get_context(
        "forkserver"
    )  # forked from a process that has run no parallel operation
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_child, args=(sender, shape, at, mode, str(dtype).removeprefix("torch."))
    )
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as error:
        process.join()
        raise KvlibError(
            f"measuring the memory of {mode} at {at} ended with status {process.exitcode}, expected a figure: free some memory, "
            "or pass --no-memory"
        ) from error
    finally:
        process.join()


def _child(sender, shape: Shape, at: dict, mode: str, dtype: str) -> None:
    keep_no_freed_pages()
    sender.send(_probe(shape, at, mode, "cpu", getattr(torch, dtype)))


@torch.no_grad()
def _probe(shape: Shape, at: dict, mode: str, device: str, dtype: torch.dtype) -> int | None:
    warm = Scene(
        shape, {**at, "prefix_tokens": min(at["prefix_tokens"], 64), "prompts": 1, "arms": 1}, device, dtype
    )
    warm.call(mode).run(warm.call(mode).prepare())  # scratch memory and thread pools are there from here on
    scene = Scene(shape, at, device, dtype)
    call = scene.call(mode)
    given = call.prepare()
    del warm
    return_freed_pages()
    with PeakMemory(torch.device(device)) as peak:
        call.run(given)
        peak.sample()
    return peak.extra_bytes


def main(arguments: list[str] | None = None) -> dict:
    parser = shape_options("scale.py", __doc__)
    parser.add_argument("--no-memory", action="store_true", help="times only")
    given = parser.parse_args(arguments)
    shape, dtype = chosen(given)
    rows = measure_scale(
        shape, TINY_VALUES if given.tiny else VALUES, device=given.device, dtype=getattr(torch, dtype),
        warmups=given.warmups, repetitions=given.repetitions or (2 if given.tiny else 20), memory=not given.no_memory,
    )  # fmt: skip
    table = growth(rows)
    for row in table:
        if row["verdict"]:
            fitted = "-" if row["exponent"] is None else f"{row['exponent']:.2f}"
            print(f"{row['expectation']}: {row['verdict']} (exponent {fitted}, expected {row['expected']:g})")
    here = machine(given.device, tiny=given.tiny)
    return write_table(given.out, "scale", rows, machine=here, model=shape.name, dtype=dtype, growth=table)


if __name__ == "__main__":
    main()
