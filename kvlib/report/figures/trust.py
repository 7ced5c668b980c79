"""Charts of “Can this be trusted?”: the paths beside caches and maps that should know nothing."""

import html
import math

import plotly.graph_objects as go

from kvlib.report.palette import NEUTRAL, PATHS, Style, finish, log_axis
from kvlib.report.spoken import SAID
from kvlib.report.summaries import headline
from kvlib.study.controls import CONTROLS

ZERO_FACTOR = 1.7  # how far left of the lowest value the place of 0 is drawn
CONTROL = Style("control", "#b3639b", "cross", "dot")
LABELS = {
    "other_prompt": "another prompt's cache",
    "shuffled_positions": "positions shuffled",
    "random_moments": "random keys and values",
    "zeros": "all zero",
    "learned_heads_permuted": "learned, heads permuted",
    "learned_other_prompt": "learned, another prompt's cache",
    "wrong_trained": "trained on wrong prompts",
    "wrong_trained_other_prompt": "… and read from a wrong prompt",
}


def control_label(name: str) -> str:
    return LABELS.get(name, name.replace("_", " "))


def controls(final: dict) -> go.Figure:
    """KL32 of every path and control as one dot per row, the lowest on top.

    Native has 0, which a logarithmic axis lacks: the axis is broken, and native stands at a 0 beyond the break.
    """
    rows = []
    for path in ("native", "learned", "direct", "ridge"):
        found = headline(final)["paths"][path]
        rows.append((PATHS[path].label, found, PATHS[path], PATHS[path].label))
    for name, found in final["controls"].items():
        rows.append((control_label(name), found, CONTROL, CONTROLS[name][2] if name in CONTROLS else name))
    known = [r for r in rows if (r[1]["kl32"]["mean"] or 0) > 1e-6]
    low, high = (pick(r[1]["kl32"]["mean"] for r in known) for pick in (min, max))
    edge, broken = low / ZERO_FACTOR, low / ZERO_FACTOR**0.5
    rows.sort(key=lambda r: -(r[1]["kl32"]["mean"] or 0))
    figure = go.Figure()
    shown: set[str] = set()
    for label, found, style, said in rows:
        mean, native = found["kl32"]["mean"], style is PATHS["native"]
        group = "control" if style is CONTROL else label
        figure.add_scatter(
            x=[edge if native else mean],
            y=[label],
            mode="markers",
            name=group,
            legendgroup=group,
            showlegend=group not in shown,
            marker=style.marker(12),
            meta={SAID: f"{label}, 0"} if native else None,
            error_x={"array": [found["kl32"]["se"] or 0], "thickness": 1.4, "visible": not native},
            customdata=[[f"{mean:.4f}", found["top1"], found["prompts"], html.escape(said, quote=False)]],
            hovertemplate="<b>%{customdata[3]}</b><br>KL32 %{customdata[0]} nats<br>top-1 %{customdata[1]:.1%}, "
            "%{customdata[2]} prompts<extra></extra>",
        )
        shown.add(group)
    figure = finish(
        figure,
        "Final prompts: mean KL32 (nats per token, logarithmic) of the paths and of the controls",
        x="KL32 (nats, logarithmic)",
        height=170 + 34 * len(rows),
    )
    axis = log_axis([low, high], pad=0.12)
    axis["range"][0] = math.log10(edge) - 0.12
    axis["tickvals"], axis["ticktext"] = [edge, *axis["tickvals"]], ["0", *axis["ticktext"]]
    figure.update_xaxes(**axis)
    figure.add_vline(x=broken, line={"color": NEUTRAL, "width": 1})
    figure.add_annotation(
        text="//",
        x=math.log10(broken),
        y=0,
        yref="paper",
        showarrow=False,
        font={"size": 16},
        yanchor="middle",
    )
    figure.update_yaxes(tickfont={"size": 12}, automargin=True)
    figure.add_vline(
        x=headline(final)["paths"]["direct"]["kl32"]["mean"], line={"color": NEUTRAL, "dash": "dot"}
    )
    return figure
