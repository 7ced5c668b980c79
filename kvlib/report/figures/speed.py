"""Charts of what the correction costs: the frontier with the moved point, and where one step's time goes."""

import plotly.graph_objects as go

from kvlib.breakdown import ARGMAX, ATTACHING, ATTENTION, BODY, HEAD, MAP, PYTHON, WEIGHTS
from kvlib.report.figures.front import length_slider
from kvlib.report.palette import NEUTRAL, PATHS, SEQUENCE, finish, log_axis
from kvlib.report.speed import mode_of, parts_of, row_of, way_of
from kvlib.report.summaries import headline, prefix_lengths

WRITTEN = "learned, written out"
# One hue for what is alike; a pattern tells two parts of one hue apart.
PART_STYLES = {
    WEIGHTS: (SEQUENCE[0], ""),
    HEAD: (SEQUENCE[0], "/"),
    ATTENTION: (SEQUENCE[1], ""),
    MAP: (SEQUENCE[2], ""),
    BODY: (NEUTRAL, ""),
    ATTACHING: (SEQUENCE[3], ""),
    ARGMAX: (SEQUENCE[3], "x"),
    PYTHON: (NEUTRAL, "."),
}


def moved_frontier(final: dict, latency: dict) -> go.Figure:
    """KL32 against p50 time to first token, source cache resident; the slider moves the prefix length.

    The learned map is there twice: as it is handed over, and written into a second cache first. An arrow leads from
    the second to the first. KL32 was measured at one prefix length: moving the slider changes the times alone.
    """
    quality, lengths = headline(final)["paths"], prefix_lengths(latency)
    shown = [path for path in ("native", "direct", "ridge", "learned") if path in quality]
    times = {t: _times(latency, t, shown) for t in lengths}
    start = lengths[-1]
    figure = go.Figure()
    for path, ms in zip(shown, times[start], strict=False):
        style, kl = PATHS[path], quality[path]["kl32"]
        mode = way_of(row_of(latency, start, path))
        figure.add_scatter(
            x=[ms],
            y=[kl["mean"]],
            mode="markers",
            name=style.label if path in ("native", "direct") else f"{style.label}, {mode}",
            marker=style.marker(15),
            error_y={"array": [kl["se"] or 0], "thickness": 1.2, "visible": path != "native"},
            customdata=[(quality[path]["top1"], mode)],
            hovertemplate=f"<b>{style.label}</b>, %{{customdata[1]}}<br>first token after %{{x:,.1f}} ms<br>"
            "KL32 %{y:.4f} nats<br>top-1 %{customdata[0]:.1%}<extra></extra>",
        )
    learned, kl = PATHS["learned"], quality["learned"]["kl32"]["mean"]
    written, absorbed = times[start][len(shown)], times[start][shown.index("learned")]
    figure.add_scatter(
        x=[written],
        y=[kl],
        mode="markers",
        name=WRITTEN,
        marker={"symbol": "triangle-up-open", "color": learned.colour, "size": 15, "line": {"width": 2}},
        hovertemplate="<b>learned correction</b>, written into a second cache<br>first token after %{x:,.1f} ms<br>"
        "KL32 %{y:.4f} nats, as without writing<extra></extra>",
    )
    figure.add_scatter(
        x=[written, absorbed],
        y=[kl, kl],
        mode="lines+markers",
        name="the same fidelity, moved",
        line=learned.line(1.5, dash="dot"),
        marker={
            "symbol": "arrow", "angleref": "previous", "size": [0, 13], "color": learned.colour,
        },
        hoverinfo="skip",
    )  # fmt: skip
    steps = {
        t: [*([ms] for ms in found), [found[-1], found[shown.index("learned")]]] for t, found in times.items()
    }
    figure.update_layout(sliders=[length_slider(steps)])
    highest = max((quality[p]["kl32"]["mean"] or 0) + (quality[p]["kl32"]["se"] or 0) for p in shown)
    figure = finish(
        figure,
        "The frontier again: KL32 (nats per token, lower is closer to native) and time to first token (ms, p50)",
        x="time to first token (ms, p50, logarithmic)",
        y="KL32 (nats per token)",
        height=590,
    )
    figure.update_xaxes(**log_axis([ms for found in times.values() for ms in found if ms], pad=0.15))
    figure.update_yaxes(range=[-0.06 * highest, 1.12 * highest])
    return figure


def _times(latency: dict, tokens: int, shown: list[str]) -> list[float | None]:
    """p50 of each shown path, and of the learned map written out, at one length."""
    rows = [*(row_of(latency, tokens, path) for path in shown), mode_of(latency, tokens, "materialised")]
    return [None if row is None else row["p50_ms"] for row in rows]


def step_parts(latency: dict) -> go.Figure:
    """Where one step's time goes: a stacked bar for each path and length that was taken apart."""
    figure = go.Figure()
    bars = list(dict.fromkeys((r["prefix_tokens"], r["path"]) for r in latency["breakdown"]))
    names = [f"{path}, {tokens:,} tokens" for tokens, path in bars]
    for part, (colour, pattern) in PART_STYLES.items():
        values = [parts_of(latency, *bar)[part] for bar in bars]
        totals = [sum(parts_of(latency, *bar).values()) for bar in bars]
        figure.add_bar(
            x=values,
            y=names,
            orientation="h",
            name=part,
            marker={"color": colour, "pattern": {"shape": pattern}, "line": {"width": 0}},
            customdata=[value / total for value, total in zip(values, totals, strict=True)],
            hovertemplate=f"<b>{part}</b>, %{{y}}<br>%{{x:,.2f}} ms, %{{customdata:.1%}}<extra></extra>",
        )
    if not bars:
        figure.add_annotation(
            text="no step was taken apart", showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5
        )
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_yaxes(autorange="reversed")
    return finish(
        figure,
        "Where one step's time goes (ms), under a profiler",
        x="time within the profiled step (ms)",
        height=260 + 52 * len(bars),
        legend_px=10,
    )
