"""Charts of the evidence chapter that look inside the frozen map, layer by layer."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report import evidence
from kvlib.report.palette import NEUTRAL, PATHS, Style, finish

KINDS = {
    "keys": Style("keys", "#7f6bd6", "diamond", "solid"),
    "values": Style("values", "#9a8412", "pentagon", "dash"),
}
LOWEST_R2 = -1.0  # what lies below is as good as lost, and would flatten everything else


def note(figure: go.Figure, text: str, row: int = 1) -> None:
    """Say in the middle of an empty panel why it is empty."""
    domain = figure.layout[f"yaxis{'' if row == 1 else row}"].domain or (0, 1)
    figure.add_annotation(
        text=text, showarrow=False, xref="paper", yref="paper", x=0.5, y=sum(domain) / 2, font={"size": 13}
    )


def finish_panels(figure: go.Figure, title: str, **settings) -> go.Figure:
    """`palette.finish` without the traces that hold nothing: alone in a panel they upset Plotly's drawing."""
    figure.data = [trace for trace in figure.data if trace.x is not None and len(trace.x)]
    return finish(figure, title, **settings)


def correction(tables: dict[str, pd.DataFrame]) -> go.Figure:
    """Per layer, keys against values: largest singular value, directions in use, size beside the cache."""
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.08,
        subplot_titles=[
            "largest singular value",
            "directions that carry it",
            "size beside the cache (share of RMS)",
        ],
    )
    figure.update_annotations(font_size=13)
    found, size = evidence.spectrum(tables["singular_values"]), tables["size"]
    for kind, style in KINDS.items():
        rows = found[found.kind == kind].sort_values("layer")
        for row, (column, digits) in enumerate((("largest", ".4f"), ("directions", ".2f")), 1):
            _band(figure, rows.dropna(subset=[column]), column, style, digits, row)
        ratios = size[(size.kind == kind) & size.ratio.notna()].sort_values("layer")
        figure.add_scatter(
            x=ratios.layer,
            y=ratios.ratio,
            **_line(style, row=3),
            customdata=ratios[["cache_rms", "correction_rms"]],
            hovertemplate=f"<b>{style.label}</b>, layer %{{x}}<br>%{{y:.2%}} of the cache's RMS"
            "<br>correction %{customdata[1]:.4g}, cache %{customdata[0]:.4g}<extra></extra>",
        )
    if found.directions.isna().all():
        note(figure, "the correction is zero", row=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat="~%", row=3, col=1)
    _layer_axis(figure, size.layer, 3)
    title = "The learned correction by layer: its strength, and its size as a share of the cache"
    return finish_panels(figure, title, height=820, legend_px=30)


def _band(figure, rows: pd.DataFrame, column: str, style: Style, digits: str, row: int) -> None:
    """The mean over heads as a line, from the lowest to the highest head as a band."""
    low, high = rows[f"{column}_low"], rows[f"{column}_high"]
    figure.add_scatter(
        x=np.concatenate([rows.layer, rows.layer[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=style.fill(0.22),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        legendgroup=style.label,
        row=row,
        col=1,
    )
    figure.add_scatter(
        x=rows.layer,
        y=rows[column],
        **_line(style, row=row, showlegend=row == 1),
        customdata=np.stack([low, high], axis=-1),
        hovertemplate=f"<b>{style.label}</b>, layer %{{x}}<br>mean over heads %{{y:{digits}}}<br>"
        f"heads from %{{customdata[0]:{digits}}} to %{{customdata[1]:{digits}}}<extra></extra>",
    )


def _line(style: Style, *, row: int, showlegend: bool = False) -> dict:
    return {
        "mode": "lines+markers",
        "name": style.label,
        "legendgroup": style.label,
        "showlegend": showlegend,
        "line": style.line(1.8),
        "marker": style.marker(6),
        "row": row,
        "col": 1,
    }


def layers(summary: dict, tables: dict[str, pd.DataFrame]) -> go.Figure:
    """Gain of keys and of values alone; what each layer costs when off, and brings when it alone is on."""
    figure = make_subplots(
        rows=3,
        cols=1,
        row_heights=[0.2, 0.4, 0.4],
        vertical_spacing=0.1,
        subplot_titles=[
            "gain over direct reuse",
            "this layer off: what is lost",
            "this layer alone: what is gained",
        ],
    )
    figure.update_annotations(font_size=13)
    whole = evidence.parts(summary, tables).dropna(subset=["gain"])
    each = evidence.by_layer(summary, tables)
    names = {"x": "part", "said": "%{y}"}
    _signed_bars(figure, whole.part, whole.gain, whole.se, whole.share, 1, names, flat=True)
    for row, column in ((2, "off"), (3, "only")):
        part = each.dropna(subset=[column])
        said = {"off": "layer %{x} off", "only": "layer %{x} alone"}[column]
        shares = part[f"{column}_share"]
        _signed_bars(
            figure, part.layer, part[column], part[f"{column}_se"], shares, row, {"x": "layer", "said": said}
        )
    for better, name, colour, pattern in _SIGNS:  # stand-ins, so that the legend does not hang on the data
        figure.add_bar(
            x=[None],
            y=[None],
            name=name,
            legendgroup=str(better),
            marker=_bar_marker(colour, pattern),
            row=1,
            col=1,
        )
    if each.empty:
        note(figure, "no layer was switched", row=2)
    figure.update_yaxes(title_text="KL32 (nats)", row=2, col=1)
    figure.update_yaxes(title_text="KL32 (nats)", row=3, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(title_text="KL32 (nats)", row=1, col=1)
    for row in (2, 3):
        _layer_axis(figure, each.layer, row, title=row == 3)
    figure.update_layout(bargap=0.25, barmode="overlay")
    title = "Where the gain comes from: KL32 (nats per token) by part and by layer"
    return finish_panels(figure, title, height=860, legend_px=30)


_SIGNS = (
    (True, "the correction helps", PATHS["learned"].colour, ""),
    (False, "it does harm, or nothing", PATHS["direct"].colour, "/"),
)


def _bar_marker(colour: str, pattern: str) -> dict:
    return {
        "color": colour,
        "line": {"color": colour, "width": 1},
        "pattern": {"shape": pattern, "fillmode": "replace"},
    }


def _signed_bars(figure, places, values, errors, shares, row: int, names: dict, flat: bool = False) -> None:
    """Bars with standard errors, those above zero in one colour and those below in another."""
    values, errors = (
        pd.to_numeric(values).to_numpy(float),
        pd.to_numeric(pd.Series(list(errors))).to_numpy(float),
    )
    said = [("" if pd.isna(s) else f", {s:.1%} of the whole gain") for s in shares]
    spread = ["" if np.isnan(e) else f" ± {e:.5f}" for e in errors]
    for better, name, colour, pattern in _SIGNS:
        chosen = np.flatnonzero((values > 0) == better)
        if not len(chosen):
            continue
        along, across = [list(places)[i] for i in chosen], values[chosen]
        whiskers = {"array": np.nan_to_num(errors[chosen]), "thickness": 1, "width": 2, "color": NEUTRAL}
        figure.add_bar(
            **({"x": across, "y": along, "orientation": "h"} if flat else {"x": along, "y": across}),
            **({"error_x": whiskers} if flat else {"error_y": whiskers}),
            width=0.76,
            name=name,
            legendgroup=str(better),
            showlegend=False,
            marker=_bar_marker(colour, pattern),
            customdata=[(said[i], spread[i]) for i in chosen],
            hovertemplate=f"<b>{names['said']}</b><br>%{{{'x' if flat else 'y'}:+.5f}}%{{customdata[1]}} nats"
            "%{customdata[0]}<extra></extra>",
            row=row,
            col=1,
        )


def reconstruction(summary: dict, tables: dict[str, pd.DataFrame]) -> go.Figure:
    """KL32 of the paths, and below it how well each reconstructs keys, values and what attention reads."""
    ridge = tables["ridge"]
    panels = (("keys", "r2"), ("values", "r2"), ("attention", "cosine"))
    hidden = {kind: int((ridge[ridge.kind == kind].r2 < LOWEST_R2).sum()) for kind in evidence.KINDS}
    figure = make_subplots(
        rows=4,
        cols=1,
        row_heights=[0.16, 0.28, 0.28, 0.28],
        vertical_spacing=0.08,
        subplot_titles=[
            "KL32: lower is closer to native",
            _r2_title("keys", hidden["keys"]),
            _r2_title("values", hidden["values"]),
            "cosine of the attention's output",
        ],
    )
    figure.update_annotations(font_size=13)
    for path, found in evidence.path_scores(summary).items():
        style = PATHS[path]
        if found["kl32"] is not None:
            figure.add_bar(
                x=[found["kl32"]],
                y=[path],
                orientation="h",
                name=style.label,
                legendgroup=path,
                showlegend=False,
                marker={"color": style.colour},
                error_x={"array": [found["se"] or 0], "thickness": 1.2, "color": NEUTRAL},
                hovertemplate=f"<b>{style.label}</b><br>KL32 %{{x:.4f}} nats<extra></extra>",
                row=1,
                col=1,
            )
        for row, (kind, column) in enumerate(panels, 2):
            rows = ridge[(ridge.kind == kind) & (ridge.path == path) & ridge[column].notna()]
            rows = rows.sort_values("layer")
            word = {"r2": "R²", "cosine": "cosine"}[column]
            figure.add_scatter(
                x=rows.layer,
                y=rows[column],
                mode="lines+markers",
                name=style.label,
                legendgroup=path,
                showlegend=row == 2,
                line=style.line(1.8),
                marker=style.marker(6),
                hovertemplate=f"<b>{style.label}</b>, {kind}, layer %{{x}}<br>{word} %{{y:.4f}}<extra></extra>",
                row=row,
                col=1,
            )
    for row, kind in ((2, "keys"), (3, "values")):
        figure.update_yaxes(title_text="R²", row=row, col=1)
        if hidden[kind]:
            figure.update_yaxes(range=[LOWEST_R2 - 0.05, 1.05], row=row, col=1)
        if ridge[ridge.kind == kind].r2.notna().sum() == 0:
            note(figure, "no R² on record", row=row)
    if ridge[ridge.kind == "attention"].cosine.notna().sum() == 0:
        note(figure, "no cosine on record", row=4)
    figure.update_xaxes(rangemode="tozero", title_text="KL32 (nats)", row=1, col=1)
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_yaxes(title_text="cosine", row=4, col=1)
    for row in (2, 3, 4):
        _layer_axis(figure, ridge.layer, row, title=row == 4)
    title = "KL32 (nats per token) beside reconstruction of the target's cache, by layer"
    return finish_panels(figure, title, height=1040, legend_px=30)


def _r2_title(kind: str, hidden: int) -> str:
    below = f" ({hidden} below {LOWEST_R2:g}, not shown)".replace("-", "−") if hidden else ""
    return f"R² of the {kind}{below}"


def _layer_axis(figure: go.Figure, found: pd.Series, row: int, title: bool = True) -> None:
    last = int(found.max()) if len(found) else 0
    figure.update_xaxes(tick0=0, dtick=max(1, round(last / 6)), range=[-0.7, last + 0.7], row=row, col=1)
    if title:
        figure.update_xaxes(title_text="layer", row=row, col=1)
