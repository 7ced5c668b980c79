"""From every figure to what is behind it: named scripts and records are copied into the book and linked."""

import html
import re
import shutil
from pathlib import Path

from kvlib.study.run import ROOT

NAMED = re.compile(r'<code data-kv-file="([^"]+)">[^<]*</code>')
SCRIPTS, RECORDS, DATA = "notebooks", "records", "data"


def named_script(name: str) -> str:
    """A notebook's script, as `link_sources` finds it. name: without its suffix."""
    return _named(f"{SCRIPTS}/{name}.py", f"{SCRIPTS}/{name}.py")


def named_record(name: str) -> str:
    """A record, as `link_sources` finds it. name: the file, relative to the run's folder; or data/… of the project."""
    return _named(name if name.startswith(f"{DATA}/") else f"{RECORDS}/{name}", name)


def origin(script: str, records: str) -> str:
    """The line below a figure. records: names of files, with commas between them; both may be empty."""
    names = [name.strip() for name in records.split(",") if name.strip()]
    parts = [named_script(script)] * bool(script) + [named_record(name) for name in names]
    return f'<p class="kv-origin">From {" · ".join(parts)}</p>' if parts else ""


def link_sources(book: Path, run_folder: Path) -> None:
    """Put a link where a page names a script, a record of the run or a file of `data`, and a copy of that file into the book.

    A name without a file stays a name. Copies make the book whole by itself, wherever it is published.
    """
    for page in sorted(book.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        up = "../" * (len(page.relative_to(book).parts) - 1)

        def linked(found: re.Match, up: str = up) -> str:
            place = html.unescape(found.group(1))
            folder, _, name = place.partition("/")
            if folder not in (SCRIPTS, RECORDS, DATA):
                return found.group(0)
            base = (run_folder if folder == RECORDS else ROOT / folder).resolve()
            source = (base / name).resolve()
            if not (source.is_file() and source.is_relative_to(base)):
                return found.group(0)
            if not (book / place).exists():
                (book / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, book / place)
            shown = f"results/{run_folder.name}/{name}" if folder == RECORDS else place
            return f'<a href="{up}{html.escape(place)}"><code>{html.escape(shown)}</code></a>'

        changed = NAMED.sub(linked, text)
        if changed != text:
            page.write_text(changed, encoding="utf-8")


def _named(place: str, shown: str) -> str:
    return f'<code data-kv-file="{html.escape(place)}">{html.escape(shown)}</code>'
