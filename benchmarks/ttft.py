"""Time to first token of every path at every length, in one interleaved run, and each ratio that follows.

    python benchmarks/ttft.py --run results/laptop     # a finished run's target and frozen maps
    python benchmarks/ttft.py --tiny                   # random weights, seconds

The source's cache is resident, so its values are random numbers in the target's shape: times do not depend on
them, and no source is loaded. Ratios are of p50s: over direct (the same attention, no map), over direct_stock
(transformers' own attention), native over the path, and over the memory floor, which is the weights and cache
that one step must read over the bandwidth measured in the same run.
"""

import argparse
from pathlib import Path

import torch
from common import (
    LENGTHS,
    TINY_LENGTHS,
    floor_row,
    interleave,
    machine,
    timing_row,
    write_table,
)
from paths import Entry, clocked, entry, standard_entries
from shapes import TINY_TARGET, random_maps, random_model, random_prefix

from kvlib.cache import Geometry
from kvlib.compiled import why_not_compiled
from kvlib.maps import CacheMap, load_map
from kvlib.pair import load_model

EXTRA_MODES = ("in_place", "background", "materialised", "naive")


def entries_for(
    ridge: CacheMap, learned: CacheMap, device: torch.device, *, compiled: bool = False
) -> list[Entry]:
    """The four paths and stock direct, then learned in its other modes and ridge written out as the study's."""
    entries = [*standard_entries(ridge, learned, device), entry("ridge", ridge, "naive")]
    chosen = entries[-2]
    modes = [mode for mode in EXTRA_MODES if mode != chosen.mode or chosen.compiled]
    if learned.why_not_affine is not None:
        modes.remove("background")
    entries += [entry("learned", learned, mode) for mode in modes]
    if compiled and not chosen.compiled and why_not_compiled(learned) is None:
        entries.append(entry("learned", learned, "in_place", compiled=True))
    return entries


def measure_ttft(
    target,
    maps: dict[str, CacheMap],
    lengths,
    *,
    warmups: int,
    repetitions: int,
    native_repetitions: int,
    bandwidth_gb_s: float,
    compiled: bool = False,
    seed: int = 0,
) -> tuple[list[dict], list[dict]]:
    """(rows, floor): one row per length, path and mode; `maps` are those of ridge and learned."""
    weight, rows, floors = next(target.parameters()), [], []
    shape, entries = (
        Geometry.of(target),
        entries_for(maps["ridge"], maps["learned"], weight.device, compiled=compiled),
    )
    for tokens in lengths:
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(target.config.vocab_size, (1, tokens), generator=generator).to(weight.device)
        prefix = random_prefix(shape, tokens - 1, device=weight.device, dtype=weight.dtype, seed=seed)
        every = -(-repetitions // native_repetitions)
        calls = [
            clocked(one, target, prompt, prefix, every=every if one.mode == "prefill" else 1)
            for one in entries
        ]
        timings = interleave(calls, warmups=warmups, repetitions=repetitions, seed=seed, device=weight.device)
        found = [{"prefix_tokens": tokens, **one.label, **timing_row(timings[one.name])} for one in entries]
        floors.append(floor_row(target, tokens, bandwidth_gb_s))
        rows += with_ratios(found, floors[-1]["floor_ms"])
        print(f"{tokens} tokens: done", flush=True)
    return rows, floors


def with_ratios(rows: list[dict], floor_ms: float) -> list[dict]:
    """The rows of one length with their ratios to each other."""
    base = {row["path"]: row["p50_ms"] for row in rows if row["path"] in ("native", "direct", "direct_stock")}
    return [
        {
            **row,
            "over_direct": row["p50_ms"] / base["direct"],
            "over_stock": row["p50_ms"] / base["direct_stock"],
            "native_over": base["native"] / row["p50_ms"],
            "over_floor": row["p50_ms"] / floor_ms if row["path"] != "native" else None,
        }
        for row in rows
    ]


def load_run(folder: Path, device: str, dtype: torch.dtype):
    """(target, maps "ridge" and "learned") of a finished run; that they were made for its pair is taken on trust."""
    maps = {
        name: load_map(folder / "confirmation" / f"{name}.safetensors", pair=None)
        for name in ("ridge", "learned")
    }
    return load_model(folder / "pair" / "target", dtype=dtype, device=device), {
        name: cache_map.to(device) for name, cache_map in maps.items()
    }


def main(arguments: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(prog="ttft.py", description=__doc__.partition("\n")[0])
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument(
        "--run", type=Path, metavar="DIR", help="a run's folder, with pair/ and confirmation/"
    )
    choice.add_argument("--tiny", action="store_true", help="tiny random weights, short lengths")
    parser.add_argument("--out", type=Path, help="where the table is written as JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="of torch; all it takes by itself when left out")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--warmups", type=int)
    parser.add_argument("--repetitions", type=int, help="p95 needs 20")
    parser.add_argument(
        "--native-repetitions", type=int, help="native takes seconds at long lengths on a CPU"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="in place compiled as well (a compiler is needed)"
    )
    given = parser.parse_args(arguments)
    if given.threads:
        torch.set_num_threads(given.threads)
    slow = given.device == "cpu"
    here, dtype = machine(given.device, tiny=given.tiny), getattr(torch, given.dtype)
    if given.tiny:
        target = random_model(TINY_TARGET, device=given.device, dtype=dtype)
        by_kind = random_maps(TINY_TARGET.geometry)
        maps = {"ridge": by_kind["ridge"], "learned": by_kind["linear"]}
    else:
        target, maps = load_run(given.run, given.device, dtype)
    counts = {
        "warmups": given.warmups or (1 if slow else 20),
        "repetitions": given.repetitions or (20 if slow else 50),
    }
    native = given.native_repetitions or (3 if slow else counts["repetitions"])
    rows, floors = measure_ttft(
        target, maps, given.lengths or (TINY_LENGTHS if given.tiny else LENGTHS), **counts,
        native_repetitions=native, compiled=given.compiled, bandwidth_gb_s=here["memory_bandwidth_gb_s"],
    )  # fmt: skip
    model = "tiny, random weights" if given.tiny else str(given.run)
    return write_table(
        given.out,
        "ttft",
        rows,
        machine=here,
        model=model,
        dtype=given.dtype,
        warmups=counts["warmups"],
        floor=floors,
    )


if __name__ == "__main__":
    main()
