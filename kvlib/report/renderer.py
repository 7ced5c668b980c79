"""Charts that survive MyST-NB: a Plotly renderer that writes HTML, and what stands around a chart."""

import hashlib
import html
import json

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from IPython.display import HTML, display
from myst_nb import glue
from plotly.io.base_renderers import MimetypeRenderer

from kvlib.errors import KvlibError
from kvlib.report.sources import origin
from kvlib.report.spoken import spoken
from kvlib.report.tables.cells import to_html, unfold

NAME = "kvlib_book"
CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
}
TITLE_PX = 46  # of a chart's upper margin, given back when the title moves out of the chart


class BookRenderer(MimetypeRenderer):
    """HTML for the book and Plotly's own MIME type for JupyterLab, in one bundle.

    MyST-NB drops Plotly's type (plotly.py#5365) and keeps the HTML, which carries data alone: charts.js draws,
    so that the page is there before it and the first chart before the others. The title
    leaves the chart and becomes a paragraph, which wraps on a narrow screen. Each chart's id holds a counter as well
    as a hash: with a hash alone a figure shown twice leaves one place blank.
    """

    def __init__(self, script: str = ""):
        self.script, self.shown = script, 0

    def to_mimebundle(self, fig_dict: dict) -> dict:
        native = json.loads(pio.to_json(fig_dict, validate=False))
        return {
            "text/html": self.to_html(fig_dict),
            "application/vnd.plotly.v1+json": native | {"config": CONFIG},
        }

    def to_html(self, fig_dict: dict) -> str:
        """One chart as HTML, with its title and series in words for screen readers."""
        figure = json.loads(pio.to_json(fig_dict, validate=False))
        layout = figure["layout"]
        title = (layout.pop("title", None) or {}).get("text", "")
        if title and layout.get("margin", {}).get("t"):
            layout["margin"]["t"] = max(24, layout["margin"]["t"] - TITLE_PX)
        self.shown += 1
        described = spoken(figure)
        digest = hashlib.sha256(pio.to_json(fig_dict, validate=False).encode()).hexdigest()[:12]
        place = f"chart-{self.shown}-{digest}"
        inside = json.dumps(figure | {"config": CONFIG}, separators=(",", ":"), ensure_ascii=False)
        inside = inside.replace("<", "\\u003c")  # no text of a chart can end the element
        drawing = (
            f'<div id="{place}" class="plotly-graph-div" style="height:{layout.get("height", 440)}px"></div>'
            f'<script type="application/json" class="kv-figure">{inside}</script>'
        )
        plain = html.escape(title.replace("<br>", " "))
        about = f'<p class="kv-spoken" id="about-{place}">{html.escape(described)}</p>' if described else ""
        points = f' aria-describedby="about-{place}"' if described else ""
        chart = f'<div class="kv-chart" role="img" aria-label="{plain}"{points}>{drawing}</div>'
        return f'<p class="kv-title">{plain}</p>{chart}{about}'


def use_book_renderer(script: str = "") -> None:
    """Make every figure of this kernel come out as HTML that the book can keep.

    Args:
        script: the notebook's name, such as "01_screening"; every figure then says that it comes from there.
    """
    pio.renderers[NAME] = BookRenderer(script)
    pio.renderers.default = NAME


def show(figure: go.Figure, caption: str, numbers: pd.DataFrame | None = None, records: str = "") -> None:
    """Display a chart, its caption, and the numbers behind it in a table to unfold.

    Args:
        records: the files that the numbers come from, relative to the run's folder, commas between them.
    """
    _renderer()
    figure.show()
    display(HTML(_below(caption, numbers, records)))


def glue_chart(
    key: str, figure: go.Figure, caption: str, numbers: pd.DataFrame | None = None, records: str = ""
) -> None:
    """As `show`, but kept under `key` for another page instead of being displayed here."""
    drawing = _renderer().to_html(figure.to_dict())
    glue(key, HTML(drawing + _below(caption, numbers, records)), display=False)


def show_table(table: pd.DataFrame, caption: str, records: str = "") -> None:
    """Display a table that is not behind a chart."""
    display(HTML(to_html(table) + _below(caption, None, records)))


def show_tables(tables: dict[str, pd.DataFrame], records: str = "") -> None:
    """Display tables, each above its caption; nothing where there are none."""
    for caption, table in tables.items():
        show_table(table, caption, records)


def glue_tables(tables: dict[str, pd.DataFrame]) -> None:
    """Keep tables for other pages, each under its key."""
    for key, table in tables.items():
        glue(key, HTML(to_html(table)), display=False)


def glue_html(key: str, text: str, records: str = "") -> None:
    """Keep a finished piece of HTML for another page; where `records` are named, with a line that links to them."""
    glue(key, HTML(text + (origin(_renderer().script, records) if records else "")), display=False)


def glue_facts(facts: dict[str, str]) -> None:
    """Keep finished pieces of prose for the pages: one key, one string."""
    for key, text in facts.items():
        glue(key, text, display=False)


def _below(caption: str, numbers: pd.DataFrame | None, records: str) -> str:
    text = f'<p class="kv-caption">{html.escape(caption)}</p>'
    return text + ("" if numbers is None else unfold(numbers)) + origin(_renderer().script, records)


def _renderer() -> BookRenderer:
    renderer = pio.renderers[NAME] if NAME in pio.renderers else None  # noqa: SIM401 (no dict)
    if renderer is None or pio.renderers.default != NAME:
        raise KvlibError(
            f"the chart renderer is {pio.renderers.default!r}, expected {NAME!r}: call use_book_renderer() "
            "first"
        )
    return renderer
