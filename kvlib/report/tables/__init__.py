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
)
from kvlib.report.tables.results import frontier, headline, latency, memory, paired, paths, prompts, steps
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
    "frontier",
    "gate",
    "gates",
    "grid",
    "hashes",
    "headline",
    "latency",
    "layers",
    "ledger",
    "machine",
    "memory",
    "models",
    "noise",
    "paired",
    "partitions",
    "paths",
    "prompts",
    "read_layers",
    "seeds",
    "steps",
    "to_html",
    "unfold",
    "worst",
]
