"""The one place where the latency stage asks for the times of the cold pipeline."""

import torch

from kvlib.errors import KvlibError
from kvlib.latency import TargetPath

PIPELINED = ("direct", "learned")
PIPELINE_COLUMNS = (
    "prefix_tokens",
    "path",
    "source_prefill_p50_ms",
    "serial_p50_ms",
    "pipelined_p50_ms",
    "resident_p50_ms",
    "repetitions",
)


def pipeline_rows(
    target, source, paths: list[TargetPath], prompts: torch.Tensor, repetitions: int, seed: int | str
) -> list[dict]:
    """`PIPELINE_COLUMNS` for each of `PIPELINED`, at the length of `prompts` (N, T)."""
    raise KvlibError(
        "latency.pipeline_repetitions given, expected none: this kvlib has no pipeline yet, so leave the list empty"
    )
