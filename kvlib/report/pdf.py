"""A run's book as one PDF: Sphinx makes one page of it, and headless Chromium prints that page, charts included."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.report.book import ASIDE, BOOK, banner, build_pages, fill_book
from kvlib.study.records import not_written

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRAWING_MS = (
    60_000  # of the page's own clock, which runs ahead while nothing happens: Chromium waits no such time
)
LIMIT_S = 300
NAME = "book.pdf"


def build_pdf(run_folder: Path, *, out: Path | None = None) -> Path:
    """Print a run's book; returns the file, `<run>/book.pdf` when `out` is None.

    Raises: KvlibError for a place where no file can be written, when there is no Chromium, when a notebook is missing or
        failed, and when printing fails.
    """
    run_folder = Path(run_folder).resolve()
    out = Path(out).resolve() if out else run_folder / NAME
    browser = find_browser()
    check_place(out)
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=out.parent) as aside:
        pages, printed = Path(aside) / "book", Path(aside) / NAME
        build_pages(
            lambda source: fill_book(run_folder, source),
            banner(run_folder),
            pages,
            builder="singlehtml",
            finish=for_the_printer,
        )
        print_page(browser, pages / "index.html", printed)
        os.replace(printed, out)
    return out


def find_browser() -> str:
    """The browser that prints. Raises KvlibError when there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise KvlibError(
            f"no browser found that can print, expected one of {', '.join(BROWSERS)}: install Chromium "
            "(Debian and Ubuntu: apt-get install chromium)"
        )
    return found


def check_place(out: Path) -> None:
    """Whether a file can be written there, found out before minutes are spent on it. Raises KvlibError otherwise."""
    if out.exists() and not out.is_file():
        what = "a folder" if out.is_dir() else "a device or a pipe"
        raise KvlibError(f"{out} is {what}, expected a PDF file's name: name a file, such as {out / NAME}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise not_written(out, error) from error


def for_the_printer(folder: Path) -> None:
    """Give the one page its own style and script, in its head: charts are drawn at the width that they find."""
    index = folder / "index.html"
    style, script = (BOOK / "print.css").read_text(), (BOOK / "print.js").read_text()
    head, rest = index.read_text(encoding="utf-8").split("</head>", 1)
    text = f"{head}<style>{style}</style><script>{script}</script></head>{rest}"
    index.write_text(text, encoding="utf-8")


def print_page(browser: str, page: Path, out: Path) -> None:
    """Print a page of the file system to `out`. Raises KvlibError when no PDF comes of it."""
    with tempfile.TemporaryDirectory() as profile:  # Chromium's own files stay out of the user's home
        command = [
            browser, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}", "--window-size=800,1100",
            f"--virtual-time-budget={DRAWING_MS}", "--no-pdf-header-footer", f"--print-to-pdf={out}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []), page.as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KvlibError(
                f"{browser} did not print the book ({error}): try it by hand on {page}"
            ) from error
    if done.returncode or not out.exists() or out.read_bytes()[:5] != b"%PDF-":
        said = done.stderr.strip().splitlines()
        raise KvlibError(
            f"{browser} ended with status {done.returncode} and printed no PDF ({said[-1] if said else 'it said nothing'}): "
            "install it again, or print the book's pages from another browser"
        )
