"""The chart library in a built book: copied once, and loaded by the pages that have a chart."""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

HEAD = re.compile(r"<head[^>]*>")
DRAWN_ON = ('class="kv-chart"', 'class="kv-explorer"')  # what a page with charts holds


def copy_plotly(built: Path) -> None:
    """The chart library, as its package ships it, and in the head of every page with a chart a tag that loads it.

    It is most of what such a page loads: `async` and first, so that it is read while the rest of the page is, and no
    page waits for it to show its text.
    """
    package = Path(find_spec("plotly").origin).parent
    shutil.copy(package / "package_data" / "plotly.min.js", built / "_static" / "plotly.min.js")
    for page in built.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        if any(mark in text for mark in DRAWN_ON):
            up = "../" * (len(page.relative_to(built).parts) - 1)
            tag = f'<script async id="kv-plotly" src="{up}_static/plotly.min.js"></script>'
            page.write_text(HEAD.sub(rf"\g<0>{tag}", text, count=1), encoding="utf-8")
