"""Whether a run's book is already the one that its notebooks, the pages and the code would give."""

from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.report.book import BOOK, CONFIG, ROOT, build_book
from kvlib.study.decision import DECISION_RULE
from kvlib.study.records import hash_json, read_json, sha256_file, write_json

GENERATED = ("_build", "chapters", ".ipynb_checkpoints")


def build_if_stale(run_folder: Path) -> tuple[Path, bool]:
    """(the book's index.html, whether it had to be built)."""
    index, stamp = Path(run_folder) / "book" / "index.html", Path(run_folder) / "book.json"
    key = _key(Path(run_folder))
    if index.exists() and _stamped(stamp) == key:
        return index, False
    stamp.unlink(missing_ok=True)
    index = build_book(Path(run_folder))
    write_json(stamp, {"key": key})
    return index, True


def book_state(run_folder: Path) -> str:
    """`up to date`, `none`, or that it is older than what it is made from."""
    if not (Path(run_folder) / "book" / "index.html").exists():
        return "none"
    if _stamped(Path(run_folder) / "book.json") == _key(Path(run_folder)):
        return f"up to date, {Path(run_folder) / 'book' / 'index.html'}"
    return f"older than its pages: `python -m kvlib book {Path(run_folder).name}` builds it again"


def _stamped(stamp: Path) -> str | None:
    try:
        return read_json(stamp)["key"]
    except (KvlibError, KeyError, TypeError):
        return None


def _key(run_folder: Path) -> str:
    pages = [
        path
        for path in BOOK.rglob("*")
        if path.is_file() and not set(path.relative_to(BOOK).parts) & set(GENERATED)
    ]
    code = [*(ROOT / "kvlib").rglob("*.py"), CONFIG, DECISION_RULE, ROOT / "requirements.lock"]
    summaries = [run_folder / stage / "summary.json" for stage in ("pair", "confirmation")]
    records = [*(run_folder / "notebooks").glob("*.ipynb"), *summaries]
    paths = [
        path
        for path in sorted([*pages, *code, *records])
        if path.exists() and not path.name.endswith(".failed.ipynb")
    ]
    return hash_json([[path.name, sha256_file(path)] for path in paths])
