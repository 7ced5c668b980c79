"""Charts of several runs beside one another, from each run's summaries."""

import plotly.graph_objects as go

from kvlib.report.palette import DASHES, KL_AXIS, MARKERS, NEUTRAL, PATHS, SEQUENCE, finish, log_axis
from kvlib.report.summaries import headline, median_times, prefix_lengths

HANDOFFS = ("direct", "ridge", "learned")


def fidelity_by_run(finals: dict[str, dict]) -> go.Figure:
    """Mean KL32 on the final prompts with standard errors: one place per run, one marker per path.

    Args:
        finals: run -> its final evaluation's summary.
    """
    figure, runs = go.Figure(), list(finals)
    found = {run: headline(final)["paths"] for run, final in finals.items()}
    for path in HANDOFFS:
        scores = [found[run].get(path) for run in runs]
        figure.add_scatter(
            x=runs,
            y=[each and each["kl32"]["mean"] for each in scores],
            mode="markers",
            name=PATHS[path].label,
            offsetgroup=path,
            marker=PATHS[path].marker(12),
            error_y={"array": [(each and each["kl32"]["se"]) or 0 for each in scores], "thickness": 1.4},
            customdata=[(each["top1"], each["prompts"]) if each else (None, None) for each in scores],
            hovertemplate=f"<b>{PATHS[path].label}</b>, run %{{x}}<br>KL32 %{{y:.4f}} nats<br>"
            "top-1 %{customdata[0]:.1%}, %{customdata[1]} prompts<extra></extra>",
        )
    figure.update_yaxes(rangemode="tozero")
    title = "Final prompts: mean KL32 (nats per token) with standard errors, by run and path"
    return _by_run(figure, runs, title, KL_AXIS)


def gain_by_run(finals: dict[str, dict]) -> go.Figure:
    """Learned minus direct and ridge minus direct with their 95 % intervals, one place per run."""
    figure = go.Figure()
    for path in ("learned", "ridge"):
        tests = {run: headline(final)["paired"].get(f"{path}-direct") for run, final in finals.items()}
        known = {run: test for run, test in tests.items() if test and test["mean"] is not None}
        points = {run: (test["mean"], test.get("ci95")) for run, test in known.items()}
        _intervals(figure, path, f"{PATHS[path].label} − direct reuse", points)
        figure.data[-1].customdata = [(test["wins"], test["prompts"]) for test in known.values()]
        figure.data[-1].hovertemplate = (
            f"<b>{PATHS[path].label} − direct</b>, run %{{x}}<br>mean %{{y:+.4f}} nats<br>"
            "lower on %{customdata[0]} of %{customdata[1]} prompts<extra></extra>"
        )
    title = (
        "Final prompts: paired difference to direct reuse in KL32 (nats per token), 95 % intervals, by run"
    )
    return _by_run(figure, list(finals), title)


def difference_by_prompt(
    rows: dict[str, dict[str, tuple[float, list[float] | None]]], first: str
) -> go.Figure:
    """Every other run's KL32 minus the first run's on the same prompts, with 95 % intervals.

    Args:
        rows: run -> path -> (mean, interval or None), along native's own forced tokens.
    """
    figure = go.Figure()
    for path in HANDOFFS:
        _intervals(
            figure,
            path,
            PATHS[path].label,
            {run: found[path] for run, found in rows.items() if path in found},
        )
        figure.data[
            -1
        ].hovertemplate = (
            f"<b>{PATHS[path].label}</b>, run %{{x}}<br>%{{y:+.4f}} nats against {first}<extra></extra>"
        )
    title = f"The same final prompts: KL32 (nats per token) minus that of run {first}, 95 % intervals"
    return _by_run(figure, list(rows), title)


def _intervals(
    figure: go.Figure, path: str, name: str, points: dict[str, tuple[float, list[float] | None]]
) -> None:
    means = [mean for mean, _ in points.values()]
    bounds = [bound or [mean, mean] for mean, bound in points.values()]
    figure.add_scatter(
        x=list(points),
        y=means,
        mode="markers",
        name=name,
        offsetgroup=path,
        marker=PATHS[path].marker(11),
        error_y={
            "array": [bound[1] - mean for mean, bound in zip(means, bounds)],
            "arrayminus": [mean - bound[0] for mean, bound in zip(means, bounds)],
            "thickness": 1.6,
        },
    )


def _by_run(
    figure: go.Figure, runs: list[str], title: str, y: str = "difference in KL32 (nats)"
) -> go.Figure:
    """The shared frame: the runs in their order along the lower edge, the paths of each side by side."""
    figure.update_layout(scattermode="group", scattergap=0.7)
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=runs)
    figure.add_hline(y=0, line={"color": NEUTRAL, "dash": "dash", "width": 1})
    return finish(figure, title, x="run", y=y)


def speedup_by_run(latencies: dict[str, dict]) -> go.Figure:
    """Native over learned time to first token against prefix length, resident and cold, one line per run."""
    figure, known, lengths = go.Figure(), [], set()
    for number, (run, latency) in enumerate(latencies.items()):
        for kind, dash in (("resident", "solid"), ("cold", "dot")):
            points = []
            for tokens in prefix_lengths(latency):
                times = median_times(latency, tokens)
                native, learned = times.get(("native", kind)), times.get(("learned", kind))
                if native and learned:
                    points.append((tokens, native / learned))
            if not points:
                continue
            lengths |= {tokens for tokens, _ in points}
            known += [ratio for _, ratio in points]
            figure.add_scatter(
                x=[tokens for tokens, _ in points],
                y=[ratio for _, ratio in points],
                mode="lines+markers",
                name=f"{run}, {'cache resident' if kind == 'resident' else 'cold'}",
                line={"color": SEQUENCE[number % len(SEQUENCE)], "dash": dash, "width": 2},
                marker={"symbol": MARKERS[number % len(MARKERS)], "size": 9},
                hovertemplate=f"<b>{run}</b>, {kind}<br>%{{x:,}} tokens: native ÷ learned %{{y:.3g}}<extra></extra>",
            )
    ticks = sorted(lengths)
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])
    if known:
        figure.update_yaxes(**log_axis(known))
    figure.add_hline(y=1, line={"color": NEUTRAL, "dash": DASHES[1], "width": 1})
    title = "Time to first token: native ÷ learned (ratio, p50) against prefix length (tokens), by run"
    return finish(figure, title, x="prefix (tokens)", y="native ÷ learned (ratio)", legend_px=30)
