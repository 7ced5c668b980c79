"""Every path, mode and length on a CUDA machine in under five minutes: true shapes, random weights, no network.

    python benchmarks/gpu.py --out gpu.json                 # Llama 3.1 8B and Minitron-4B-Width, bfloat16
    python benchmarks/gpu.py --device cpu --tiny            # the same code in seconds

Needs torch, transformers, numpy, safetensors and this checkout; downloads nothing. The limit is --seconds: each
part may use its share of what is left, stops between two rounds when that is over, and every part that was cut
short, did not fit or failed is named in "left_out". The file is written whole after every part.

    {"benchmark": "gpu", "label": "true shapes, random weights" or "tiny shapes, random weights",
     "machine": {"device", "name", "cores", "threads", "python", "torch", "transformers", "memory_bandwidth_gb_s", "date"},
     "pair": {"target": {shape}, "source": {shape}, "dtype", "rank"},
     "protocol": {"warmups", "repetitions", "cold_warmups", "prefix_tokens": […], "seconds_allowed"},
     "rows": [{"prefix_tokens", "path": native|direct|direct_stock|ridge|learned, "residency": resident|cold,
               "p50_ms", "p95_ms" (null below 20 repetitions), "handoff_p50_ms" (cold only), "repetitions",
               "peak_extra_bytes" (null where unknown), "mode": prefill|absorbed|in_place|background|materialised|naive,
               "compiled", "kind": of map, null for native}],
     "compiled": [{… as rows, in rounds of their own: direct, learned in place and compiled in place, "first_call_ms"}],
     "memory": [{"prefix_tokens", "path", "mode", "compiled", "kind", "peak_extra_bytes"}],
     "correctness": [{"prefix_tokens", "path", "kind", "mode", "positions", "logit_scale", "map_effect", "noise",
                      "max_difference", "relative_difference", "argmax_agreement", "error", "materialised_error", …}],
     "floor": [{"prefix_tokens", "weight_bytes", "cache_bytes", "floor_ms"}],
     "ratios": [{"prefix_tokens", "learned_over_direct", …}],
     "left_out": ["…"], "seconds": …}

Correctness, all in logits: max_difference is the mode's from the materialised cache; map_effect, what the map
changes; noise, what two attention kernels differ by over one and the same cache; error and materialised_error,
how far each is from float32 arithmetic on the same numbers.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from common import LENGTHS, TINY_LENGTHS, aligned, floor_row, machine, write_json, write_table
from gpu_measures import (
    Models,
    compiled_entries,
    correctness,
    latency_row,
    peak_memory,
    ratios,
    resident_entries,
    room_for_float32,
    time_cold,
    time_resident,
)
from paths import standard_entries
from shapes import LLAMA_31_8B, MINITRON_4B_WIDTH, TINY_SOURCE, TINY_TARGET, random_maps, random_model

RANK = 8
PARTS = ("resident", "memory", "correctness", "cold", "compiled")
COMPILE_GUESS_S = 40.0
COLD_WARMUPS = 2  # the source's prefill; all else ran warm before


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of the work. weight: about its seconds on an H100. run: takes a function of the repetitions that are
    complete, which says when it is time to stop."""

    name: str
    weight: float
    run: Callable[[Callable[[int], bool]], None]


class Record:
    """What is known so far, as it is written."""

    def __init__(self, given, models: Models, shapes, here: dict, lengths, counts: dict):
        self.given, self.models, self.lengths, self.counts = given, models, lengths, counts
        self.start = time.perf_counter()
        self.rows, self.compiled, self.memory, self.correct, self.left_out = [], [], [], [], []
        self.fixed = {
            "label": f"{'tiny' if given.tiny else 'true'} shapes, random weights",
            "machine": here,
            "pair": {
                "target": _shape(shapes[0]),
                "source": _shape(shapes[1]),
                "dtype": given.dtype,
                "rank": RANK,
            },
            "protocol": {
                **counts,
                "cold_warmups": min(COLD_WARMUPS, counts["warmups"]),
                "prefix_tokens": list(lengths),
                "seconds_allowed": given.seconds,
            },
            "floor": [floor_row(models.target, n, here["memory_bandwidth_gb_s"]) for n in lengths],
        }
        self.compile_s = COMPILE_GUESS_S if models.device.type == "cuda" else 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def content(self, not_reached: list[str]) -> dict:
        def which(row):
            return tuple(row[name] for name in ("prefix_tokens", "path", "mode", "compiled", "kind"))

        peaks = {which(row): row["peak_extra_bytes"] for row in self.memory}
        rows = [
            {**row, "peak_extra_bytes": peaks.get(which(row)) if row["residency"] == "resident" else None}
            for row in self.rows
        ]
        return {
            **self.fixed, "rows": rows, "compiled": self.compiled, "memory": self.memory,
            "correctness": self.correct, "ratios": ratios(rows, self.fixed["floor"]),
            "left_out": self.left_out + [f"{name}: not reached" for name in not_reached],
            "seconds": self.seconds,
        }  # fmt: skip

    def run(self, parts: list[Part], out: Path | None) -> dict:
        """Every part in turn, each within its share of what is left; what it could not do is said."""
        for number, part in enumerate(parts):
            waiting = [later.name for later in parts[number + 1 :]]
            left = self.given.seconds - self.seconds
            if left <= 0:
                self.left_out.append(f"{part.name}: no time left")
                continue
            share = left * part.weight / sum(later.weight for later in parts[number:])
            self._run_one(part, self.seconds + share)
            print(f"{self.seconds:6.1f} s  {part.name}", flush=True)
            if out is not None:
                write_json(out, {"benchmark": "gpu", **self.content(waiting)})
        return self.content([])

    def _run_one(self, part: Part, until: float) -> None:
        wanted, stopped, half = self.counts["repetitions"], [], (self.seconds + until) / 2

        def enough(done: int) -> bool:
            over = self.seconds > (until if done > 0 else half)
            if over:
                stopped.append(max(done, 1))
            return over

        try:
            part.run(enough)
        except Exception as error:  # whatever it is: the other parts are worth having, and it is said
            said = (str(error).strip().splitlines() or [""])[0][:200]
            self.left_out.append(f"{part.name}: {type(error).__name__}: {said}")
        if stopped:
            self.left_out.append(
                f"{part.name}: {stopped[-1]} of {wanted} repetitions (or fewer warm-ups), its share of the time was over"
            )
        gc.collect()
        if self.models.device.type == "cuda":
            torch.cuda.empty_cache()


def _shape(shape) -> dict:
    return {**asdict(shape), "rope": dict(shape.rope)}


def plan(record: Record) -> list[Part]:
    """What is measured, in order: first what the figures need at every length, last what may take long."""
    models, counts = record.models, record.counts
    entries = resident_entries(models)
    standard = standard_entries(models.maps["ridge"], models.maps["linear"], models.device)
    cold = [e for e in standard if e.mode == "absorbed"]

    def resident(n, enough):
        found = time_resident(models, entries, n, seed=n, enough=enough, **counts)
        record.rows += [latency_row(one, n, "resident", found[one.name]) for one in entries]

    def from_source(n, enough):
        few = {**counts, "warmups": min(COLD_WARMUPS, counts["warmups"])}
        found = time_cold(models, cold, n, seed=n, enough=enough, **few)
        record.rows += [latency_row(one, n, "cold", found[one.name]) for one in cold]

    def memory(n, enough):
        record.memory += peak_memory(models, entries, n)

    def correct(n, enough):
        reference = room_for_float32(models.target)
        record.correct += correctness(models, n, reference=reference)
        if not reference:
            record.left_out.append(f"correctness at {n} tokens: no room for a float32 reference")

    def compiled(n, enough):
        left = record.given.seconds - record.seconds
        if left < record.compile_s:
            record.left_out.append(
                f"compiled at {n} tokens: {left:.0f} s left, {record.compile_s:.0f} may be needed"
            )
            return
        both = compiled_entries(models.maps)
        found = time_resident(models, both, n, seed=n, enough=enough, **counts)
        record.compile_s = 0.0  # done once for every length
        for one in both:
            row = latency_row(one, n, "resident", found[one.name])
            record.compiled.append({**row, "first_call_ms": found[one.name].first_ms})

    by_length = sorted(record.lengths, reverse=True)
    measures = {  # with about their seconds at n tokens
        "resident": (resident, lambda n: 17 + 21 * n / 8192),
        "memory": (memory, lambda n: 1),
        "correctness": (correct, lambda n: 2),
        "cold": (from_source, lambda n: 3 + 31 * n / 8192),
        "compiled": (compiled, lambda n: 10),
    }
    record.left_out += [f"{name}: not asked for" for name in measures if name not in record.given.parts]
    return [
        Part(f"{name} at {n} tokens", seconds(n), _at(function, n))
        for name, (function, seconds) in measures.items()
        if name in record.given.parts
        for n in by_length
    ]


def _at(function, tokens: int):
    return lambda enough: function(tokens, enough)


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(prog="gpu.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes and lengths: the same code in seconds"
    )
    parser.add_argument("--out", type=Path, help="where the results are written as JSON")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--warmups", type=int, default=None, help="20, tiny: 1")
    parser.add_argument("--repetitions", type=int, default=None, help="50, tiny: 2")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="all when left out")
    parser.add_argument("--seconds", type=float, default=270.0, help="limit, imports not counted")
    given = parser.parse_args(arguments)
    shapes = (TINY_TARGET, TINY_SOURCE) if given.tiny else (LLAMA_31_8B, MINITRON_4B_WIDTH)
    lengths = given.lengths or (TINY_LENGTHS if given.tiny else LENGTHS)
    counts = {
        "warmups": given.warmups if given.warmups is not None else (1 if given.tiny else 20),
        "repetitions": given.repetitions or (2 if given.tiny else 50),
    }
    began, here = time.perf_counter(), machine(given.device, tiny=given.tiny)
    target, source = (
        random_model(shape, device=given.device, dtype=getattr(torch, given.dtype), seed=seed)
        for seed, shape in enumerate(shapes)
    )
    maps = random_maps(shapes[0].geometry, device=given.device, rank=RANK)
    record = Record(given, Models(target, source, maps), shapes, here, lengths, counts)
    record.start = began
    print(f"{record.seconds:6.1f} s  models of random weights on {here['name']}", flush=True)
    content = record.run(plan(record), given.out)
    rows = content.pop("rows")
    for name in ("compiled", "correctness", "ratios"):
        print(f"\n{name}\n{aligned(content[name])}")
    print("\nleft out: " + ("; ".join(content["left_out"]) or "nothing"))
    return write_table(given.out, "gpu", rows, **content)


if __name__ == "__main__":
    main()
