"""Every chart of the book: functions that take records and return a Plotly figure."""

from kvlib.report.figures.final import kl_by_path, kl_by_step, paired_prompts, sorted_differences
from kvlib.report.figures.front import frontier
from kvlib.report.figures.latency import cold_ratio, peak_memory, time_to_first_token
from kvlib.report.figures.slices import slices
from kvlib.report.figures.speed import moved_frontier, step_parts
from kvlib.report.figures.training import confirmation, curves, grid, residual_error
from kvlib.report.figures.trust import controls

__all__ = [
    "cold_ratio",
    "confirmation",
    "controls",
    "curves",
    "frontier",
    "grid",
    "kl_by_path",
    "kl_by_step",
    "moved_frontier",
    "paired_prompts",
    "peak_memory",
    "residual_error",
    "slices",
    "sorted_differences",
    "step_parts",
    "time_to_first_token",
]
