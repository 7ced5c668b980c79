"""The numbers behind the charts: functions that take records and return tables, units in the headings."""

from kvlib.report.tables.cells import cell_text, to_html, unfold
from kvlib.report.tables.colophon import colophon, durations, hashes, ledger, machine, seeds
from kvlib.report.tables.making import (
    arms,
    confirmation,
    curves,
    gate,
    grid,
    layers,
    models,
    partitions,
    read_layers,
    texts,
)
from kvlib.report.tables.planning import plan_cards, plan_downloads, plan_memory, plan_stages
from kvlib.report.tables.results import frontier, headline, latency, memory, paired, paths, prompts, steps
from kvlib.report.tables.speed import floor, left_out, modes, moved_frontier, pipeline, step_parts, targets
from kvlib.report.tables.trust import attacked, checks, controls, decision, first_step, gates, noise, worst

__all__ = [
    "arms",
    "attacked",
    "cell_text",
    "checks",
    "colophon",
    "confirmation",
    "controls",
    "curves",
    "decision",
    "durations",
    "first_step",
    "floor",
    "frontier",
    "gate",
    "gates",
    "grid",
    "hashes",
    "headline",
    "latency",
    "layers",
    "left_out",
    "ledger",
    "machine",
    "memory",
    "models",
    "modes",
    "moved_frontier",
    "noise",
    "paired",
    "partitions",
    "paths",
    "pipeline",
    "plan_cards",
    "plan_downloads",
    "plan_memory",
    "plan_stages",
    "prompts",
    "read_layers",
    "seeds",
    "step_parts",
    "steps",
    "targets",
    "texts",
    "to_html",
    "unfold",
    "worst",
]
