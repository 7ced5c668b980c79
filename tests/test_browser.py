"""Every page of the smoke run's book, opened from the file system in headless Chromium."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Error, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXPECTED_ERROR = "THEBE_JS_URL"  # sphinx-thebe's own, on every page of every Jupyter Book 1
CHARTS_OF = {  # pages that must show charts, and at least how many
    "00_pair": 1, "01_screening": 3, "02_confirmation": 1, "03_frozen_evaluation": 4, "04_latency": 4,
    "20_trust": 1, "evidence": 6,
}  # fmt: skip
DRAWN = "() => [...document.querySelectorAll('.plotly-graph-div')].every(c => c.querySelector('.main-svg'))"


@pytest.fixture(scope="module")
def browser():
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(
            "no Chromium found, and the pages are tested in one: install it "
            "(Debian and Ubuntu: apt-get install chromium)",
            pytrace=False,
        )
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(
                executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else []
            )
        except Error as error:
            pytest.fail(
                f"{path} did not start ({error.message.splitlines()[0]}): install it again", pytrace=False
            )
        yield started
        started.close()


@pytest.fixture(scope="module")
def visits(browser, smoke_run) -> dict[str, dict]:
    """Page -> what was seen on it: charts, drawn charts, console errors, requests that went outside."""
    paths = [p for p in sorted(smoke_run.book.rglob("*.html")) if "_static" not in p.parts]
    return {str(p.relative_to(smoke_run.book)): visit(browser, p) for p in paths}


def visit(browser, path: Path) -> dict:
    seen = {"errors": [], "outside": []}
    page = browser.new_page()
    page.on("console", lambda message: message.type == "error" and seen["errors"].append(message.text))
    page.on("pageerror", lambda error: seen["errors"].append(str(error)))
    page.on("request", lambda request: is_outside(request.url) and seen["outside"].append(request.url))
    page.goto(path.as_uri(), wait_until="load")
    with contextlib.suppress(Error):  # what is not drawn is counted below
        page.wait_for_function(DRAWN, timeout=20_000)
    seen["charts"] = page.locator(".plotly-graph-div").count()
    seen["drawn"] = page.locator(".plotly-graph-div:has(.main-svg)").count()
    page.close()
    return seen


def is_outside(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:", "about:"))


def test_every_page_is_there(visits):
    written = ("index", "colophon", "decision_rule", "limits", "method", "protocol")
    assert {f"{name}.html" for name in written} <= visits.keys()
    assert {f"chapters/{name}.html" for name in CHARTS_OF} <= visits.keys()


def test_every_chart_is_drawn(visits):
    undrawn = {page: seen for page, seen in visits.items() if seen["drawn"] != seen["charts"]}
    assert not undrawn


def test_the_chapters_show_their_charts(visits):
    counts = {name: visits[f"chapters/{name}.html"]["drawn"] for name in CHARTS_OF}
    assert all(counts[name] >= least for name, least in CHARTS_OF.items()), counts


def test_the_console_shows_no_error_but_the_known_one(visits):
    errors = {p: [e for e in seen["errors"] if EXPECTED_ERROR not in e] for p, seen in visits.items()}
    assert not {page: found for page, found in errors.items() if found}


def test_no_page_asks_for_anything_outside(visits):
    assert not {page: seen["outside"] for page, seen in visits.items() if seen["outside"]}
