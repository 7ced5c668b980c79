"""What the command line says and how it ends: sentences, tables, exit statuses, Ctrl-C and SIGTERM."""

import logging
import os
import signal
import sys
import traceback
from pathlib import Path

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from kvlib.errors import KvlibError
from kvlib.usage import usage_sentence

MISTAKE, FAILURE = 2, 1  # exit statuses: one sentence explains it, or a cell failed
VALUE_WANTED = (
    "kvlib.value_wanted"  # in a context's meta: NAME, where the line that is completed ends with `-p NAME`
)
STOPS = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}


class Stopped(BaseException):
    """Ctrl-C or SIGTERM, raised so that kernels end on the way out; typer would swallow KeyboardInterrupt."""

    def __init__(self, number: int):
        self.how, self.status = STOPS[number]
        super().__init__(self.how)


class PairsCommand(TyperCommand):
    """A command whose option `-p` takes a name and a value, as papermill's does."""

    def parse_args(self, ctx, args: list[str]):
        joined, rest = [], list(args)
        while rest:
            word = rest.pop(0)
            if word in ("-p", "--parameter") and not rest and ctx.resilient_parsing:
                break  # the name that a shell is about to complete; the words before it still count
            joined.append(word)
            if word in ("-p", "--parameter") and rest:
                name = rest.pop(0)
                if "=" not in name and not rest and ctx.resilient_parsing:  # while a shell completes the line
                    ctx.meta[VALUE_WANTED] = name
                    joined.append(f"{name}=")
                    break
                if "=" not in name and not rest:
                    raise KvlibError(f"parameter {name!r} given without a value, expected {word} NAME VALUE")
                joined.append(name if "=" in name else f"{name}={rest.pop(0)}")
        return super().parse_args(ctx, joined)

    def shell_complete(self, ctx, incomplete: str) -> list:
        if VALUE_WANTED not in ctx.meta:
            return super().shell_complete(ctx, incomplete)
        offers = next((p for p in self.params if p.name in ("notebook", "profile")), None)
        return offers.shell_complete(ctx, incomplete) if offers is not None else []


def run_app(app: typer.Typer, arguments: list[str]) -> None:
    """Run a typer application and exit: 0 done, 1 a cell failed, 2 a mistake, 130 or 143 stopped."""
    trace = "--trace" in arguments
    for number in STOPS:
        signal.signal(number, _stop)
    try:
        given = [argument for argument in arguments if argument != "--trace"]
        sys.exit(app(args=given, prog_name="kvlib", standalone_mode=False))
    except Stopped as stopped:
        say(f"\n{stopped.how}: finished work is kept, the same command goes on from there")
        sys.exit(stopped.status)
    except KvlibError as error:
        _fail(str(error), MISTAKE, trace)
    except typer.Abort:
        say("kvlib: nothing was answered, and nothing was done")
        sys.exit(FAILURE)
    except TyperException as error:
        if not given:  # no command at all: its message is the help
            say(error.format_message())
            sys.exit(MISTAKE)
        _fail(usage_sentence(error), MISTAKE, trace)
    except Exception as error:
        from kvlib.study.execution import NotebookError  # papermill takes a second to import

        fault = f"{type(error).__name__}: {error}; this is a fault in kvlib, `--trace` shows where"
        _fail(str(error) if isinstance(error, NotebookError) else fault, FAILURE, trace)


def _stop(number: int, _) -> None:
    # The first signal leaves in good order, a second one at once; kernels then notice by themselves.
    for each in STOPS:
        signal.signal(each, lambda again, _: os._exit(STOPS[again][1]))
    logging.disable(logging.CRITICAL)  # libraries would report the kernel that ends, trace and all
    raise Stopped(number)


def _fail(sentence: str, status: int, trace: bool) -> None:
    if trace:
        traceback.print_exc()
    say(f"kvlib: {sentence}")
    sys.exit(status)


def say(sentence: str) -> None:
    """To standard error: what is going on, as against what a command was asked to print."""
    typer.echo(sentence, err=True)


def table(head: tuple, rows: list[tuple]) -> None:
    """Print columns, aligned, the last one free."""
    cells = [tuple(str(cell) for cell in row) for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def short(path: Path) -> str:
    """A path from here, where it lies below."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
