"""The page that sets several runs beside one another: charts, every number, and links to the runs' own books."""

import html
import os
import shutil
from pathlib import Path

import pandas as pd

from kvlib.report.book import BOOK, build_pages
from kvlib.report.figures import comparison as figures
from kvlib.report.renderer import BookRenderer
from kvlib.report.tables import to_html, unfold
from kvlib.report.tables.comparison import compared
from kvlib.report.wording import join
from kvlib.study.comparing import PAIRED, SETTINGS, Comparison
from kvlib.study.run import Run, home, read_summary

FOLDER = "comparisons"  # beside the runs; none of them has this name, for it holds no run.json


def build_comparison(runs: list[Run], found: Comparison, out: Path | None = None) -> Path:
    """Build the page of a comparison; returns its index.html.

    Args:
        found: what `compare_runs` says of these runs. out: `results/comparisons/<run>+<run>` when None.

    Raises: KvlibError when the build fails.
    """
    out = Path(out) if out else home() / "results" / FOLDER / "+".join(found.runs)
    banner = "Runs " + join([f"<b>{html.escape(name)}</b>" for name in found.runs])
    build_pages(lambda source: _fill(source, runs, found, out), banner, out.resolve())
    return out / "index.html"


def _fill(source: Path, runs: list[Run], found: Comparison, out: Path) -> None:
    source.mkdir(parents=True)
    shutil.copytree(BOOK / "_static", source / "_static")
    shutil.copy(BOOK / "references.bib", source)
    (source / "_toc.yml").write_text("format: jb-book\nroot: index\n")
    (source / "index.md").write_text(page(runs, found, out), encoding="utf-8")


def page(runs: list[Run], found: Comparison, out: Path) -> str:
    """The page as Markdown. A chart whose stage no two runs have is left out, and the notes say what is missing."""
    parts = [f"# {join(list(found.runs))} compared", _books(runs, out)]
    if found.notes:
        parts.append("\n".join(f"- {note[0].upper()}{note[1:]}." for note in found.notes))
    charts = BookRenderer()
    finals, latencies = (_summaries(runs, stage) for stage in ("frozen_evaluation", "latency"))
    if len(finals) > 1:
        parts.append("## Fidelity")
        parts += _chart(
            charts, figures.fidelity_by_run(finals), "Lower is better. Runs with other prompts or another target are listed"
            " side by side but answer different questions.", compared(found, "frozen evaluation"),
        )  # fmt: skip
        parts += _chart(
            charts, figures.gain_by_run(finals), "Within each run, prompt by prompt against direct reuse. Below the"
            " line: lower than direct.", None,
        )  # fmt: skip
    differences = _differences(found)
    if differences:
        parts += _chart(
            charts, figures.difference_by_prompt(differences, found.runs[0]), "These runs were asked the same final"
            " prompts of the same target, so that each prompt can be set against itself.", compared(found, PAIRED),
        )  # fmt: skip
    if len(latencies) > 1:
        parts.append("## Time to first token")
        parts += _chart(
            charts, figures.speedup_by_run(latencies), "Above the line the handoff is faster than native prefill. Ratios"
            " within one run, so that two machines can be set side by side.", compared(found, "latency"),
        )  # fmt: skip
    parts.append("## What was set differently")
    settings = compared(found, SETTINGS)
    parts.append(_raw(to_html(settings)) if len(settings) else "Every setting of their profiles is the same.")
    parts.append("## Everything else")
    rest = [
        group for group in found.groups() if group not in (SETTINGS, PAIRED, "frozen evaluation", "latency")
    ]
    for group in rest:
        parts += [f"### {group.capitalize()}", _raw(to_html(compared(found, group)))]
    return "\n\n".join(parts) + "\n"


def _books(runs: list[Run], out: Path) -> str:
    links = []
    for run in runs:
        index = run.folder / "book" / "index.html"
        name = html.escape(run.name)
        where = html.escape(os.path.relpath(index, out))
        links.append(
            f'<a href="{where}">the book of {name}</a>' if index.exists() else f"{name} (no book yet)"
        )
    return _raw(f"<p>Each run by itself: {join(links)}.</p>")


def _summaries(runs: list[Run], stage: str) -> dict[str, dict]:
    there = {run.name: run.stage(stage) for run in runs}
    return {
        name: read_summary(folder) for name, folder in there.items() if (folder / "summary.json").exists()
    }


def _chart(charts: BookRenderer, figure, caption: str, numbers: pd.DataFrame | None) -> list[str]:
    below = f'<p class="kv-caption">{html.escape(caption)}</p>'
    table = unfold(numbers) if numbers is not None else ""
    return [_raw(charts.to_html(figure.to_dict()) + below + table)]


def _raw(text: str) -> str:
    """HTML inside Markdown, whatever the HTML holds."""
    return f"````````{{raw}} html\n{text}\n````````"


def _differences(found: Comparison) -> dict[str, dict[str, tuple[float, list[float] | None]]]:
    """run -> path -> (mean, interval), of the rows that compare prompt by prompt along native's own tokens."""
    values = {row.what: dict(zip(found.runs, row.values)) for row in found.groups().get(PAIRED, [])}
    result: dict[str, dict] = {}
    for run in found.runs[1:]:
        for path in figures.HANDOFFS:
            name = f"oracle: {path}, KL32 minus {found.runs[0]}'s"
            mean = values.get(f"{name}, mean (nats)", {}).get(run)
            if mean is not None:
                result.setdefault(run, {})[path] = (mean, values[f"{name}, 95 % interval"][run])
    return result
