"""Pages built again as their scripts, charts and texts are edited, from the records that are there: nothing is trained."""

import ast
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.report.book import BOOK, CHAPTERS, CONFIG, EVIDENCE
from kvlib.report.freshness import GENERATED
from kvlib.study.display import duration
from kvlib.study.execution import NotebookError, run_notebook, script_of
from kvlib.study.records import parse_json, run_lock
from kvlib.study.run import NOTEBOOKS, ROOT, STAGES, Run
from kvlib.study.standing import DONE, standing

CHARTS, SCRIPTS = ROOT / "kvlib" / "report", ROOT / "notebooks"
POLL_S = 0.5
Seen = dict[Path, tuple[int, int]]  # time of the last change and size
Say = Callable[[str], None]


def snapshot() -> Seen:
    """Every file that pages are made of: notebook scripts, the report's code, the hand-written pages."""
    pages = [path for path in BOOK.rglob("*") if not set(path.relative_to(BOOK).parts) & set(GENERATED)]
    files = [*SCRIPTS.glob("*.py"), *CHARTS.rglob("*.py"), CONFIG, *pages]
    seen = {}
    for path in files:
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # an editor was just replacing it
        if path.is_file() and not path.name.startswith("."):
            seen[path] = (found.st_mtime_ns, found.st_size)
    return seen


def differences(before: Seen, after: Seen) -> set[Path]:
    """Files that were written, made or deleted in between."""
    return {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}


def affected(changed: Iterable[Path], executed: list[str]) -> list[list[str]]:
    """The executed notebooks that have to run again, in batches after each of which the book is worth building.

    A script concerns its own page. A file of the report may concern any: those that name something that it defines
    come first.
    """
    scripts = {path.stem for path in changed if path.parent == SCRIPTS}
    code = [path for path in changed if path.is_relative_to(CHARTS)]
    first = [name for name in executed if name in scripts or _names_any(name, code)]
    rest = [name for name in executed if name not in first] if code else []
    return [batch for batch in (first, rest) if batch] or [[]]


def _names_any(notebook: str, code: list[Path]) -> bool:
    text = script_of(notebook).read_text(encoding="utf-8")
    return any(re.search(rf"\b{name}\b", text) for path in code for name in _defined(path))


def _defined(path: Path) -> list[str]:
    """Public functions and classes of a file; none while it cannot be parsed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return []
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def watch(run: Run, say: Say, *, poll_s: float = POLL_S, until: Callable[[], bool] = lambda: False) -> None:
    """Look for changes and rebuild, until interrupted or `until` says so. What fails is said, and the last pages stay."""
    before, pending = snapshot(), set()
    say(f"watching notebooks/, kvlib/report/ and book/ for run {run.name}; Ctrl-C ends it")
    while not until():
        time.sleep(poll_s)
        now = snapshot()
        if now == before and not pending:
            continue
        while (later := snapshot()) != now:  # an editor is still writing
            now = later
            time.sleep(poll_s)
        pending |= differences(before, now)
        before = now
        try:
            rebuild(run, pending, say)
            pending = set()
        except Busy as busy:
            say(f"{busy}; trying again")
            time.sleep(poll_s * 4)


class Busy(Exception):
    """Another command is at work in the run."""


def rebuild(run: Run, changed: set[Path], say: Say) -> None:
    """Run the affected notebooks again and build the book. Raises Busy while another command is at work in the run."""
    say("changed: " + ", ".join(sorted(str(path.relative_to(ROOT)) for path in changed)))
    for batch in affected(changed, executed(run)):
        for name in batch:
            if not _run_again(run, name, say):
                return
        if not _build(run, say):
            return


def executed(run: Run) -> list[str]:
    """The notebooks that the run's book shows, in its order."""
    names = [*CHAPTERS[: len(STAGES)], EVIDENCE, *CHAPTERS[len(STAGES) :]]
    return [name for name in names if _page(run, name).exists()]


def _page(run: Run, name: str) -> Path:
    return run.folder / "notebooks" / f"{name}.ipynb"


def _run_again(run: Run, name: str, say: Say) -> bool:
    """Whether the page is new, or was left alone because its stage would have to work; False when it failed."""
    stages = [stage for stage, notebook in NOTEBOOKS.items() if notebook == name] or list(STAGES)
    unfinished = [NOTEBOOKS[stage] for stage in stages if standing(run, stage).state != DONE]
    if unfinished:
        say(
            f"{name} is left as it was: {unfinished[0]} is not finished, `python -m kvlib run --run {run.name}` does that"
        )
        return True
    kept = parse_json(_page(run, name))["metadata"].get("papermill", {}).get("parameters", {})
    given = {key: value for key, value in kept.items() if key not in ("profile", "run")}
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(run_lock(run.folder))
            except KvlibError as error:
                raise Busy(str(error)) from error
            run_notebook(script_of(name), kept.get("profile", run.source), run.name, given, force=True)
    except (KvlibError, NotebookError) as error:
        say(f"{name} failed, and its last good page stays: {error}")
        return False
    say(f"{name}: run again in {duration(time.monotonic() - started)}")
    return True


def _build(run: Run, say: Say) -> bool:
    """Build the book in a process of its own, which has the report's code as it is now."""
    command = [sys.executable, "-m", "kvlib", "book", run.name]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = process.communicate()[0]
    except BaseException:  # Ctrl-C: the build ends in good order too
        process.terminate()
        process.wait()
        raise
    lines = said.strip().splitlines() or ["it said nothing"]
    say(
        lines[-1]
        if process.returncode == 0
        else f"the book was not built, and the last one stays: {lines[-1]}"
    )
    return process.returncode == 0
