"""The one place where the latency stage asks for the times of the cold pipeline."""

import pandas as pd
import torch

from kvlib.cold import measure_pipeline, pipeline_rows
from kvlib.latency import TargetPath

PIPELINED = "learned"
PIPELINE_COLUMNS = (
    "prefix_tokens", "path", "way", "repetition", "prompt", "order", "ms", "source_ms", "handoff_ms", "mode", "token",
)  # fmt: skip


def time_pipeline(
    target, source, paths: list[TargetPath], prompts: torch.Tensor, repetitions: int, seed: int | str
) -> list[dict]:
    """`PIPELINE_COLUMNS`, a row per clock, at the length of `prompts` (N, T)."""
    path = next(path for path in paths if path.name == PIPELINED)
    return measure_pipeline(
        target, source, path.cache_map, prompts, repetitions, seed, path=path.name, mode=path.mode
    )


def pipeline_medians(raw: pd.DataFrame) -> list[dict]:
    """The "pipeline" of latency/summary.json."""
    rows = raw.astype({"source_ms": float, "handoff_ms": float}).to_dict("records")
    return pipeline_rows(rows)
