"""Commands that only look: at parameters, arms, profiles and runs."""

import contextlib
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvlib.commands.compare import open_existing
from kvlib.errors import KvlibError
from kvlib.options import (
    DEFAULT_PROFILE,
    ProfileOption,
    RunArgument,
    existing_run,
    notebook_names,
)
from kvlib.study.display import duration
from kvlib.terminal import FAILURE, table


def params(
    notebook: Annotated[
        str, typer.Argument(help="a notebook, such as 01_screening", autocompletion=notebook_names)
    ],
    profile: ProfileOption = None,
) -> None:
    """List a notebook's parameters: names, types, defaults, meanings. What is left out is as the profile has it."""
    from kvlib.study.execution import script_of
    from kvlib.study.parameters import profile_keys, script_parameters
    from kvlib.study.profile import load_profile
    from kvlib.study.yaml_files import flat

    script, settings = script_of(notebook), load_profile(profile or DEFAULT_PROFILE)
    keys, values = profile_keys(script), flat(settings.model_dump(mode="json"))
    own = {"profile": profile or DEFAULT_PROFILE, "run": settings.name}
    rows = []
    for p in script_parameters(script).values():
        default = own.get(p.name, values.get(keys.get(p.name, p.name), p.default))
        rows.append((p.name, p.type, shown(default), p.meaning))
    table(("name", "type", f"default ({settings.name})", "meaning"), rows)


def arms(profile: ProfileOption = None) -> None:
    """List the arms that a profile screens."""
    from kvlib.study.arms import chosen_arms
    from kvlib.study.profile import load_profile

    rows = [
        (a.id, a.base, a.residual, a.features, a.rank, f"{a.learning_rate:g}", a.warmup_steps)
        for a in chosen_arms(load_profile(profile or DEFAULT_PROFILE).screening)
    ]
    table(("arm", "base", "residual", "features", "rank", "learning rate", "warm-up steps"), rows)


def profiles() -> None:
    """List the profiles."""
    from kvlib.study.profile import load_profile, profile_names

    table(("profile", "what it is"), [(name, load_profile(name).label) for name in profile_names()])


def status(run: RunArgument) -> None:
    """Say what of a run is done, running and left, how long it takes, and what is out of date and why."""
    from kvlib.report.freshness import book_state
    from kvlib.study.names import NOTEBOOKS
    from kvlib.study.pages import page_states
    from kvlib.study.standing import DONE, same_elsewhere, standings

    opened = open_existing(run)
    folder = opened.folder
    pages, found = page_states(run), standings(opened)
    rows, reasons = [], []
    for one in found:
        name = NOTEBOOKS[one.stage]
        took = duration(one.seconds) if one.seconds is not None else ""
        if one.state != DONE and one.seconds is None and (other := same_elsewhere(opened, one.stage)):
            took = f"about {duration(other[1])}, as in run {other[0]}"
        rows.append((name, one.state, took, pages.pop(name, "none")))
        reasons += [f"{one.state}: {name}: {one.why}"] if one.why else []
    rows += [(name, "", "", state) for name, state in pages.items()]
    typer.echo(f"run {run} of profile {opened.profile.name}, {activity(run, folder)}")
    if opened.overrides:
        typer.echo("parameters: " + ", ".join(f"{key} = {value}" for key, value in opened.overrides.items()))
    table(("notebook", "state", "time", "page"), rows)
    for reason in reasons:
        typer.echo(reason)
    left = [NOTEBOOKS[one.stage] for one in found if one.state != DONE]
    spent = sum(one.seconds or 0.0 for one in found if one.state == DONE)
    typer.echo(
        f"done: {len(found) - len(left)} of {len(found)} stages in {duration(spent)}; left: {', '.join(left) or 'none'}"
    )
    typer.echo(f"book: {book_state(folder)}")


def verify(run: RunArgument) -> None:
    """Recompute every published number of a run from its records, check every hash, say what does not match."""
    from kvlib.study.records import run_lock
    from kvlib.study.verification import verify as verified

    folder = existing_run(run)
    # Nothing is written, so that a copy that only can be read is no obstacle.
    with run_lock(folder) if os.access(folder, os.W_OK) else contextlib.nullcontext():
        checks = verified(folder)
    table(
        ("check", "compared", "result"),
        [(check.name, f"{check.checked:,}", check.result) for check in checks],
    )
    found = [f"{check.name}: {mismatch}" for check in checks for mismatch in check.mismatches]
    for mismatch in found:
        typer.echo(mismatch)
    compared = sum(check.checked for check in checks)
    if found:
        typer.echo(f"{len(found):,} of {compared:,} do not match")
        raise typer.Exit(FAILURE)
    ran = sum(check.checked > 0 for check in checks)
    typer.echo(f"everything matches: {compared:,} numbers and hashes in {ran} checks")


def activity(run: str, folder: Path) -> str:
    """What a run is doing now, from its lock and its kernel's progress."""
    from kvlib.study.display import describe
    from kvlib.study.execution import running_state
    from kvlib.study.records import run_lock

    try:
        with run_lock(folder):
            return "nothing running"
    except KvlibError:
        state = running_state(run)
        return f"running: {state['stage']}, {describe(state)}" if state else "in use by another process"


def shown(value) -> str:
    """A value as one would give it with -p."""
    return value if isinstance(value, str) else json.dumps(value)
