"""Arguments and options that several commands share, and the runs that they name."""

from pathlib import Path
from typing import Annotated

import typer

from kvlib.errors import KvlibError, suggestion
from kvlib.study.names import (
    check_run_name,
    extra_scripts,
    home,
    profile_names,
    run_folder,
    script_of,
    scripts,
)
from kvlib.study.parameter_names import parameter_meanings
from kvlib.terminal import VALUE_WANTED

DEFAULT_PROFILE = "laptop"


def notebook_names(ctx: typer.Context, incomplete: str) -> list[str]:
    if VALUE_WANTED in ctx.meta:  # `-p NAME` stands before: a value comes next, no notebook
        return parameter_values(ctx, incomplete)
    return [name for name in (*scripts(), *extra_scripts()) if name.startswith(incomplete)]


def parameter_names(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Names, with what they mean, of the notebook's parameters that is named before, else of all notebooks'."""
    named = ctx.params.get("notebook")
    found = {}
    for script in [script_of(named)] if named else scripts().values():
        found |= parameter_meanings(script)
    return [(name, found[name]) for name in sorted(found) if name.startswith(incomplete)]


def parameter_values(ctx: typer.Context, incomplete: str) -> list[str]:
    """Values of the parameter that `-p NAME` names, where a list of them can be had: arms, profiles, runs."""
    name = ctx.meta[VALUE_WANTED]
    if name in ("profile", "run"):
        return profile_names_like(incomplete) if name == "profile" else run_names(incomplete)
    if name != "arms":
        return []
    from kvlib.study.arms import all_arms
    from kvlib.study.profile import load_profile

    screening = load_profile(ctx.params.get("profile") or DEFAULT_PROFILE).screening
    before, comma, last = (incomplete or "[").rpartition(",")  # a list is begun, each arm offered once
    before, last = (before + comma, last) if comma else ("[", last.removeprefix("["))
    taken = before[1:].split(",")
    return [f"{before}{a.id}" for a in all_arms(screening) if a.id.startswith(last) and a.id not in taken]


def profile_names_like(incomplete: str) -> list[str]:
    return [name for name in profile_names() if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    return sorted(
        p.parent.name for p in (home() / "results").glob("*/run.json") if p.parent.name.startswith(incomplete)
    )


NotebookArgument = Annotated[
    str | None,
    typer.Argument(
        help="one notebook, such as 01_screening; all, then the book, when left out",
        autocompletion=notebook_names,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        help=f"a profile's name or a path to a YAML file; the run's own, else {DEFAULT_PROFILE}",
        autocompletion=profile_names_like,
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        help="the run's name, a folder under results/; the profile's name when left out",
        autocompletion=run_names,
    ),
]
PairsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--parameter",
        metavar="NAME VALUE",
        help="a notebook parameter; may be given several times",
        autocompletion=parameter_names,
    ),
]
ExecutorOption = Annotated[
    str | None,
    typer.Option(
        metavar="local|ray",
        help="who trains the arms: this machine (the default), several at once on a processor, or workers of Ray",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(help="a running Ray cluster, HOST:PORT or auto; this machine alone when left out"),
]
GpusOption = Annotated[
    float | None,
    typer.Option(
        "--gpus-per-unit",
        help="what share of a GPU each worker of Ray gets, where the run is on GPUs; 1 when left out",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads-per-unit",
        help="processor threads of each worker, the machine's shared out when left out; on a processor, records are the same "
        "bytes at equal threads",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        help="the most arms at once, each in a process of its own; as many as there are cores, memory and work for when left "
        "out; 1 trains one after another"
    ),
]
RunArgument = Annotated[
    str, typer.Argument(help="the run's name, a folder under results/", autocompletion=run_names)
]


def profile_of(run: str | None) -> str | None:
    """What a run that exists was made from: a profile's name, or a path to a YAML file."""
    from kvlib.study.records import read_record

    path = run_folder_of(run) / "run.json" if run is not None else None
    if path is None or not path.exists():
        return None
    record = read_record(path, "profile")
    source = record.get("source", record["profile"])
    return str(home() / source) if source.endswith((".yaml", ".yml")) else source


def run_folder_of(run: str) -> Path:
    return run_folder(check_run_name(run, home() / "results"))


def existing_run(run: str) -> Path:
    folder = run_folder_of(run)
    if not (folder / "run.json").exists():
        known = run_names("")
        raise KvlibError(
            f"there is no run {run!r}, expected {'one of ' + ', '.join(known) if known else 'one that was begun, and none was yet'}"
            f"{suggestion(run, known)}; `python -m kvlib run --profile quick` makes one"
        )
    return folder
