"""From a run's executed notebooks to its book: assembled and built aside, then swapped into place whole."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nbformat
import yaml

from kvlib.errors import KvlibError
from kvlib.report.chart_library import copy_plotly
from kvlib.report.prose.evidence_page import not_run_page
from kvlib.report.sources import link_sources
from kvlib.study.decision import DECISION_RULE
from kvlib.study.records import read_json, read_record
from kvlib.study.run import read_summary

ROOT = Path(__file__).resolve().parents[2]
BOOK, CONFIG = ROOT / "book", ROOT / "_config.yml"
CHAPTERS = (
    "00_pair",
    "01_screening",
    "02_confirmation",
    "03_frozen_evaluation",
    "04_latency",
    "10_study_and_run",
    "20_trust",
    "30_gpu",
)
EVIDENCE = "evidence"  # a chapter with a command of its own; a page says so while there is none
FOLDED = {
    "parameters": "the parameters and their defaults",
    "injected-parameters": "the parameters that this run was given",
}
ASIDE = ".book-"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FONT_PRELOAD = re.compile(r'<link rel="preload" as="font"[^>]*>\n?')
Finish = Callable[[Path], None]
KEPT_OF_MATHJAX = ("tex-chtml.js", "output/chtml/fonts", "input/tex/extensions")


def build_book(run_folder: Path, *, out: Path | None = None) -> Path:
    """Build the book of one run with Jupyter Book, every warning an error; returns its index.html.

    Nothing in the checkout is written: the pages under book/ and the notebooks that papermill executed
    (`<run>/notebooks/*.ipynb`) are copied to a temporary folder beside `out` and built there, and only a
    whole book takes the place of an earlier one.

    Args:
        run_folder: results/<run>. out: the book's folder; `<run>/book` when None.

    Raises: KvlibError when a notebook is missing, unfinished or holds an error, and when the build fails.
    """
    run_folder = Path(run_folder).resolve()
    out = Path(out).resolve() if out else run_folder / "book"
    build_pages(
        lambda source: fill_book(run_folder, source),
        banner(run_folder),
        out,
        finish=lambda built: link_sources(built, run_folder),
    )
    return out / "index.html"


def fill_book(run_folder: Path, source: Path) -> None:
    """Put the pages of a run's book, its executed notebooks among them, into the folder `source`.

    Raises: KvlibError when a notebook is missing, unfinished or holds an error.
    """
    notebooks = {name: _read_chapter(run_folder, name) for name in CHAPTERS}
    evidence = evidence_chapter(run_folder)
    if isinstance(evidence, str):
        _assemble(source, notebooks, {EVIDENCE: evidence})
    else:
        _assemble(source, notebooks | {EVIDENCE: evidence}, {})


def banner(run_folder: Path) -> str:
    """What every page of a run's book says at its top, as HTML."""
    pair = read_summary(run_folder / "pair")
    return f"Run <b>{pair['run']}</b> · {pair['label']}"


def build_pages(
    fill: Callable[[Path], None],
    announcement: str,
    out: Path,
    *,
    builder: str = "html",
    finish: Finish | None = None,
) -> Path:
    """Have Jupyter Book build what `fill` puts into an empty folder, every warning an error.

    Args:
        announcement: the pages' banner, as HTML. out: the folder that is replaced, by a whole book only. builder: `html`,
            or `singlehtml` for one long page. finish: called on the built folder before it takes its place.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _tidy_after_a_kill(out)
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=ASIDE))
    try:
        source, config = aside / "source", aside / "_config.yml"
        fill(source)
        config.write_text(yaml.safe_dump(_config(announcement), allow_unicode=True, sort_keys=False))
        _run_jupyter_book(source, config, aside, out.with_name(f"{out.name}.log"), builder)
        html = aside / "_build" / builder
        copy_plotly(html)  # not before: Jupyter Book would have every page load it, and wait for it
        _prune_mathjax(html / "_static" / "mathjax")
        _drop_preloads(html)
        if finish is not None:
            finish(html)
        _swap(html, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    out.with_name(f"{out.name}.log").unlink(missing_ok=True)
    return out


def evidence_chapter(run_folder: Path) -> nbformat.NotebookNode | str:
    """The executed evidence notebook, or as Markdown the page that says why it is not in the book.

    It enters the book only if the map that it says it is about is the one that the run has frozen now.

    Raises: KvlibError when there is a notebook that is unfinished or holds an error.
    """
    made_for, present = None, None
    if (run_folder / "notebooks" / f"{EVIDENCE}.ipynb").exists():
        notebook = _read_chapter(run_folder, EVIDENCE, f"python -m kvlib evidence {run_folder.name}")
        made_for = _glued(notebook, "manifest")
        present = read_record(run_folder / "confirmation" / "summary.json", "manifest_hash")["manifest_hash"]
        if made_for == present:
            return notebook
    profile = read_record(run_folder / "pair" / "summary.json", "profile")["profile"]
    opened = run_folder / "run.json"
    if opened.exists():  # a profile of one's own is found by its path, not by its name
        profile = read_json(opened).get("source", profile)
    return not_run_page(run_folder.name, profile, made_for, present)


def _glued(notebook: nbformat.NotebookNode, key: str) -> str:
    """A string that an executed notebook glued under `key`; empty when it did not."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("metadata", {}).get("scrapbook", {}).get("name") == key:
                kept = [value for kind, value in output.data.items() if kind.endswith("text/plain")]
                return kept[0].strip("'\"") if kept else ""
    return ""


def _read_chapter(run_folder: Path, name: str, command: str = "") -> nbformat.NotebookNode:
    """An executed notebook as the book takes it. Raises KvlibError when there is no whole one."""
    path = run_folder / "notebooks" / f"{name}.ipynb"
    command = command or f"python -m kvlib run {name} --run {run_folder.name}"
    if not path.exists():
        raise KvlibError(f"{path} is missing, expected the executed notebook {name}: run `{command}` first")
    try:
        notebook = nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError) as error:
        raise KvlibError(
            f"{path} is no readable notebook, expected the one that a run left: run `{command}` again"
        ) from error
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    failed = [o for cell in code for o in cell.outputs if o.output_type == "error"]
    if failed:
        raise KvlibError(
            f"{path} ended with {failed[0].ename}: {failed[0].evalue}; a failed notebook never enters the "
            "book: "
            f"put that right and run `{command}` again"
        )
    states = [cell.metadata.get("papermill", {}).get("status", "completed") for cell in code]
    if any(state != "completed" for state in states) or not any(cell.execution_count for cell in code):
        raise KvlibError(
            f"{path} was not run to its end, expected every cell completed: run `{command}` again"
        )
    return _tidy(notebook)


def _tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what is of no use on a page: this machine's paths, streams, Plotly's second copy of a figure."""
    notebook.metadata.pop("papermill", None)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        tags = cell.metadata.setdefault("tags", [])
        for tag, prompt in FOLDED.items():  # papermill gives its cell no other tag (papermill#731)
            if tag in tags:
                cell.metadata["tags"] = [tag, "hide-input"]
                cell.metadata["mystnb"] = {
                    "code_prompt_show": f"Show {prompt}",
                    "code_prompt_hide": f"Hide {prompt}",
                }
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.output_type != "stream"]
            for output in cell.outputs:
                output.get("data", {}).pop("application/vnd.plotly.v1+json", None)
    return notebook


def _assemble(source: Path, notebooks: dict[str, nbformat.NotebookNode], pages: dict[str, str]) -> None:
    shutil.copytree(BOOK, source, ignore=shutil.ignore_patterns("_build", "chapters", ".ipynb_checkpoints"))
    (source / "chapters").mkdir()
    for name, notebook in notebooks.items():
        nbformat.write(notebook, source / "chapters" / f"{name}.ipynb")
    shutil.copy(DECISION_RULE, source / DECISION_RULE.name)
    for name, text in pages.items():
        (source / "chapters" / f"{name}.md").write_text(text, encoding="utf-8")


def _config(announcement: str) -> dict:
    """The tracked configuration and the banner that every page carries."""
    config = yaml.safe_load(CONFIG.read_text())
    config.setdefault("html", {})["announcement"] = announcement
    return config


def _run_jupyter_book(source: Path, config: Path, aside: Path, report: Path, builder: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from jupyter_book.cli.main import main; main()",
        "build",
        str(source),
        "--path-output",
        str(aside),
        "--config",
        str(config),
        "--toc",
        str(source / "_toc.yml"),
        "--builder",
        builder,
        "-n",
        "-W",
        "--keep-going",
        "-q",
    ]
    path = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )  # whose docstrings are shown
    environment = os.environ | {
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    said = ANSI.sub("", done.stdout + done.stderr).replace(str(source), "book").replace(str(aside), "book")
    if done.returncode:
        report.write_text(said)
        findings = [line for line in said.splitlines() if "WARNING" in line or "ERROR" in line]
        first = findings[0] if findings else said.strip().splitlines()[-1] if said.strip() else "no output"
        raise KvlibError(
            f"the book did not build ({max(len(findings), 1)} finding(s), the first: {first.strip()}), "
            "expected none: put them "
            f"right under book/ or notebooks/ and run the same command again; {report} has the whole output"
        )


def _prune_mathjax(folder: Path) -> None:
    """Keep what typesetting TeX needs: one script, its fonts and extensions, 3 MB of 24."""
    keep = [folder / name for name in KEPT_OF_MATHJAX]
    for path in sorted(folder.rglob("*"), reverse=True):
        inside = any(path == k or k in path.parents or path in k.parents for k in keep)
        if path.is_file() and not inside:
            path.unlink()
        elif path.is_dir() and not inside and not any(path.iterdir()):
            path.rmdir()


def _drop_preloads(folder: Path) -> None:
    """Take out the theme's font preloads: on a file:// page they only make console errors."""
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(FONT_PRELOAD.sub("", text), encoding="utf-8")
    for template in (folder / "_static").glob("*macros.html"):
        template.unlink()  # a theme's own template, no page


def _tidy_after_a_kill(out: Path) -> None:
    """Put an earlier book back that a killed build had moved aside, and remove what else it left.

    Two builds of one run never overlap: the command line holds the run's lock.
    """
    old = _old(out)
    if old.exists() and not out.exists():
        os.replace(old, out)
    for leftover in out.parent.glob(f"{ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _old(out: Path) -> Path:
    return out.with_name(f"{ASIDE}old-{out.name}")


def _swap(built: Path, out: Path) -> None:
    """Put the new book where the old one is; a kill in between leaves one of the two whole."""
    old = _old(out)
    if out.exists():
        os.replace(out, old)
    os.replace(built, out)
    shutil.rmtree(old, ignore_errors=True)
