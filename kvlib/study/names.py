"""What stages, notebooks and profiles are called, and where they and the runs lie. Imports nothing that takes time."""

import os
import re
import reprlib
from pathlib import Path

from kvlib.errors import KvlibError, suggestion

RUN_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
)  # a profile's pattern, and short enough for any file system

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data"
SCRIPTS = ROOT / "notebooks"
HOME_VARIABLE = "KVLIB_HOME"  # where results/ lies; the project's own folder unless set

STAGES = ("pair", "screening", "confirmation", "frozen_evaluation", "latency")
NOTEBOOKS = dict(
    zip(STAGES, ("00_pair", "01_screening", "02_confirmation", "03_frozen_evaluation", "04_latency"))
)
# Stages outside the sequence, and the stage each of them comes after.
EXTRA = {"evidence": "frozen_evaluation"}
NOTEBOOKS |= {stage: stage for stage in EXTRA}


def sequence(stage: str) -> tuple[str, ...]:
    """A stage after all those that come before it; an extra stage after the part of the sequence that it needs."""
    if stage in EXTRA:
        return (*sequence(EXTRA[stage]), stage)
    return STAGES[: STAGES.index(stage) + 1]


def home() -> Path:
    """The folder that relative `results` folders lie in, wherever a notebook was started."""
    return Path(os.environ.get(HOME_VARIABLE) or ROOT).resolve()


def check_run_name(run: str, folder: Path) -> str:
    """The name, if a run may have it. Raises KvlibError otherwise.

    folder: the one that runs lie in. A run that is there already keeps a name that no new one would get, as long as it is
    a plain folder's name that can be printed.
    """
    if not RUN_NAME.fullmatch(run):
        plain = run and run == Path(run).name and not run.startswith(".") and run.isprintable()
        if not plain or len(os.fsencode(run)) > 255 or not (folder / run / "run.json").exists():
            raise KvlibError(
                f"run name {reprlib.repr(run)} given, expected a plain folder name such as 'laptop': letters, digits, '.', '_' and "
                "'-', a letter or digit first, 100 at most; choose another"
            )
    if (folder / run).exists() and not (folder / run).is_dir():
        raise KvlibError(
            f"run name {run!r} given, but {folder / run} is a file, expected a run's folder or a name that is free: choose another"
        )
    return run


def run_folder(run: str) -> Path:
    return home() / "results" / run


def profile_names() -> list[str]:
    return sorted(path.stem for path in (DATA / "profiles").glob("*.yaml"))


def scripts() -> dict[str, Path]:
    """Notebook name -> its script, in the order in which they run."""
    return {path.stem: path for path in sorted(SCRIPTS.glob("[0-9]*.py"))}


def extra_scripts() -> dict[str, Path]:
    """Those that the ordinary run leaves out: each has a command of its own."""
    return {NOTEBOOKS[stage]: SCRIPTS / f"{NOTEBOOKS[stage]}.py" for stage in EXTRA}


def script_of(name: str) -> Path:
    """A notebook by name (`01_screening`, `evidence`), file or number. Raises KvlibError for an unknown one."""
    known = scripts() | extra_scripts()
    wanted = Path(name).stem
    found = [
        stem
        for stem in known
        if stem == wanted or stem.split("_", 1)[0] == wanted or stem.split("_", 1)[-1] == wanted
    ]
    if len(found) != 1:
        raise KvlibError(
            f"notebook {name!r} given, expected one of {', '.join(known)}{suggestion(wanted, list(known))}"
        )
    return known[found[0]]
