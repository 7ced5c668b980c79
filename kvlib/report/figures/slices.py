"""The screening's controlled slices, one setting a panel: chapter 01."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlib.report.figures.training import arm_label
from kvlib.report.palette import BASES, PATHS, finish

SHORT_FEATURES = {"own": "own", "rms": "RMS", "rope_stripped": "no RoPE"}
AXES = {
    "learning_rate": "learning rate",
    "rank": "rank",
    "base": "base",
    "warmup": "warm-up (steps)",
    "residual": "residual",
    "features": "features",
}
ORDERED = ("learning_rate", "rank", "warmup")  # settings with values in between, which a line may join


def slices(screening: dict, validation: pd.DataFrame) -> go.Figure:
    """Controlled slices: validation KL32 against one setting at a time, for both bases.

    Whiskers are standard errors of the difference from the base's centre on the same prompts: prompts differ far more
    than arms do, and that spread, which all arms share, would hide what the panels are about.

    Args:
        validation: "arm", "prompt", "kl32", one row per arm and prompt.
    """
    scores = validation.pivot(index="prompt", columns="arm", values="kl32")
    arms = {arm["id"]: arm for arm in screening["arms"]}
    figure = make_subplots(
        rows=3,
        cols=2,
        shared_yaxes="all",
        horizontal_spacing=0.05,
        vertical_spacing=0.115,
        subplot_titles=list(AXES.values()),
    )
    figure.update_annotations(font_size=13)
    for number, axis in enumerate(AXES):
        place = {"row": number // 2 + 1, "col": number % 2 + 1}
        categories: list[str] = []
        for base, style in BASES.items():
            found = _slice(screening, arms, axis, base)
            centre = _centre(screening, arms, base)
            errors = {arm["id"]: _paired(scores, arm["id"], centre)[1] for arm in found}
            names = [_axis_value(arm, axis) for arm in found]
            categories += [name for name in names if name not in categories]
            figure.add_scatter(
                x=names,
                y=[arm["kl32"] for arm in found],
                error_y={"array": [errors.get(arm["id"], 0) for arm in found], "thickness": 1.4, "width": 5},
                name=style.label,
                legendgroup=base,
                showlegend=number == 0,
                mode="lines+markers" if axis in ORDERED else "markers",
                marker=style.marker(10),
                line=style.line(1.5),
                customdata=[
                    (arm_label(arm), arm["top1"], arm["parameters"], _against(scores, arm["id"], centre))
                    for arm in found
                ],
                hovertemplate="<b>%{customdata[0]}</b><br>KL32 %{y:.4f} nats%{customdata[3]}<br>top-1 %{customdata[1]:.1%}"
                "<br>%{customdata[2]:,} parameters<extra></extra>",
                **place,
            )
        for name in ("direct", "ridge"):
            style, level = PATHS[name], screening[name]["kl32"]
            figure.add_scatter(
                x=categories,
                y=[level] * len(categories),
                name=f"{style.label}, no residual",
                legendgroup=f"plain {name}",
                showlegend=number == 0,
                mode="lines",
                line={**style.line(1.5), "dash": "dot"},
                hovertemplate=f"{style.label}, no residual<br>KL32 %{{y:.4f}} nats<extra></extra>",
                **place,
            )
        edges = [-0.4, max(len(categories), 1) - 0.6]
        figure.update_xaxes(
            type="category", categoryorder="array", categoryarray=categories, range=edges, **place
        )
    figure.update_yaxes(col=1, title_text="KL32 (nats)")
    return finish(
        figure,
        "Screening: validation KL32 (nats per token) against one setting at a time",
        height=820,
        legend_px=30,
    )


def _centre(screening: dict, arms: dict, base: str) -> str | None:
    """The arm that every slice of a base shares."""
    every = [set(ids[base]) for ids in screening["slices"].values() if base in ids]
    return next((i for i in arms if every and i in set.intersection(*every)), None)


def _paired(scores: pd.DataFrame, arm: str, centre: str | None) -> tuple[float, float]:
    """(mean, standard error) of an arm's difference from its centre over the prompts; zeros where there is none."""
    if arm == centre or arm not in scores or centre not in scores:
        return 0.0, 0.0
    difference = scores[arm] - scores[centre]
    return float(difference.mean()), float(difference.sem())


def _against(scores: pd.DataFrame, arm: str, centre: str | None) -> str:
    if arm == centre:
        return " (the centre)"
    mean, error = _paired(scores, arm, centre)
    return f"<br>minus the centre {mean:+.4f} ± {error:.4f}".replace("-", "−") if error else ""


def _slice(screening: dict, arms: dict, axis: str, base: str) -> list[dict]:
    if axis == "base":  # the two centres
        ids = [centre] if (centre := _centre(screening, arms, base)) else []
    else:
        ids = (screening["slices"].get(axis) or screening["slices"].get(f"{axis}_steps") or {}).get(base, [])
    return [arms[i] for i in ids if i in arms and arms[i]["kl32"] is not None]


def _axis_value(arm: dict, axis: str) -> str:
    if axis == "learning_rate":
        return f"{arm['learning_rate']:g}"
    if axis == "warmup":
        return str(arm["warmup_steps"])
    return SHORT_FEATURES[arm["features"]] if axis == "features" else str(arm[axis])
