"""The evidence chapter's place in the book: the notebook of the present frozen map, or a page that says why not."""

import copy
import re
from pathlib import Path

import nbformat
import pytest
from fake_evidence import write_fake_evidence
from fake_records import write_fake_run
from notebook_runs import execute_all
from test_report import PAGE_BYTES

from kvlib.errors import KvlibError
from kvlib.report.book import CHAPTERS, build_book, evidence_chapter
from kvlib.report.evidence import TABLES, read_evidence
from kvlib.report.freshness import _key
from kvlib.study.records import read_json, write_json


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Path:
    """A made-up run with all notebooks executed, that of the evidence too; stages are found, not run."""
    run = write_fake_run(tmp_path_factory.mktemp("results") / "laptop")
    write_fake_evidence(run)
    return execute_all(run, (*CHAPTERS, "evidence"))


def summary_of(run: Path, stage: str) -> dict:
    return read_json(run / stage / "summary.json")


@pytest.fixture
def unfrozen(executed, tmp_path) -> Path:
    """What the chapter's place in the book depends on, free to be changed."""
    run = tmp_path / "mine"
    for part in ("pair", "confirmation"):
        write_json(run / part / "summary.json", summary_of(executed, part))
    (run / "notebooks").mkdir()
    (run / "notebooks" / "evidence.ipynb").write_bytes(
        (executed / "notebooks" / "evidence.ipynb").read_bytes()
    )
    return run


def test_the_book_has_the_chapter_when_it_was_run(executed, tmp_path):
    index = build_book(executed, out=tmp_path / "book")
    page = index.parent / "chapters" / "evidence.html"
    text = page.read_text()
    assert text.count('class="kv-chart"') == text.count('class="kv-details"') == 6
    assert page.stat().st_size < PAGE_BYTES
    assert "has not been run" not in text and not re.search(r"<td[^>]*>\s*(nan|None)\s*<", text)
    assert 'href="chapters/evidence.html"' in index.read_text()


def test_the_chapter_is_the_notebook_of_the_present_frozen_map(unfrozen):
    chapter = evidence_chapter(unfrozen)
    assert isinstance(chapter, nbformat.NotebookNode)
    assert sum("kv-chart" in str(cell.get("outputs")) for cell in chapter.cells) == 6


def test_a_chapter_of_another_frozen_map_stays_out_and_says_so(unfrozen):
    before = _key(unfrozen)
    path = unfrozen / "confirmation" / "summary.json"
    summary = read_json(path)
    write_json(path, summary | {"manifest_hash": "f" * 64})
    page = evidence_chapter(unfrozen)
    assert page.startswith("# 05 Evidence") and "another frozen map" in page
    assert "f" * 16 in page and summary["manifest_hash"][:16] in page
    assert "python -m kvlib evidence mine" in page and "make evidence RUN=mine" in page
    assert _key(unfrozen) != before  # so that the book is built again


def test_a_run_without_the_chapter_has_a_page_with_the_command(unfrozen):
    (unfrozen / "notebooks" / "evidence.ipynb").unlink()
    page = evidence_chapter(unfrozen)
    assert "has not been run" in page and "python -m kvlib evidence mine" in page
    write_json(unfrozen / "run.json", {"source": "my/own.yaml"})
    assert "make evidence PROFILE=my/own.yaml RUN=mine" in evidence_chapter(unfrozen)


def test_a_failed_evidence_notebook_never_enters_the_book(unfrozen):
    path = unfrozen / "notebooks" / "evidence.ipynb"
    notebook = copy.deepcopy(nbformat.read(path, 4))
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    last.outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="no", traceback=[])]
    nbformat.write(notebook, path)
    with pytest.raises(KvlibError, match=r"ended with ValueError: no.*python -m kvlib evidence mine"):
        evidence_chapter(unfrozen)


def test_the_tables_are_read_by_name(executed):
    assert read_evidence(executed / "evidence").keys() == set(TABLES)
