"""The command that sets several runs beside one another, in numbers and, if asked, as a page of charts."""

from pathlib import Path
from typing import Annotated

import typer

from kvlib.options import DEFAULT_PROFILE, existing_run, profile_of, run_names
from kvlib.terminal import say, short, table

RunsArgument = Annotated[
    list[str], typer.Argument(help="two or more runs", metavar="RUN RUN…", autocompletion=run_names)
]

BookArgument = Annotated[
    list[str],
    typer.Argument(help="a run, or several to be compared", metavar="RUN…", autocompletion=run_names),
]


def compare(
    runs: RunsArgument,
    everything: Annotated[bool, typer.Option("--all", help="also print what is the same")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="write all of it to this file", dir_okay=False)
    ] = None,
    book: Annotated[bool, typer.Option("--book", help="build a page of charts of these runs")] = False,
) -> None:
    """Say what differs between runs: settings, findings, times, machine and code; --book adds a page of charts."""
    from kvlib.report.tables import cell_text
    from kvlib.report.tables.comparison import cells_of
    from kvlib.study.comparing import compare_runs
    from kvlib.study.records import write_json

    opened = [open_existing(name) for name in runs]
    found = compare_runs(opened)
    for group, rows in found.groups().items():
        shown = [row for row in rows if everything or row.differs]
        if shown:
            typer.echo(f"{group}")
            table(
                ("  what", *found.runs), [(f"  {row.what}", *map(cell_text, cells_of(row))) for row in shown]
            )
            typer.echo("")
    for note in found.notes:
        typer.echo(note)
    differing = sum(row.differs for row in found.rows)
    typer.echo(
        f"{differing:,} of {len(found.rows):,} entries differ{'' if everything else '; --all prints the others too'}"
    )
    if json is not None:
        write_json(json, found.record())
        say(f"written: {short(json)}")
    if book:
        build_page(opened, found)


def open_existing(name: str):
    """A run that is there, with its profile."""
    from kvlib.study.run import Run

    folder = existing_run(name)
    return Run.open(profile_of(name) or DEFAULT_PROFILE, name, results=folder.parent)


def say_out_of_date(name: str) -> None:
    """Before a run's book is made: what in it is of other settings. Raises KvlibError for a run that is not finished."""
    from kvlib.study.standing import out_of_date

    for reason in out_of_date(open_existing(name)):
        say(f"out of date, and in the book as it was: {reason}")


def build_page(opened: list, found) -> None:
    """Build the page of a comparison and say where it is."""
    from kvlib.report.comparison_page import build_comparison

    say("[comparison] …")
    index = build_comparison(opened, found)
    typer.echo(f"The comparison is ready: open {index} in a browser")
