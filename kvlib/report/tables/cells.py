"""How a table is written: cells for readers, full values for sorting, HTML that cannot be broken."""

import html
import math
from numbers import Integral, Real

import pandas as pd

ABSENT = "–"

RIGHT = ' class="kv-number"'
LONG = ' class="kv-long"'  # hashes: may be broken anywhere
PROSE = ' class="kv-prose"'  # sentences: wide enough to read
LONG_CHARACTERS = 40


def cell_text(value) -> str:
    """A value for a reader: four significant digits, thousands grouped, a dash for what is not there."""
    if isinstance(value, float) and math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value is None or (
        isinstance(value, Real) and not isinstance(value, Integral) and not math.isfinite(value)
    ):
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{value:,d}".replace("-", "−")
    if isinstance(value, Real):
        size = abs(float(value))
        if size == 0:
            text = "0"
        elif size >= 1000:
            text = f"{value:,.0f}"
        elif size < 1e-3:
            text = f"{value:.2e}"
        else:
            text = f"{value:.4g}"
        return text.replace("-", "−")
    return str(value)


def to_html(table: pd.DataFrame) -> str:
    """An HTML table; the full value of every number goes along for sorting and for the CSV download."""
    numeric = [any(_is_number(value) for value in table[name]) for name in table.columns]
    head = "".join(
        f'<th scope="col"{RIGHT if right else ""}>{html.escape(str(name))}</th>'
        for name, right in zip(table.columns, numeric, strict=True)
    )
    rows = []
    for row in table.itertuples(index=False):
        cells = []
        for value, right in zip(row, numeric, strict=True):
            number = _is_number(value)
            raw = "" if value is None else html.escape(_raw(value) if number else str(value), quote=True)
            mark = RIGHT if right else _text_class(value)
            data = f' data-value="{raw}"' if number else ""
            cells.append(f"<td{mark}{data}>{html.escape(cell_text(value))}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "".join(rows)
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="kv-scroll"><table class="kv-numbers">{table}</table></div>'


def _text_class(value) -> str:
    if not isinstance(value, str) or len(value) <= LONG_CHARACTERS:
        return ""
    return PROSE if " " in value else LONG


def _raw(value) -> str:
    return str(int(value)) if isinstance(value, Integral) else repr(float(value))


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def unfold(table: pd.DataFrame) -> str:
    """The table in a <details> element."""
    return f'<details class="kv-details"><summary>The numbers</summary>{to_html(table)}</details>'
