"""The front page's chart: fidelity against time to first token, one point per path."""

import plotly.graph_objects as go

from kvlib.report.palette import NEUTRAL, PATHS, finish, log_axis
from kvlib.report.summaries import headline, median_times, prefix_lengths

SHOWN = ("native", "direct", "ridge", "learned")
HOVER = {"resident": "source cache resident", "cold": "the source's prefill counted"}
COLD_SYMBOLS = {"direct": "circle-open", "ridge": "square-open", "learned": "triangle-up-open"}


def frontier(final: dict, latency: dict, prefix_tokens: int | None = None) -> go.Figure:
    """KL32 against p50 time to first token; the slider moves the prefix length.

    KL32 was measured at one prefix length: moving the slider changes the times alone. Filled markers: the
    source cache is resident; open markers: the source's prefill is counted.

    Args:
        prefix_tokens: the length at which KL32 was measured, for the hover.
    """
    quality, lengths = headline(final), prefix_lengths(latency)
    series = [
        (path, kind) for path in SHOWN for kind in ("resident", "cold") if (path, kind) != ("native", "cold")
    ]
    series = [(path, kind) for path, kind in series if path in quality["paths"]]
    points = {}
    for length in lengths:
        times = median_times(latency, length)
        points[length] = [times.get(one) for one in series]
    figure = go.Figure()
    start = lengths[-1]
    for (path, kind), ms in zip(series, points[start], strict=True):
        style, kl = PATHS[path], quality["paths"][path]["kl32"]
        cold = kind == "cold"
        figure.add_scatter(
            x=[ms],
            y=[kl["mean"]],
            mode="markers",
            name=f"{style.label}, cold" if cold else style.label,
            legendgroup=path,
            showlegend=not cold,  # one entry below says what open markers are
            error_y={"array": [kl["se"] or 0], "thickness": 1.2, "visible": path != "native" and not cold},
            marker={
                **style.marker(15),
                "symbol": COLD_SYMBOLS[path] if cold else style.symbol,
                "line": {"width": 2, "color": style.colour},
            },
            customdata=[
                (
                    quality["paths"][path]["top1"],
                    "the reference" if path == "native" else HOVER[kind],
                    _measured(quality, path, prefix_tokens),
                )
            ],
            hovertemplate=f"<b>{style.label}</b>, %{{customdata[1]}}<br>first token after %{{x:,.1f}} ms<br>"
            "KL32 %{y:.4f}%{customdata[2]}<br>top-1 %{customdata[0]:.1%}<extra></extra>",
        )
    if any(kind == "cold" for _, kind in series):
        figure.add_scatter(  # in the legend alone
            x=[None],
            y=[None],
            mode="markers",
            name="open: cold",
            hoverinfo="skip",
            marker={"symbol": "circle-open", "size": 11, "color": NEUTRAL, "line": {"width": 2}},
        )
    rest = [[None]] * (len(figure.data) - len(series))
    steps = {length: [*([ms] for ms in points[length]), *rest] for length in lengths}
    figure.update_layout(sliders=[length_slider(steps)])
    known = [ms for row in points.values() for ms in row if ms]
    found = [quality["paths"][path]["kl32"] for path, _ in series]
    highest = max((kl["mean"] or 0) + (kl["se"] or 0) for kl in found)
    figure = finish(
        figure,
        "Fidelity (KL32, nats per token) against time to first token (ms, p50)",
        x="time to first token (ms, p50, logarithmic)",
        y="KL32 (nats), lower is closer",
        height=425,
    )
    figure.update_xaxes(**log_axis(known, pad=0.15))
    figure.update_yaxes(range=[-0.06 * highest, 1.12 * highest])
    return figure


def _measured(quality: dict, path: str, prefix_tokens: int | None) -> str:
    """What stands behind a mean on hover: its error, the prompts and their length, the interval against direct reuse."""
    found = quality["paths"][path]
    error = "" if path == "native" or not found["kl32"]["se"] else f" ± {found['kl32']['se']:.4f} (se)"
    length = f" of {prefix_tokens:,} tokens" if prefix_tokens else ""
    said = f"{error} nats<br>{found['prompts']:,} prompts{length}"
    paired = quality["paired"].get(f"{path}-direct") or {}
    if paired.get("ci95"):
        low, high = (f"{end:+.4f}".replace("-", "−") for end in paired["ci95"])
        said += f"<br>minus direct: {paired['mean']:+.4f}".replace("-", "−") + f", 95 % {low} to {high} nats"
    return said


def length_slider(steps: dict[int, list[list]]) -> dict:
    """A slider over prefix lengths, the last one chosen. steps: length -> the x values of each trace."""
    return {
        "active": len(steps) - 1,
        "currentvalue": {"prefix": "prefix: ", "suffix": " tokens", "font": {"size": 14}},
        "pad": {"t": 58, "b": 4},
        "len": 1,
        "x": 0,
        "bgcolor": "rgba(127,133,142,0.25)",
        "bordercolor": "rgba(127,133,142,0.6)",
        "steps": [
            {"label": f"{length:,}", "method": "restyle", "args": [{"x": values}]}
            for length, values in steps.items()
        ],
    }
