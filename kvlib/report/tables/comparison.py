"""Tables of several runs beside one another."""

import json

import pandas as pd

from kvlib.report.tables.cells import cell_text
from kvlib.study.comparing import INTERVAL, Comparison, Row


def compared(found: Comparison, group: str) -> pd.DataFrame:
    """One row per quantity of a group, one column per run, and whether the runs differ in it."""
    rows = found.groups().get(group, [])
    cells = [(row.what, *cells_of(row), "differs" if row.differs else "the same") for row in rows]
    return pd.DataFrame(cells, columns=["what", *found.runs, "in these runs"], dtype=object)


def cells_of(row: Row) -> list:
    """The runs' values, numbers as they are, an interval from its ends, any other list as one would give it."""
    return [_cell(row.what, value) for value in row.values]


def _cell(what: str, value):
    if isinstance(value, list):
        return " to ".join(map(cell_text, value)) if what.endswith(INTERVAL) else json.dumps(value)
    return cell_text(value) if isinstance(value, bool) else value
