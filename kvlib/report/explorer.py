"""“Prompt by prompt”: every final prompt's text and steps as one compact JSON, and the markup that a script fills."""

import json

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio

from kvlib.report.figures.final import forcing_label
from kvlib.report.figures.prompt import prompt_steps
from kvlib.report.palette import PATHS

GLYPHS = {"diamond": "◆", "circle": "●", "square": "■", "triangle-up": "▲"}  # of a path's marker, in text
DECIMALS = 5  # of what the page shows; the records have all digits


def explorer(prompts: pd.DataFrame, steps: pd.DataFrame) -> str:
    """The explorer as HTML: its data and an element for book/_static/explorer.js.

    Args:
        prompts, steps: frozen_evaluation's tables, one row per forcing, path, prompt (and step).
    """
    data = json.dumps(explorer_data(prompts, steps), ensure_ascii=False, separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace("&", "\\u0026")  # no text of a prompt can end the element
    return (
        f'<div class="kv-explorer"><script type="application/json">{safe}</script>'
        "<p>This page is drawn by its script; the same numbers stand in the records below.</p></div>"
    )


def explorer_data(prompts: pd.DataFrame, steps: pd.DataFrame) -> dict:
    """What the script reads.

    Returns: {"paths": [{"id", "label", "colour", "glyph"}], "forcings": [[id, in words]], "figure": {"data", "layout"},
        "prompts": [{"prompt", "article", "prefix", "forcing": {id: {"forced": [S], "native": [S], "paths": {id: {"kl": [S],
        "p": [S], "said": [S]}}}}}]}; `native` and `said` hold the most likely token, `said` null where it is native's.
    """
    forcings = list(dict.fromkeys(steps.forcing))
    paths = [path for path in PATHS if path in set(steps.path)]
    about = prompts.drop_duplicates("prompt").set_index("prompt").sort_index()
    found = [
        {"prompt": int(number), "article": row.article, "prefix": row.text, "forcing": {}}
        for number, row in about.iterrows()
    ]
    by_prompt = {entry["prompt"]: entry for entry in found}
    ordered = steps.sort_values("step", kind="stable")
    for (prompt, forcing, path), rows in ordered.groupby(["prompt", "forcing", "path"], sort=False):
        entry = by_prompt[prompt]["forcing"].setdefault(
            forcing,
            {"forced": rows.forced_token.tolist(), "native": rows.native_token.tolist(), "paths": {}},
        )
        entry["paths"][path] = {
            "kl": _rounded(rows.kl),
            "p": _rounded(rows.path_probability),
            "said": [
                None if agree else token for agree, token in zip(rows.agree, rows.path_token, strict=True)
            ],
        }
    return {
        "paths": [
            {"id": p, "label": PATHS[p].label, "colour": PATHS[p].colour, "glyph": GLYPHS[PATHS[p].symbol]}
            for p in paths
        ],
        "forcings": [[forcing, forcing_label(forcing)] for forcing in forcings],
        "figure": json.loads(pio.to_json(_frame(paths, int(steps.step.max())), validate=False)),
        "prompts": found,
    }


def _frame(paths: list[str], steps: int) -> go.Figure:
    figure = prompt_steps(paths, steps)
    figure.update_layout(title=None, margin={"t": 56})  # the page's own heading says it, and wraps
    figure.layout.template = None
    return figure


def _rounded(values: pd.Series) -> list[float]:
    return [round(float(value), DECIMALS) + 0.0 for value in values]
