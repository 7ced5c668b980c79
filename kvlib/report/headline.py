"""The front page's headline: four figures with their intervals as tiles, from the records alone."""

import html

import pandas as pd

from kvlib.report.repetitions import Times, factor_text, times_of
from kvlib.report.summaries import headline, prefix_lengths
from kvlib.report.wording import UNKNOWN, interval, number, percent, signed, signed_percent


def tiles(final: dict, latency: dict, raw: pd.DataFrame, prefix_tokens: int) -> str:
    """Four figures as HTML, each with what it is and how sure it is.

    Args:
        raw: `latency/raw.parquet`. prefix_tokens: the length at which fidelity was measured.
    """
    found, longest = headline(final), prefix_lengths(latency)[-1]
    paired, paths = found["paired"]["learned-direct"], found["paths"]
    direct, learned = (paths[path]["kl32"]["mean"] for path in ("direct", "learned"))
    native, resident, cold = (
        times_of(raw, longest, *one) for one in (("native",), ("learned",), ("learned", "cold"))
    )
    ci, relative = paired.get("ci95"), paired.get("relative")
    left = f", {percent(learned / direct, 0)} of direct's left" if learned and direct else ""
    return (
        '<div class="kv-tiles">'
        + _tile(
            f"{signed(paired['mean'])} nats",
            f"KL32 of learned minus direct, {prefix_tokens:,} tokens",
            (f"95 %: {interval(ci)} nats" if ci else "no interval")
            + (f"; {signed_percent(relative)} of direct's" if relative is not None else ""),
        )
        + _tile(
            f"{paired['wins']} of {paired['prompts']}" if paired["mean"] is not None else UNKNOWN,
            f"prompts closer to native, {prefix_tokens:,} tokens",
            f"KL32 {number(learned, 3)}, direct {number(direct, 3)}{left}",
        )
        + _tile(
            _faster(factor_text(raw, longest, "resident")),
            f"as fast as native, cache at hand, {longest:,} tokens",
            f"p50 {_timed(resident)} against {_timed(native)}",
        )
        + _tile(
            _faster(factor_text(raw, longest, "cold")),
            f"as fast as native, source included, {longest:,} tokens",
            f"p50 {_timed(cold)} against {_timed(native)}",
        )
        + "</div>"
    )


def _tile(figure: str, what: str, sure: str) -> str:
    return (
        f"<div><strong>{html.escape(figure)}</strong><span>{html.escape(what)}</span>"
        f"<small>{html.escape(sure)}</small></div>"
    )


def _faster(factor: str | None) -> str:
    return f"{factor} ×" if factor else UNKNOWN


def _timed(times: Times | None) -> str:
    return times.said if times else UNKNOWN
