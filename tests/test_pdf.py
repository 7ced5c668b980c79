"""The book as one PDF: every chapter's text and every chart is in it; what is missing is said in one sentence."""

import re
import unicodedata

import pytest
from pypdf import PdfReader

from kvlib.errors import KvlibError
from kvlib.report import pdf as printing
from kvlib.report.book import CHAPTERS


@pytest.fixture(scope="module")
def printed(smoke_run, tmp_path_factory) -> PdfReader:
    out = tmp_path_factory.mktemp("printed") / "smoke.pdf"
    assert printing.build_pdf(smoke_run.folder, out=out) == out
    return PdfReader(out)


@pytest.fixture(scope="module")
def text(printed) -> str:
    """All text, ligatures and line ends undone."""
    whole = unicodedata.normalize("NFKC", "\n".join(page.extract_text() for page in printed.pages))
    return re.sub(r"\s+", " ", whole)


def titles(smoke_run) -> list[str]:
    """The title of every page of the book as it is read in a browser."""
    pages = [smoke_run.book / "chapters" / f"{name}.html" for name in (*CHAPTERS, "evidence")]
    pages += [
        smoke_run.book / f"{name}.html"
        for name in ("index", "method", "protocol", "limits", "glossary", "colophon")
    ]
    return [re.search(r"<title>(.*?)(?: &#8212;|</title>)", page.read_text()).group(1) for page in pages]


def test_every_chapter_is_in_it(smoke_run, text):
    missing = [title for title in titles(smoke_run) if title not in text]
    assert not missing


def test_every_chart_of_the_book_is_drawn_in_it(smoke_run, text):
    counted = re.search(r"(\d+) of (\d+) charts are drawn in this file", text)
    pages = [page for page in smoke_run.book.rglob("*.html") if "_static" not in page.parts]
    charts = sum(page.read_text().count('class="plotly-graph-div"') for page in pages)
    assert counted and int(counted.group(1)) == int(counted.group(2)) == charts > 10


def test_charts_are_lines_and_letters_no_pictures_of_them(printed, text):
    assert text.count("KL32 (nats per token)") > 5 and "time to first token (ms, p50, logarithmic)" in text
    drawing = sum(len(re.findall(rb"\sc\n|\sl\n", page.get_contents().get_data())) for page in printed.pages)
    assert drawing > 2000


def test_pages_are_a4_and_begin_with_the_title(printed):
    width, height = (float(printed.pages[0].mediabox[n]) for n in (2, 3))
    assert (round(width), round(height)) == (595, 842)
    assert "Handing over a prompt cache" in printed.pages[0].extract_text()


def test_without_a_browser_it_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        KvlibError,
        match="no browser found that can print, expected one of chromium.*apt-get install chromium",
    ):
        printing.build_pdf(tmp_path / "run")


def test_a_place_that_takes_no_file_is_one_sentence_before_anything_is_built(monkeypatch, tmp_path):
    monkeypatch.setattr(printing, "find_browser", lambda: "browser")
    monkeypatch.setattr(printing, "build_pages", None)  # may not be reached
    with pytest.raises(KvlibError, match=f"{tmp_path} is a folder, expected a PDF file's name"):
        printing.build_pdf(tmp_path / "run", out=tmp_path)
    for place in ("/proc/x.pdf", tmp_path / "file" / "x.pdf"):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(KvlibError, match=f"{place} could not be written"):
            printing.build_pdf(tmp_path / "run", out=place)


def test_a_browser_that_prints_nothing_is_one_sentence(tmp_path):
    browser = tmp_path / "browser"
    browser.write_text("#!/bin/sh\necho 'no paper' >&2\nexit 3\n")
    browser.chmod(0o755)
    with pytest.raises(KvlibError, match=r"ended with status 3 and printed no PDF \(no paper\)"):
        printing.print_page(str(browser), tmp_path / "page.html", tmp_path / "out.pdf")
