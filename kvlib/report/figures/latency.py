"""Charts of time and memory: chapter 04."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report.palette import NEUTRAL, PATHS, finish, log_axis
from kvlib.report.speed import cold_ratios
from kvlib.report.summaries import lengths_around
from kvlib.report.wording import bytes_text

RESIDENCY = {
    "resident": "source cache resident",
    "cold": "cold: the source's prefill is counted too",
}


def time_to_first_token(summary: dict) -> go.Figure:
    """p50 against prefix length, both axes logarithmic; whiskers reach to p95 where there is one."""
    rows = pd.DataFrame(summary["rows"])
    native = rows[(rows.path == "native")].drop_duplicates("prefix_tokens")
    kinds = [kind for kind in RESIDENCY if (rows.residency == kind).any()]
    figure = make_subplots(
        rows=len(kinds),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.14,
        subplot_titles=[f"{RESIDENCY[kind]}<br>{_crossover(summary, kind)}" for kind in kinds],
    )
    figure.update_annotations(font_size=13)
    for number, kind in enumerate(kinds, 1):
        for path, style in PATHS.items():
            found = rows[(rows.path == path) & (rows.residency == kind)]
            if found.empty and path == "native":
                found = native
            if found.empty:
                continue
            p95 = pd.to_numeric(found.p95_ms)
            figure.add_scatter(
                x=found.prefix_tokens,
                y=found.p50_ms,
                mode="lines+markers",
                name=style.label,
                legendgroup=path,
                showlegend=number == 1,
                line=style.line(),
                marker=style.marker(),
                customdata=[
                    (row.repetitions, row.mode.replace("_", " "), _p95(row.p95_ms))
                    for row in found.assign(p95_ms=p95).itertuples()
                ],
                error_y={
                    "array": (p95 - found.p50_ms).clip(lower=0).fillna(0),
                    "arrayminus": [0] * len(found),
                    "thickness": 1,
                    "width": 3,
                },
                hovertemplate=f"<b>{style.label}</b> (%{{customdata[1]}})<br>%{{x:,}} tokens: "
                "%{y:,.1f} ms p50%{customdata[2]}<br>%{customdata[0]} repetitions<extra></extra>",
                row=number,
                col=1,
            )
        if kind == "resident":
            _add_floor(figure, summary, number)
        tokens = (summary["crossover"].get(kind) or {}).get("learned")
        if tokens:
            figure.add_vline(
                x=tokens, line={"color": NEUTRAL, "dash": "dot", "width": 1.5}, row=number, col=1
            )
    lengths = sorted(rows.prefix_tokens.unique().tolist())
    figure.update_xaxes(type="log", tickvals=lengths, ticktext=[f"{t:,}" for t in lengths])
    figure.update_xaxes(title_text="prefix (tokens)", row=len(kinds), col=1)
    shown = pd.concat([rows.p50_ms, pd.to_numeric(rows.p95_ms)]).dropna().tolist()
    shown += [row["floor_ms"] for row in summary["floor"]]
    figure.update_yaxes(**log_axis(shown), title_text="TTFT (ms)")
    title = "Time to first token (ms, p50) against prefix length (tokens), logarithmic axes"
    return finish(figure, title, height=160 + 350 * len(kinds), legend_px=46)


def cold_ratio(raw: pd.DataFrame) -> go.Figure:
    """Every cold repetition over native's median at its length, and native's own repetitions beside them.

    Args:
        raw: one row per repetition, with "prefix_tokens", "path", "residency", "repetition", "ms".
    """
    figure, lengths = go.Figure(), sorted(raw.prefix_tokens.unique().tolist())
    names = [f"{tokens:,}" for tokens in lengths]
    for path, found in cold_ratios(raw).groupby("path", sort=False):
        style = PATHS[path]
        figure.add_scatter(
            x=[f"{tokens:,}" for tokens in found.prefix_tokens],
            y=found.ratio,
            mode="markers",
            name=style.label,
            offsetgroup=path,
            marker=style.marker(9, opacity=0.85),
            customdata=found[["ms", "repetition", "of", "native_of"]],
            hovertemplate=f"<b>{style.label}</b>, %{{x}} tokens<br>%{{y:.3f}} of native's median"
            "<br>%{customdata[0]:,.1f} ms, repetition %{customdata[1]} of %{customdata[2]}"
            "<br>native's median is of %{customdata[3]}<extra></extra>",
        )
    figure.update_layout(scattermode="group", scattergap=0.35)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=names)
    shown = [1.0, *(value for trace in figure.data for value in trace.y)]
    figure.update_yaxes(
        range=[min(shown) - 0.05, max(shown) + 0.05]
    )  # grouped markers would have it begin at zero
    figure.add_hline(y=1, line={"color": NEUTRAL, "dash": "dash", "width": 1.2})
    return finish(
        figure,
        "Cold: each repetition's time to first token (ms) over native prefill's median at the same length",
        x="prefix (tokens)",
        y="÷ native's median",
    )


def _add_floor(figure: go.Figure, summary: dict, row: int) -> None:
    """What one step must read over the memory bandwidth: no path of one step can be faster."""
    floor = pd.DataFrame(
        summary["floor"], columns=["prefix_tokens", "weight_bytes", "cache_bytes", "floor_ms"]
    )
    figure.add_scatter(
        x=floor.prefix_tokens,
        y=floor.floor_ms,
        mode="lines",
        name="memory floor of one step",
        line={"color": NEUTRAL, "dash": "longdash", "width": 1.5},
        customdata=[bytes_text(v) for v in floor.weight_bytes + floor.cache_bytes],
        hovertemplate="<b>memory floor</b><br>%{x:,} tokens: %{y:,.2f} ms<br>%{customdata} to be read"
        "<extra></extra>",
        row=row,
        col=1,
    )


def _p95(value: float) -> str:
    return "" if pd.isna(value) else f", {value:,.1f} ms p95"


def _crossover(summary: dict, kind: str) -> str:
    """Where the learned handoff overtakes native prefill, or that there is no such place."""
    found = summary["crossover"].get(kind) or {}
    if found.get("learned"):
        return f"learned overtakes native between {lengths_around(summary, found['learned'])} tokens"
    if found.get("below"):
        shortest = min(r["prefix_tokens"] for r in summary["rows"])
        return f"learned is ahead of native from {shortest:,} tokens on"
    return "learned does not overtake native at these lengths"


def peak_memory(memory: pd.DataFrame) -> go.Figure:
    """Peak extra memory against prefix length, per path."""
    figure = go.Figure()
    for path, style in PATHS.items():
        found = memory[(memory.path == path) & memory.peak_extra_bytes.notna()].sort_values("prefix_tokens")
        if found.empty:
            continue
        figure.add_scatter(
            x=found.prefix_tokens,
            y=pd.to_numeric(found.peak_extra_bytes) / 2**20,
            mode="lines+markers",
            name=style.label,
            line=style.line(),
            marker=style.marker(),
            hovertemplate=f"<b>{style.label}</b><br>%{{x:,}} tokens: %{{y:,.3~r}} MiB<extra></extra>",
        )
    if not memory.peak_extra_bytes.notna().any():
        figure.add_annotation(
            text="memory was not measured", showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5
        )
    lengths = sorted(memory.prefix_tokens.unique().tolist())
    figure.update_xaxes(type="log", tickvals=lengths, ticktext=[f"{t:,}" for t in lengths])
    shown = (pd.to_numeric(memory.peak_extra_bytes).dropna() / 2**20).tolist()
    figure.update_yaxes(**(log_axis(shown) if shown and min(shown) > 0 else {"type": "log"}))
    return finish(
        figure,
        "Peak extra memory (MiB) against prefix length (tokens), logarithmic axes",
        x="prefix (tokens)",
        y="peak extra memory (MiB)",
    )
