"""The command that prints a run's book."""

import time
from pathlib import Path
from typing import Annotated

import typer

from kvlib.commands.compare import say_out_of_date
from kvlib.options import RunArgument, existing_run
from kvlib.study.display import duration
from kvlib.terminal import say


def pdf(
    run: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="the file to write; book.pdf in the run's folder when left out")
    ] = None,
) -> None:
    """Print the book of a run that is finished to one PDF, charts included; it takes a Chromium."""
    from kvlib.report.pdf import build_pdf
    from kvlib.study.records import run_lock

    folder, started = existing_run(run), time.monotonic()
    with run_lock(folder):
        say_out_of_date(run)
        say("[pdf] …")
        path = build_pdf(folder, out=out)
    say(f"[pdf]: printed in {duration(time.monotonic() - started)}")
    typer.echo(str(path))
