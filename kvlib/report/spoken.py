"""What a screen reader says of a chart: its axes and every series' values, or their range, from the figure itself."""

import base64
import html
import re

import numpy as np

FEW = 7  # values of a series that are said one by one
SAID = "said"  # in a trace's `meta`: what is said of it instead of its coordinates
TAG = re.compile(r"<[^>]*>")


def spoken(figure: dict) -> str:
    """A chart in words. figure: a Plotly figure as its dictionary."""
    layout = figure.get("layout", {})
    said = [f"{name} axis: {title}." for name in ("x", "y") if (title := _axis_title(layout, name))]
    groups: dict[str, list[tuple[list, list]]] = {}
    instead: dict[str, str] = {}
    for trace in figure.get("data", []):
        if isinstance(trace.get("meta"), dict) and SAID in trace["meta"]:
            instead[trace["name"]] = trace["meta"][SAID]
        x, y = _values(trace.get("x")), _values(trace.get("y"))
        if trace.get("name") and trace.get("hoverinfo") != "skip" and any(v is not None for v in y):
            groups.setdefault(trace["name"], []).append((x, y))
    series = (f"{_plain(name)}: {instead.get(name) or _series(parts)}." for name, parts in groups.items())
    return " ".join([*said, *series])


def _series(parts: list[tuple[list, list]]) -> str:
    pairs = [
        (x, y) for xs, ys in parts for x, y in zip(xs or [None] * len(ys), ys, strict=False) if y is not None
    ]
    if all(isinstance(y, str) for _, y in pairs):  # a chart of rows: the values lie along x
        pairs = [(y, x) for x, y in pairs]
    if len(pairs) <= FEW:
        return "; ".join(f"{_text(x)}, {_text(y)}" if x is not None else _text(y) for x, y in pairs)
    numbers = [y for _, y in pairs if isinstance(y, (int, float))]
    return f"{len(pairs)} values" + (
        f" from {_text(min(numbers))} to {_text(max(numbers))}" if numbers else ""
    )


def _values(series) -> list:
    """A trace's values as a list; Plotly writes arrays of numbers as base64."""
    if isinstance(series, dict) and "bdata" in series:
        return np.frombuffer(base64.b64decode(series["bdata"]), np.dtype(series["dtype"])).tolist()
    return [] if series is None else [v.item() if hasattr(v, "item") else v for v in series]


def _axis_title(layout: dict, name: str) -> str:
    axes = sorted(key for key in layout if re.fullmatch(rf"{name}axis\d*", key))
    titles = [((layout[key] or {}).get("title") or {}).get("text", "") for key in axes]
    return " / ".join(dict.fromkeys(_plain(title) for title in titles if title))


def _plain(text: str) -> str:
    return " ".join(html.unescape(TAG.sub(" ", str(text))).split())


def _text(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _plain(value)
