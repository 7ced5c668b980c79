"""The command that says what a run will take before any of it is done."""

from pathlib import Path
from typing import Annotated

import typer

from kvlib.errors import KvlibError
from kvlib.options import DEFAULT_PROFILE, RunOption, profile_names_like, run_folder_of
from kvlib.terminal import VALUE_WANTED, short, table


def device_names_like(incomplete: str) -> list[str]:
    from kvlib.study.plan.devices import device_names

    return [name for name in device_names() if name.startswith(incomplete)]


def profile_or_value(ctx: typer.Context, incomplete: str) -> list[str]:
    return [] if VALUE_WANTED in ctx.meta else profile_names_like(incomplete)


def keys_like(ctx: typer.Context, incomplete: str) -> list[str]:
    """Dotted keys of the profile that is named before, else of the default."""
    from kvlib.study.profile import load_profile
    from kvlib.study.yaml_files import flat

    keys = flat(load_profile(ctx.params.get("profile") or DEFAULT_PROFILE).model_dump(mode="json"))
    return [key for key in keys if key.startswith(incomplete)]


KeysOption = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--parameter",
        metavar="KEY VALUE",
        help="a key of the profile, such as training.micro_batch 2; may be given several times",
        autocompletion=keys_like,
    ),
]


def plan(
    profile: Annotated[
        str,
        typer.Argument(help="a profile's name or a path to a YAML file", autocompletion=profile_or_value),
    ],
    device: Annotated[
        str,
        typer.Option(
            help="auto (what is found here), cpu (measured), or a card: h100, h200, a100, 4090, …",
            autocompletion=device_names_like,
        ),
    ] = "auto",
    run: RunOption = None,
    parameter: KeysOption = None,
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
    overrides = {key: parse_value(text, name=key) for key, text in pairs}
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
