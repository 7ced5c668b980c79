"""Measure a handoff from the prompt on: the source's prefill and the handoff one after the other, and as a pipeline."""

import random
import statistics
from collections.abc import Callable, Sequence

import torch

from kvlib.cache import Geometry, check_prompt, prefill
from kvlib.clocks import clock
from kvlib.guards import check_held_back
from kvlib.latency import FirstToken, TargetPath, _time_cold, _time_resident
from kvlib.maps import CacheMap
from kvlib.pipeline import pipelined

WAYS = ("serial", "pipelined", "resident")


@torch.no_grad()
def measure_pipeline(
    target,
    source,
    cache_map: CacheMap,
    prompts: torch.Tensor,
    repetitions: int,
    seed: int | str,
    *,
    path: str = "learned",
    mode: str = "auto",
    warmups: int = 1,
    progress: Callable[[str, str], None] | None = None,
) -> list[dict]:
    """Time serial, pipelined and resident at one prefix length, once each per round, in an order drawn anew.

    Args:
        prompts: token ids (N, T), shared out among the repetitions. path: the name in the rows. mode: of the handoff.
        warmups: rounds on the first prompt that are not kept.
        progress: called after each clock, warm-ups included, with the path's name and the way.

    Returns: a row per clock, {"prefix_tokens", "path", "way", "repetition", "prompt", "order", "ms", "source_ms",
        "handoff_ms", "mode", "token"}. ms is the whole clock. source_ms is the source's prefill within it and
        handoff_ms the rest, both for serial only: in a pipeline they are not apart.

    Raises: KvlibError when models, prompts and map do not fit.
    """
    for model in (target, source):
        check_prompt(model, prompts)
    check_held_back(prompts)
    cache_map.check_fits(Geometry.of(target))
    draw, rows, held = random.Random(seed), [], None
    way_in = TargetPath(path, "handoff", cache_map, mode)
    for n in range(-warmups, repetitions):
        at = max(n, 0) * min(len(prompts), repetitions) // max(repetitions, 1)
        prompt = prompts[at : at + 1]
        if at != held:
            resident = None  # let the last one go before the next is made
            resident, held = prefill(source, prompt[:, :-1]), at
            resident.check_fits(target, "the source's cache").check_finite("the source")
        for way in draw.sample(WAYS, len(WAYS)):
            result, ms, handoff_ms = _time(way, target, source, way_in, prompt, resident)
            if n >= 0:
                rows.append(
                    {
                        "prefix_tokens": prompts.shape[1], "path": path, "way": way, "repetition": n, "prompt": at,
                        "order": len(rows), "ms": ms, "source_ms": None if handoff_ms is None else ms - handoff_ms,
                        "handoff_ms": handoff_ms, "mode": result.mode, "token": result.token,
                    }
                )  # fmt: skip
            del result  # a whole cache
            if progress is not None:
                progress(path, way)
    return rows


def _time(way: str, target, source, path: TargetPath, prompt, resident):
    if way == "resident":
        return _time_resident(target, path, prompt, resident)
    if way == "serial":
        return _time_cold(target, source, path, prompt)
    with clock(prompt.device) as read:
        with pipelined(source, target, prompt, path.cache_map, path.mode, check=False) as active:
            logits = active.logits(prompt[:, -1:], last=True)
        result = FirstToken(int(logits[0, -1].argmax()), active.mode, active.cache)
        ms = read()
    return result, ms, None


def pipeline_rows(raw: Sequence[dict]) -> list[dict]:
    """Medians per prefix length and path, out of `measure_pipeline`'s rows.

    What a cold handoff adds to the source's prefill is serial_handoff_p50_ms, taken within each repetition: the
    difference of two long medians is mostly their noise.
    """
    groups: dict[tuple[int, str], list[dict]] = {}
    for row in raw:
        groups.setdefault((row["prefix_tokens"], row["path"]), []).append(row)

    def p50(rows, way, column="ms"):
        return statistics.median(row[column] for row in rows if row["way"] == way)

    return [
        {
            "prefix_tokens": tokens,
            "path": path,
            "source_prefill_p50_ms": p50(rows, "serial", "source_ms"),
            "serial_p50_ms": p50(rows, "serial"),
            "serial_handoff_p50_ms": p50(rows, "serial", "handoff_ms"),
            "pipelined_p50_ms": p50(rows, "pipelined"),
            "resident_p50_ms": p50(rows, "resident"),
            "repetitions": sum(row["way"] == "serial" for row in rows),
        }
        for (tokens, path), rows in groups.items()
    ]
