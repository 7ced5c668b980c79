"""The frame of the prompt explorer's chart: series without values, which the page's script fills in."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report.palette import PATHS, finish

KL, PROBABILITY = "kl", "probability"


def prompt_steps(paths: list[str], steps: int) -> go.Figure:
    """KL by step above, the forced token's probability below; each series' `meta` says what goes into it.

    Args:
        paths: in the order of the legend. steps: how many tokens are forced.
    """
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.11,
        subplot_titles=["KL from native (nats)", "probability of the forced token"],
    )
    figure.update_annotations(font_size=13)
    for path in paths:
        style = PATHS[path]
        for row, what in enumerate((KL, PROBABILITY), 1):
            if (path, what) == ("native", KL):  # zero by definition
                continue
            unit = " nats" if what == KL else ""
            figure.add_scatter(
                x=[],
                y=[],
                name=style.label,
                legendgroup=path,
                showlegend=row == 2,
                mode="lines+markers",
                line=style.line(1.6),
                marker=style.marker(7),
                meta=[path, what],
                hovertemplate=f"<b>{style.label}</b>, step %{{x}}<br>%{{y:.4f}}{unit}<br>"
                "forced “%{customdata[0]}”, most likely “%{customdata[1]}”<extra></extra>",
                row=row,
                col=1,
            )
    figure.update_xaxes(range=[0.3, steps + 0.7], tick0=1, dtick=max(1, round(steps / 10)))
    figure.update_xaxes(title_text="forced step", row=2)
    figure.update_yaxes(rangemode="tozero", row=1)
    figure.update_yaxes(range=[-0.04, 1.06], row=2)
    return finish(figure, "One prompt, step by step", height=600, legend_px=30)
