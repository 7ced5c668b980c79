"""The front page's headline: four figures with their intervals as tiles, from the records alone."""

import html

from kvlib.report.summaries import headline, median_times, prefix_lengths
from kvlib.report.wording import UNKNOWN, interval, milliseconds, number, signed_percent


def tiles(final: dict, latency: dict) -> str:
    """Four figures as HTML, each with what it is and how sure it is."""
    found = headline(final)
    paired, paths = found["paired"]["learned-direct"], found["paths"]
    longest = prefix_lengths(latency)[-1]
    times = median_times(latency, longest)
    resident, cold = (times.get(("learned", kind)) for kind in ("resident", "cold"))
    native = times["native", "resident"]
    ci = paired.get("ci95")
    return (
        '<div class="kv-tiles">'
        + _tile(
            signed_percent(paired.get("relative")),
            "KL32 of learned against direct",
            f"95 %: {interval(ci)} nats" if ci else "no interval",
        )
        + _tile(
            f"{paired['wins']} of {paired['prompts']}" if paired["mean"] is not None else UNKNOWN,
            "prompts closer to native",
            f"KL32 {number(paths['learned']['kl32']['mean'], 3)}, direct {number(paths['direct']['kl32']['mean'], 3)}",
        )
        + _tile(
            _faster(native, resident),
            "as fast as native, cache at hand",
            f"{milliseconds(resident)} against {milliseconds(native)}, {longest:,} tokens",
        )
        + _tile(
            _faster(native, cold),
            "as fast as native, source included",
            f"{milliseconds(cold)} against {milliseconds(native)}",
        )
        + "</div>"
    )


def _tile(figure: str, what: str, sure: str) -> str:
    return (
        f"<div><strong>{html.escape(figure)}</strong><span>{html.escape(what)}</span>"
        f"<small>{html.escape(sure)}</small></div>"
    )


def _faster(native: float | None, path: float | None) -> str:
    return f"{native / path:.3g} ×" if native and path else UNKNOWN
