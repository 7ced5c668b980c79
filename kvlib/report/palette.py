"""One name, colour, marker and dash per path, the same in every chart, and the frame that charts share.

The hues are those of Okabe and Ito, lightened or darkened until each has a contrast of 3 or more both on
white and on the dark theme's background; markers and dashes tell the paths apart in print and without colour
vision.
"""

import math
from dataclasses import dataclass

import plotly.graph_objects as go


@dataclass(frozen=True)
class Style:
    """How one series looks. `symbol` is a Plotly marker, `dash` a Plotly line dash."""

    label: str
    colour: str
    symbol: str
    dash: str = "solid"

    def marker(self, size: float = 9, **more) -> dict:
        return {"color": self.colour, "symbol": self.symbol, "size": size, **more}

    def line(self, width: float = 2, **more) -> dict:
        return {"color": self.colour, "dash": self.dash, "width": width, **more}

    def fill(self, opacity: float = 0.18) -> str:
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity})"


PATHS = {
    "native": Style("native prefill", "#7f858e", "diamond", "solid"),
    "direct": Style("direct reuse", "#2b86c8", "circle", "dash"),
    "direct_stock": Style("direct, stock attention", "#2b86c8", "circle-open", "dot"),
    "ridge": Style("ridge map", "#c9701a", "square", "dashdot"),
    "learned": Style("learned correction", "#0f9467", "triangle-up", "solid"),
}
# Candidates of the screen: a residual on the direct base is what becomes the learned path.
BASES = {
    "direct": Style("residual on direct", PATHS["learned"].colour, PATHS["learned"].symbol, "solid"),
    "ridge": Style("residual on ridge", "#b3639b", "star-diamond", "dashdot"),
}
SEQUENCE = (
    "#8a70d6",
    "#93791a",
    "#5f8a8b",
    "#b3639b",
    "#a0705a",
)  # what is no path: none of the paths' colours
DASHES = ("dot", "dash", "solid", "dashdot", "longdash")
MARKERS = ("circle-open", "square-open", "triangle-up-open", "diamond-open", "x-thin-open")
NEUTRAL = "#7f858e"
GRID = "rgba(127,133,142,0.28)"
KL_AXIS = "KL32 (nats per token)"


def log_axis(values: list[float], pad: float = 0.1) -> dict:
    """Settings of a logarithmic axis around the values, with ticks that are written out in full."""
    low, high = min(values), max(values)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for multiples in (
        (1,),
        (1, 2, 5),
        (1, 1.5, 2, 3, 4, 5, 6, 8),
    ):  # the fewest ticks that still tell the scale
        steps = [m * 10.0**e for e in decades for m in multiples]
        ticks = [t for t in steps if low * 10**-pad <= t <= high * 10**pad]
        if len(ticks) >= 4:
            break
    text = [f"{t:,.0f}" if t >= 10 else f"{t:.10f}".rstrip("0").rstrip(".") for t in ticks]
    span = [math.log10(low) - pad, math.log10(high) + pad]
    return {"type": "log", "range": span, "tickvals": ticks, "ticktext": text}


def path_label(path: str) -> str:
    return PATHS[path].label if path in PATHS else path


def finish(
    figure: go.Figure,
    title: str,
    *,
    x: str | None = None,
    y: str | None = None,
    height: int = 440,
    legend_px: int = 8,
) -> go.Figure:
    """Give a figure its title, axis titles and the shared look. `legend_px`: room between plot and legend.

    Backgrounds are transparent and the text is a grey that both themes can carry, so that a chart is legible
    even where the book's theme script does not run. The legend lies above the plot, never on it.
    """
    top, bottom = 78, 58
    figure.update_layout(
        title={"text": title, "x": 0, "xref": "paper", "y": 0.985, "yanchor": "top", "font": {"size": 15}},
        height=height,
        margin={"l": 62, "r": 14, "t": top, "b": bottom},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": NEUTRAL, "size": 13},
        colorway=[style.colour for style in PATHS.values()],
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": NEUTRAL, "activecolor": PATHS["direct"].colour},
        hoverlabel={"align": "left", "namelength": -1},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "yanchor": "bottom",
            "y": 1 + legend_px / (height - top - bottom),
            "bgcolor": "rgba(0,0,0,0)",
            "title": {"text": ""},
        },
    )
    lines = {
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": NEUTRAL,
        "automargin": True,
        "title_standoff": 8,
    }
    figure.update_xaxes(**lines)
    figure.update_yaxes(**lines)
    if x is not None:
        figure.update_xaxes(title_text=x)
    if y is not None:
        figure.update_yaxes(title_text=y)
    return figure
