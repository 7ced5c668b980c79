"""The command that gives disk space back: it says what goes and how much that is, and asks."""

import sys
from typing import Annotated

import typer

from kvlib.commands.compare import open_existing
from kvlib.errors import KvlibError
from kvlib.options import RunArgument
from kvlib.terminal import say, table

MOST_NAMED = 3


def clean(
    run: RunArgument,
    only_caches: Annotated[
        bool, typer.Option("--caches", help="only stored caches; pages and book stay")
    ] = False,
    stale: Annotated[
        bool, typer.Option("--stale", help="only what belongs to settings that the run no longer has")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="remove without asking")] = False,
) -> None:
    """Remove what can be made again: stored caches, executed notebooks, the book. Records always stay."""
    from kvlib.report.wording import bytes_text
    from kvlib.study import cleaning
    from kvlib.study.records import run_lock, stage_lock

    if only_caches and stale:
        raise KvlibError("--caches and --stale were both given, expected one of them: leave one out")
    opened = open_existing(run)
    with run_lock(opened.folder), stage_lock(opened.folder):
        kinds = [cleaning.stale] if stale else [cleaning.caches, *([] if only_caches else [cleaning.pages])]
        parts = [part for kind in kinds for part in kind(opened)]
        if not parts:
            typer.echo(f"nothing to remove in {opened.folder}")
            return
        sizes = [part.bytes for part in parts]
        rows = [
            (part.path.relative_to(opened.folder), bytes_text(size), part.why)
            for part, size in zip(parts, sizes)
        ]
        table(("in the run's folder", "size", "what it is"), rows)
        total = f"{len(parts)} of them, {bytes_text(sum(sizes))}"
        if not yes and not _agreed(total):
            say("nothing was removed")
            return
        left = cleaning.delete(parts)
    if left:
        names = ", ".join(str(part.path) for part in left[:MOST_NAMED])
        more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        raise KvlibError(
            f"{len(left)} of {len(parts)} could not be removed ({names}{more}), expected files and folders that can be written: fix "
            "their permissions, then run the same command again"
        )
    say(f"removed: {total}; `python -m kvlib run --run {run}` makes again what is asked for")


def _agreed(total: str) -> bool:
    if not sys.stdin.isatty():
        raise KvlibError(f"there is no terminal to ask whether to remove {total}: give --yes")
    return typer.confirm(f"remove {total}?", err=True)
