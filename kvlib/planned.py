"""The command that says what a run will take before any of it is done."""

from pathlib import Path
from typing import Annotated

import typer

from kvlib.errors import KvlibError
from kvlib.options import PairsOption, RunOption, profile_names_like, run_folder_of
from kvlib.terminal import short, table


def device_names_like(incomplete: str) -> list[str]:
    from kvlib.study.plan.devices import device_names

    return [name for name in device_names() if name.startswith(incomplete)]


def plan(
    profile: Annotated[
        str,
        typer.Argument(help="a profile's name or a path to a YAML file", autocompletion=profile_names_like),
    ],
    device: Annotated[
        str,
        typer.Option(
            help="auto (what is found here), cpu (measured), or a card: h100, h200, a100, 4090, …",
            autocompletion=device_names_like,
        ),
    ] = "auto",
    run: RunOption = None,
    parameter: PairsOption = None,
    json: Annotated[Path | None, typer.Option(help="also write the whole plan to this file")] = None,
) -> None:
    """Say what a run will download, keep, hold and compute, and how long it takes; refuse what cannot fit.

    -p takes a key of the profile, such as training.micro_batch 2, to ask what if.
    """
    from kvlib.study.parameters import parse_value
    from kvlib.study.plan import device_for, plan_run
    from kvlib.study.plan.rows import DOWNLOAD_COLUMNS, STAGE_COLUMNS, download_rows, stage_rows
    from kvlib.study.records import write_json

    if run is not None:
        run_folder_of(run)  # a name that no run can have
    pairs = [pair.split("=", 1) for pair in parameter or []]
    overrides = {key: parse_value(text) for key, text in pairs}
    made = plan_run(profile, lambda settings: device_for(settings, device), run=run, overrides=overrides)
    typer.echo(f"profile {made.profile.name} on {made.device.name} ({made.device.source})")
    table(STAGE_COLUMNS, stage_rows(made))
    if made.downloads:
        table(DOWNLOAD_COLUMNS, download_rows(made))
    if json is not None:
        write_json(json, made.record())
        typer.echo(f"written to {short(json)}")
    if not made.fits:
        raise KvlibError(made.verdict)
    typer.echo(made.verdict)
