"""Charts of how the pair was made and the learned map chosen: chapters 00 to 02."""

import textwrap

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report.palette import BASES, DASHES, KL_AXIS, MARKERS, NEUTRAL, PATHS, SEQUENCE, Style, finish

FEATURES = {"own": "own head", "rms": "RMS-normalised", "rope_stripped": "RoPE-stripped"}
SMOOTHING_STEPS = 10


def arm_label(arm: dict) -> str:
    """An arm in words: what it shares with most arms is left out."""
    said = [f"{arm['base']} base", f"rank {arm['rank']}", f"learning rate {arm['learning_rate']:g}"]
    if arm["residual"] != "linear":
        said.append(arm["residual"])
    if arm["features"] != "own":
        said.append(f"{FEATURES[arm['features']]} features")
    if not arm["warmup_steps"]:
        said.append("no warm-up")
    return ", ".join(said)


def residual_error(layers: pd.DataFrame) -> go.Figure:
    """How far the source's residual stream is from the target's after each layer."""
    figure = go.Figure()
    parts = (
        ("residual_error", "residual stream lost", Style("", SEQUENCE[0], "circle", "dash")),
        ("mlp_energy_kept", "MLP energy kept", Style("", SEQUENCE[1], "square", "solid")),
    )
    for column, name, style in parts:
        if column in layers and layers[column].notna().any():
            figure.add_scatter(
                x=layers.layer,
                y=layers[column],
                name=name,
                mode="lines+markers",
                marker=style.marker(7),
                line=style.line(),
                hovertemplate=f"layer %{{x}}<br>{name}: %{{y:.3f}} of the energy<extra></extra>",
            )
    if layers.empty:
        figure.add_annotation(
            text="the source was loaded, not pruned",
            showarrow=False,
            xref="paper",
            yref="paper",
            x=0.5,
            y=0.5,
        )
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(dtick=max(1, len(layers) // 6))
    return finish(
        figure,
        "What width pruning loses and keeps, by layer (share of the energy)",
        x="layer",
        y="share of the energy",
    )


def curves(table: pd.DataFrame, screening: dict) -> go.Figure:
    """Training loss of every arm after its warm-up, as a running mean."""
    figure, shown = go.Figure(), set()
    arms = {arm["id"]: arm for arm in screening["arms"]}
    for name, rows in table[table.phase == "kl"].groupby("arm", sort=False):
        arm, rows = arms[name], rows.sort_values("step")
        style, first = BASES[arm["base"]], arm["base"] not in shown
        shown.add(arm["base"])
        figure.add_scatter(
            x=rows.step,
            y=rows.loss.rolling(SMOOTHING_STEPS, min_periods=1).mean().round(5),
            name=style.label,
            legendgroup=arm["base"],
            showlegend=first,
            mode="lines",
            line={**style.line(1.3), "dash": "solid"},
            opacity=0.95 if name in screening["selected"] else 0.35,
            hovertemplate=f"<b>{arm_label(arm)}</b><br>step %{{x}}<br>loss %{{y:.4f}} nats<extra></extra>",
        )
    return finish(
        figure,
        f"Screening: training loss (KL, nats per token) by step, running mean of {SMOOTHING_STEPS} steps",
        x="step",
        y="KL on forced text (nats)",
    )


def grid(screening: dict) -> go.Figure:
    """Checkpoint and residual scale of the arms that were selected, one panel each."""
    arms = {arm["id"]: arm for arm in screening["arms"]}
    rows, chosen = pd.DataFrame(screening["grid"]), {c["arm"]: c for c in screening["chosen"]}
    selected = [a for a in screening["selected"] if a in chosen]
    height = -(-len(selected) // 2)
    titles = ["<br>".join(textwrap.wrap(arm_label(arms[a]), 26)) for a in selected]
    figure = make_subplots(
        rows=height,
        cols=2,
        shared_yaxes="all",
        horizontal_spacing=0.05,
        vertical_spacing=0.5 / max(height, 2),
        subplot_titles=titles,
    )
    figure.update_annotations(font_size=10)
    for panel, name in enumerate(selected):
        place, best = {"row": panel // 2 + 1, "col": panel % 2 + 1}, chosen[name]
        for i, (step, line) in enumerate(rows[rows.arm == name].groupby("checkpoint_step")):
            figure.add_scatter(
                x=line.scale,
                y=line.kl32,
                name=f"step {step}",
                legendgroup=str(step),
                showlegend=panel == 0,
                mode="lines+markers",
                line={"color": SEQUENCE[i % 5], "dash": DASHES[i % 5], "width": 1.6},
                marker={"color": SEQUENCE[i % 5], "symbol": MARKERS[i % 5], "size": 8},
                customdata=line[["se", "top1"]],
                hovertemplate=f"<b>{arm_label(arms[name])}</b><br>checkpoint at step {step}, "
                "scale %{x}<br>KL32 %{y:.4f} ± %{customdata[0]:.4f} nats<br>"
                "top-1 %{customdata[1]:.1%}<extra></extra>",
                **place,
            )
        figure.add_scatter(
            x=[best["scale"]],
            y=[best["kl32"]],
            name="lowest of its arm",
            legendgroup="best",
            showlegend=panel == 0,
            mode="markers",
            marker={"symbol": "star", "size": 15, "color": PATHS["learned"].colour},
            hovertemplate=f"chosen for {arm_label(arms[name])}<br>KL32 %{{y:.4f}} nats<extra></extra>",
            **place,
        )
    scales = sorted(rows.scale.unique().tolist())
    figure.update_xaxes(tickvals=scales, ticktext=[f"{s:g}" for s in scales])
    figure.update_xaxes(title_text="residual scale", row=height)
    figure.update_yaxes(col=1, title_text="KL32 (nats)")
    title = "Selected arms: validation KL32 (nats per token) against residual scale, by checkpoint"
    return finish(figure, title, height=max(280 * height, 440), legend_px=52)


def confirmation(summary: dict, screening: dict) -> go.Figure:
    """Two arms retrained with several seeds on text that the screen has not seen."""
    arms = {arm["id"]: arm for arm in screening["arms"]}
    frozen, figure = summary["frozen"], go.Figure()
    for number, arm in enumerate(summary["arms"]):
        style = BASES[arms[arm["id"]]["base"]]
        runs = [run for run in arm["runs"] if run["kl32"] is not None]
        spread = [number + 0.22 * (i - (len(runs) - 1) / 2) for i in range(len(runs))]
        figure.add_scatter(
            x=spread,
            y=[run["kl32"] for run in runs],
            error_y={"array": [run["se"] for run in runs], "thickness": 1},
            mode="markers",
            marker=style.marker(11),
            name=f"seeds, {style.label}",
            showlegend=number == 0,
            customdata=[(run["seed"], run["top1"]) for run in runs],
            hovertemplate=f"<b>{arm_label(arms[arm['id']])}</b><br>seed %{{customdata[0]}}<br>"
            "KL32 %{y:.4f} nats<br>top-1 %{customdata[1]:.1%}<extra></extra>",
        )
        if arm["mean_kl32"] is not None:
            figure.add_scatter(
                x=[number - 0.35, number + 0.35],
                y=[arm["mean_kl32"]] * 2,
                mode="lines",
                name="mean over seeds",
                showlegend=number == 0,
                line={"color": NEUTRAL, "width": 2},
                hovertemplate="mean over seeds<br>KL32 %{y:.4f} nats<extra></extra>",
            )
        for x, run in zip(spread, runs, strict=True):
            if (arm["id"], run["seed"]) == (frozen["arm"], frozen["seed"]):
                figure.add_scatter(
                    x=[x],
                    y=[run["kl32"]],
                    mode="markers",
                    name="frozen",
                    hoverinfo="skip",
                    marker={
                        "symbol": "circle-open",
                        "size": 24,
                        "color": SEQUENCE[0],
                        "line": {"width": 2.5},
                    },
                )
    ends = [-0.5, len(summary["arms"]) - 0.5]
    figure.add_scatter(
        x=ends,
        y=[summary["direct"]["kl32"]] * 2,
        mode="lines",
        name=PATHS["direct"].label,
        line=PATHS["direct"].line(1.5),
        hovertemplate="direct reuse<br>KL32 %{y:.4f} nats<extra></extra>",
    )
    names = ["<br>".join(textwrap.wrap(arm_label(arms[arm["id"]]), 20)) for arm in summary["arms"]]
    figure.update_xaxes(
        tickvals=list(range(len(names))),
        ticktext=names,
        tickangle=0,
        zeroline=False,
        range=ends,
        showgrid=False,
    )
    return finish(
        figure,
        "Confirmation: KL32 (nats per token) of the finalists, by training seed, with standard errors",
        y=KL_AXIS,
        height=460,
    )
