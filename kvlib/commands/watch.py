"""The command that builds pages again while one edits them."""

import typer

from kvlib.commands.compare import open_existing
from kvlib.options import RunArgument
from kvlib.terminal import Stopped, say


def watch(run: RunArgument) -> None:
    """Build pages again whenever a script, a chart or a hand-written page is edited; nothing is trained. Ctrl-C ends it."""
    from kvlib.report import watching

    opened = open_existing(run)
    try:
        watching.watch(opened, say)
    except Stopped as stopped:
        say("\nno longer watching; the book is as it was built last")
        raise typer.Exit(0) from stopped
