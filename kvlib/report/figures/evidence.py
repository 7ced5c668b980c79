"""Charts of the evidence chapter: over prefix lengths, over training, and what a number of prompts can show."""

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report import evidence
from kvlib.report.figures.evidence_map import correction, finish_panels, layers, note, reconstruction
from kvlib.report.palette import NEUTRAL, PATHS, SEQUENCE, finish, log_axis

__all__ = ["correction", "kl_by_length", "layers", "learning", "power", "reconstruction"]

CLUSTERED = SEQUENCE[3]
BAND = "rgba(127,133,142,0.25)"
TARGET_POWER = 0.8


def kl_by_length(summary: dict) -> go.Figure:
    """KL32 of the paths against prefix length, and below it the paired gain with its 95 % interval."""
    entries = sorted(summary["lengths"], key=lambda entry: entry["prefix_tokens"])
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12,
        subplot_titles=["KL32, with standard errors", "learned minus direct, 95 % interval"],
    )
    figure.update_annotations(font_size=13)
    for path in evidence.PATHS:
        style = PATHS[path]
        found = [(entry, values) for entry in entries if (values := evidence.at_length(entry, path))]
        figure.add_scatter(
            x=[entry["prefix_tokens"] for entry, _ in found],
            y=[values["mean"] for _, values in found],
            error_y={"array": [values["se"] or 0 for _, values in found], "thickness": 1.2, "width": 3},
            mode="lines+markers",
            name=style.label,
            line=style.line(),
            marker=style.marker(),
            customdata=[
                (_plus_minus(values["se"]), _prompts(entry), _share(values["top1"]), values["median"])
                for entry, values in found
            ],
            hovertemplate=f"<b>{style.label}</b>, %{{x:,}} tokens<br>KL32 %{{y:.4f}}%{{customdata[0]}} nats "
            "(median %{customdata[3]:.4f})<br>%{customdata[2]}%{customdata[1]}<extra></extra>",
            row=1,
            col=1,
        )
    _paired(figure, entries)
    _training_band(figure, summary, entries)
    figure.update_yaxes(rangemode="tozero", title_text="KL32 (nats)", row=1, col=1)
    figure.update_yaxes(title_text="difference (nats)", row=2, col=1)
    figure.update_xaxes(title_text="prefix (tokens), and n = prompts", row=2, col=1)
    if not any(evidence.at_length(entry, "direct") for entry in entries):
        figure.layout.shapes = ()
        note(figure, "no prefix length had a prompt")
    title = "KL32 (nats per token) against prefix length (tokens, logarithmic), by path"
    return finish_panels(figure, title, height=680, legend_px=30)


def _paired(figure: go.Figure, entries: list[dict]) -> None:
    found = [(entry, paired) for entry in entries if (paired := evidence.paired_at(entry))]
    style = PATHS["learned"]
    intervals = [paired.get("ci95") or [paired["mean"]] * 2 for _, paired in found]
    figure.add_scatter(
        x=[entry["prefix_tokens"] for entry, _ in found],
        y=[paired["mean"] for _, paired in found],
        error_y={
            "array": [high - p["mean"] for (_, high), (_, p) in zip(intervals, found, strict=True)],
            "arrayminus": [p["mean"] - low for (low, _), (_, p) in zip(intervals, found, strict=True)],
            "thickness": 1.6,
            "width": 5,
        },
        mode="markers",
        name="learned minus direct",
        showlegend=False,
        marker=style.marker(11),
        customdata=[
            (_interval(paired.get("ci95")), _prompts(entry), paired["wins"], _relative(paired))
            for entry, paired in found
        ],
        hovertemplate="<b>learned minus direct</b>, %{x:,} tokens<br>%{y:+.4f} nats%{customdata[3]}"
        "%{customdata[0]}<br>lower on %{customdata[2]} of %{customdata[1]}<extra></extra>",
        row=2,
        col=1,
    )
    figure.add_hline(y=0, line={"color": NEUTRAL, "width": 1.2}, row=2, col=1)
    ends = [0.0, *(end for pair in intervals for end in pair)]
    room = 0.08 * (max(ends) - min(ends)) or 0.01
    figure.update_yaxes(range=[min(ends) - room, max(ends) + room], row=2, col=1)


def _training_band(figure: go.Figure, summary: dict, entries: list[dict]) -> None:
    """The lengths that the frozen map was trained on as a grey band with a place in the legend."""
    shown = [entry["prefix_tokens"] for entry in entries]
    trained = summary["training_prefix_tokens"]
    if trained:
        for row in (1, 2):
            figure.add_vrect(
                x0=trained[0],
                x1=trained[1],
                fillcolor=BAND,
                line={"width": 1 if trained[0] == trained[1] else 0, "color": NEUTRAL},
                layer="below",
                name="lengths of its training",
                showlegend=row == 1,
                row=row,
                col=1,
            )
    if shown or trained:
        every = [math.log10(value) for value in [*shown, *(trained or [])]]
        figure.update_xaxes(
            type="log",
            range=[min(every) - 0.12, max(every) + 0.12],
            tickvals=shown,
            ticktext=[f"{e['prefix_tokens']:,}<br>n = {e['prompts']:,}" for e in entries],
            tickangle=0,
        )


def learning(summary: dict, tables: dict[str, pd.DataFrame]) -> go.Figure:
    """Validation KL32 against the number of training windows and against training steps.

    Whiskers are standard errors of the difference from direct reuse: the same prompts everywhere, so that the
    spread between prompts, which all points share, would only hide the curve.
    """
    found, errors = summary["learning"], evidence.errors_against_direct(tables["learning"])
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.2,
        subplot_titles=["more text, the same steps", "more steps, all the text"],
    )
    figure.update_annotations(font_size=13)
    panels = (("windows", "windows", "training windows (logarithmic)"), ("steps", "step", "training steps"))
    for row, (axis, key, title) in enumerate(panels, 1):
        points = [point for point in found[axis] if point["kl32"] is not None]
        x = [point[key] for point in points]
        _levels(figure, found, x, row)
        style = PATHS["learned"]
        figure.add_scatter(
            x=x,
            y=[point["kl32"] for point in points],
            error_y={
                "array": [errors.get((axis, value)) or 0 for value in x],
                "thickness": 1.4,
                "width": 4,
            },
            mode="lines+markers",
            name=style.label,
            legendgroup="learned",
            showlegend=row == 1,
            line=style.line(),
            marker=style.marker(10),
            customdata=[
                (
                    _made_of(point, axis),
                    _median(point["median_kl32"]),
                    _share(point["top1"]),
                    _against(point["kl32"], found["direct"]["kl32"], errors.get((axis, point[key]))),
                )
                for point in points
            ],
            hovertemplate="<b>%{customdata[0]}</b><br>KL32 %{y:.4f} nats%{customdata[1]}%{customdata[3]}"
            "<br>%{customdata[2]}learned correction<extra></extra>",
            row=row,
            col=1,
        )
        figure.update_xaxes(title_text=title, row=row, col=1)
        if not points:
            note(figure, "no training", row=row)
        elif axis == "windows":
            span = [math.log10(min(x)) - 0.1, math.log10(max(x)) + 0.1]
            figure.update_xaxes(
                type="log", range=span, tickvals=x, ticktext=[f"{v:,}" for v in x], row=row, col=1
            )
        else:
            figure.update_xaxes(tickvals=x, row=row, col=1)
    title = "Validation KL32 (nats per token) against how much the correction was trained"
    return finish_panels(figure, title, y="KL32 (nats)", height=700, legend_px=30)


def _levels(figure: go.Figure, found: dict, x: list[int], row: int) -> None:
    """Direct reuse and the ridge map, which no training changes, as horizontal lines."""
    for path in ("direct", "ridge"):
        style, level = PATHS[path], found[path]
        if not x or level["kl32"] is None:
            continue
        ends = [min(x), max(x)] if min(x) < max(x) else [min(x) / 1.2, max(x) * 1.2]
        figure.add_scatter(
            x=ends,
            y=[level["kl32"]] * 2,
            mode="lines",
            name=style.label,
            legendgroup=path,
            showlegend=row == 1,
            line=style.line(),
            hovertemplate=f"<b>{style.label}</b>, without training<br>KL32 %{{y:.4f}}"
            f"{_plus_minus(level['se'])} nats<extra></extra>",
            row=row,
            col=1,
        )


def power(summary: dict) -> go.Figure:
    """Power against the number of prompts, for independent prompts and for prompts that share articles."""
    found, figure = summary["power"], go.Figure()
    series = (
        ("power", "independent prompts", SEQUENCE[0], "solid", "circle"),
        ("power_clustered", "prompts that share articles", CLUSTERED, "dash", "square"),
    )
    counts: list[int] = []
    for key, name, colour, dash, symbol in series:
        points = [point for point in found["curve"] if point.get(key) is not None]
        if not points:
            continue
        x, y = [point["prompts"] for point in points], [point[key] for point in points]
        counts += x
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name=name,
            line={"color": colour, "dash": dash, "width": 2},
            marker={"color": colour, "symbol": symbol, "size": 6},
            hovertemplate=f"<b>{name}</b><br>%{{x:,}} prompts: power %{{y:.1%}}<extra></extra>",
        )
        if found["prompts"] and min(x) <= found["prompts"] <= max(x):
            figure.add_scatter(
                x=[found["prompts"]],
                y=[float(np.interp(math.log(found["prompts"]), np.log(x), y))],
                mode="markers",
                name="this run",
                legendgroup="this run",
                showlegend=key == "power",
                marker={
                    "symbol": "circle-open",
                    "size": 17,
                    "color": PATHS["learned"].colour,
                    "line": {"width": 3},
                },
                hovertemplate=f"<b>this run</b>, %{{x:,}} prompts, {name}<br>power %{{y:.1%}}<extra></extra>",
            )
    if counts:
        figure.add_scatter(
            x=[min(counts), max(counts)],
            y=[TARGET_POWER] * 2,
            mode="lines",
            name=f"power of {TARGET_POWER:.0%}",
            line={"color": NEUTRAL, "dash": "dot", "width": 1.5},
            hovertemplate="power %{y:.0%}<extra></extra>",
        )
        figure.update_xaxes(**log_axis(counts, pad=0.06))
    else:
        note(figure, "no power to compute")
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    return finish(
        figure,
        "Power to show a mean difference as large as the one found (share of repetitions), by number of prompts",
        x="prompts (logarithmic)",
        y="power",
    )


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _against(kl32: float, direct: float | None, error: float | None) -> str:
    return "" if direct is None else f"<br>{kl32 - direct:+.4f}{_plus_minus(error)} against direct reuse"


def _median(value: float | None) -> str:
    return "" if value is None else f" (median {value:.4f})"


def _share(top1: float | None) -> str:
    return "" if top1 is None else f"top-1 {top1:.1%}, "


def _prompts(entry: dict) -> str:
    prompts, articles = entry["prompts"], entry["articles"]
    return f"{prompts:,} prompt{'' if prompts == 1 else 's'} from {articles} article{'' if articles == 1 else 's'}"


def _interval(pair: list[float] | None) -> str:
    return "" if pair is None else f"<br>95 % interval {pair[0]:+.4f} to {pair[1]:+.4f}"


def _relative(paired: dict) -> str:
    return "" if paired.get("relative") is None else f" ({paired['relative']:+.1%})"


def _made_of(point: dict, axis: str) -> str:
    if axis == "steps":
        return f"step {point['step']:,}"
    return f"{point['windows']:,} windows: {point['tokens']:,} tokens, {point['articles']:,} articles"
