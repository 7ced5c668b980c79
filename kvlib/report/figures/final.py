"""Charts of the frozen evaluation: chapter 03."""

import html
import textwrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report.palette import KL_AXIS, NEUTRAL, PATHS, finish, log_axis

HANDOFFS = ("direct", "ridge", "learned")
FORCINGS = {
    "oracle": "forced along native's own greedy tokens",
    "text": "forced along the article's own continuation",
}
HOVER_CHARACTERS = 220


def forcing_label(forcing: str) -> str:
    return FORCINGS.get(forcing, f"forcing: {forcing}")


def kl_by_path(final: dict) -> go.Figure:
    """Mean KL32 with standard errors as bars, top-1 agreement as markers on a second axis."""
    figure = go.Figure()
    for forcing, found in final["forcing"].items():
        paths = [path for path in PATHS if path in found["paths"]]
        values = [found["paths"][path] for path in paths]
        pattern = "" if forcing == "oracle" else "/"
        group = {"offsetgroup": forcing, "legendgroup": forcing}
        figure.add_bar(
            x=paths,
            y=[v["kl32"]["mean"] for v in values],
            name=f"KL32, {forcing}",
            error_y={"array": [v["kl32"]["se"] for v in values], "thickness": 1.4, "color": NEUTRAL},
            showlegend=False,
            **group,
            marker={
                "color": [PATHS[path].colour for path in paths],
                "pattern": {"shape": pattern, "fillmode": "replace"},
            },
            customdata=[
                (v["top1"], v["kl32"].get("median"), v["prompts"], forcing_label(forcing)) for v in values
            ],
            hovertemplate="<b>%{x}</b><br>%{customdata[3]}<br>KL32 %{y:.4f} nats "
            "(median %{customdata[1]:.4f})<br>top-1 %{customdata[0]:.2%}, "
            "%{customdata[2]} prompts<extra></extra>",
        )
        figure.add_bar(  # a grey stand-in, so that the legend explains the pattern and not a path's colour
            x=[None],
            y=[None],
            name=f"KL32, {forcing}",
            marker={"color": NEUTRAL, "pattern": {"shape": pattern, "fillmode": "replace"}},
            **group,
        )
        figure.add_scatter(
            x=paths,
            y=[v["top1"] for v in values],
            yaxis="y2",
            mode="lines+markers",
            name=f"top-1, {forcing} (right axis)",
            line={"color": NEUTRAL, "width": 1, "dash": "dot"},
            marker={
                "symbol": "x" if forcing == "oracle" else "cross",
                "size": 10,
                "color": "#f4f4f4",
                "line": {"width": 1.6, "color": "#3a3f47"},
            },
            hovertemplate=f"<b>%{{x}}</b><br>{forcing_label(forcing)}<br>top-1 %{{y:.2%}}<extra></extra>",
        )
    figure = finish(
        figure,
        "Final prompts: mean KL32 (nats per token) with standard errors, and top-1 agreement, by path",
        y=KL_AXIS,
    )
    low = min(v["top1"] for f in final["forcing"].values() for v in f["paths"].values())
    figure.update_layout(
        barmode="group",
        bargap=0.3,
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "tickformat": ".0%",
            "range": [np.floor(low * 10) / 10 - 0.1, 1.03],
            "dtick": 0.1,
            "tick0": 0,
            "title": {"text": "top-1 agreement", "standoff": 4},
            "showgrid": False,
            "automargin": True,
        },
    )
    return figure


def paired_prompts(prompts: pd.DataFrame, forcing: str) -> go.Figure:
    """One point per prompt: direct reuse against the other handoffs, with the diagonal."""
    wide, about = _wide(prompts, forcing)
    figure = go.Figure()
    shown = wide[[path for path in HANDOFFS if path in wide]].to_numpy()
    low, high = float(np.min(shown)) * 0.9, float(np.max(shown)) * 1.1
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        line={"color": NEUTRAL, "dash": "dash", "width": 1},
        name="equal",
        hoverinfo="skip",
    )
    for path in ("learned", "ridge"):
        if path not in wide:
            continue
        style = PATHS[path]
        better = int((wide[path] < wide.direct).sum())
        figure.add_scatter(
            x=wide.direct,
            y=wide[path],
            mode="markers",
            name=f"{style.label} (below the line: {better} of {len(wide)})",
            marker=style.marker(9, opacity=0.8),
            visible=True if path == "learned" else "legendonly",
            customdata=about,
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>direct %{{x:.4f}}, {path} %{{y:.4f}} nats<br>"
            "<i>%{customdata[1]}</i><extra></extra>",
        )
    if low > 0:
        figure.update_xaxes(**log_axis([low, high], pad=0))
        figure.update_yaxes(**log_axis([low, high], pad=0))
    return finish(
        figure,
        "Each final prompt: KL32 (nats per token) of the learned correction against direct reuse",
        x="direct reuse: KL32 (nats per token)",
        y="KL32 (nats per token)",
        height=520,
    )


def sorted_differences(prompts: pd.DataFrame, forcing: str) -> go.Figure:
    """Learned minus direct, one bar per prompt, best first."""
    wide, about = _wide(prompts, forcing)
    wide = wide.assign(
        difference=wide.learned - wide.direct, name=[a[0] for a in about], text=[a[1] for a in about]
    )
    wide = wide.sort_values("difference").reset_index(drop=True)
    figure = go.Figure()
    signs = (
        (wide.difference < 0, "learned is closer to native", PATHS["learned"], ""),
        (wide.difference >= 0, "direct is closer, or equal", PATHS["direct"], "/"),
    )
    for mask, name, style, pattern in signs:
        part = wide[mask]
        figure.add_bar(
            x=part.index + 1,
            y=part.difference,
            name=f"{name} ({len(part)})",
            marker={
                "color": style.colour,
                "line": {"color": style.colour, "width": 1.2},
                "pattern": {"shape": pattern, "fillmode": "replace"},
            },
            customdata=part[["name", "text", "direct", "learned"]],
            hovertemplate="<b>%{customdata[0]}</b><br>difference %{y:+.4f} nats "
            "(direct %{customdata[2]:.4f}, learned %{customdata[3]:.4f})<br>"
            "<i>%{customdata[1]}</i><extra></extra>",
        )
    mean = float(wide.difference.mean())
    figure.add_scatter(
        x=[0.5, len(wide) + 0.5],
        y=[mean, mean],
        mode="lines",
        name="mean",
        line={"color": NEUTRAL, "dash": "dash", "width": 1.5},
        hovertemplate="mean difference %{y:+.4f} nats<extra></extra>",
    )
    figure.update_layout(bargap=0.15)
    return finish(
        figure,
        "Each final prompt: learned minus direct KL32 (nats per token), sorted",
        x="prompt, sorted by difference",
        y="difference in KL32 (nats)",
    )


def kl_by_step(steps: pd.DataFrame) -> go.Figure:
    """Mean KL at each forced step, per path, with a band of one standard error."""
    forcings = list(dict.fromkeys(steps.forcing))
    figure = make_subplots(
        rows=len(forcings),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.12,
        subplot_titles=[forcing_label(f) for f in forcings],
    )
    figure.update_annotations(font_size=13)
    for row, forcing in enumerate(forcings, 1):
        for path in HANDOFFS:
            found = (
                steps[(steps.forcing == forcing) & (steps.path == path)]
                .groupby("step")
                .kl.agg(["mean", "sem"])
            )
            if found.empty:
                continue
            style, x = PATHS[path], found.index.to_numpy()
            figure.add_scatter(
                x=np.concatenate([x, x[::-1]]),
                y=np.concatenate([found["mean"] + found["sem"], (found["mean"] - found["sem"])[::-1]]),
                fill="toself",
                fillcolor=style.fill(),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=path,
                row=row,
                col=1,
            )
            figure.add_scatter(
                x=x,
                y=found["mean"],
                mode="lines+markers",
                name=style.label,
                legendgroup=path,
                showlegend=row == 1,
                line=style.line(1.8),
                marker=style.marker(6),
                customdata=found[["sem"]],
                hovertemplate=f"{style.label}, step %{{x}}<br>KL %{{y:.4f}} ± "
                "%{customdata[0]:.4f} nats<extra></extra>",
                row=row,
                col=1,
            )
    figure.update_xaxes(title_text="forced step", row=len(forcings), col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(tick0=1, dtick=max(1, round(int(steps.step.max()) / 10)))
    title = "Final prompts: mean KL (nats) at each forced step, by path, with a band of one standard error"
    return finish(figure, title, y="KL (nats)", height=130 + 290 * len(forcings), legend_px=30)


def _wide(prompts: pd.DataFrame, forcing: str) -> tuple[pd.DataFrame, list[tuple[str, str]]]:
    """KL32 per prompt and path, and for the hover each prompt's article and the end of its text."""
    rows = prompts[prompts.forcing == forcing]
    wide = rows.pivot(index="prompt", columns="path", values="kl32").sort_index().reset_index()
    known = rows.drop_duplicates("prompt").set_index("prompt").sort_index()
    about = []
    for prompt, article, text in zip(known.index, known.article, known.text, strict=True):
        end = " ".join(str(text).split())[-HOVER_CHARACTERS:]
        lines = "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap("… " + end, 56))
        about.append((f"prompt {prompt}: {html.escape(str(article), quote=False)}", lines))
    return wide, about
