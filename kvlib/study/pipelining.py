"""The one place where the latency stage asks for the times of the cold pipeline."""

import torch

from kvlib import cold
from kvlib.latency import TargetPath

PIPELINED = ("direct", "learned")
PIPELINE_COLUMNS = (
    "prefix_tokens",
    "path",
    "source_prefill_p50_ms",
    "serial_p50_ms",
    "serial_handoff_p50_ms",
    "pipelined_p50_ms",
    "resident_p50_ms",
    "repetitions",
)


def pipeline_rows(
    target, source, paths: list[TargetPath], prompts: torch.Tensor, repetitions: int, seed: int | str
) -> list[dict]:
    """`PIPELINE_COLUMNS` for each of `PIPELINED`, at the length of `prompts` (N, T)."""
    raw = [
        row
        for path in paths
        if path.name in PIPELINED
        for row in cold.measure_pipeline(
            target, source, path.cache_map, prompts, repetitions, seed, path=path.name, mode=path.mode
        )
    ]
    return cold.pipeline_rows(raw)
