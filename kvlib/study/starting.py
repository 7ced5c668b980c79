"""Whether a command's notebooks can start: found out before a kernel does, with the sentence that the notebook would say."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.arms import chosen_arms
from kvlib.study.names import NOTEBOOKS, run_folder, sequence
from kvlib.study.parameters import profile_keys
from kvlib.study.profile import load_profile
from kvlib.study.records import read_record, remove
from kvlib.study.run import Run

LOCKS = {".lock", ".stage.lock", ".kernel.lock"}


def check_start(profile: str, run: str, values: dict[Path, dict], reset: bool = False) -> None:
    """Try what each notebook is to be given on the run's profile, one after another, as they would.

    Args:
        profile: a name, or a path from here. values: of the scripts that are to run, see `values_by_script`; a script that
            is to run alone needs the stages before its own. reset: earlier commands' parameters will be forgotten.

    Raises: KvlibError for a value that the profile cannot have, and for a stage that has to be run before.
    """
    record = run_folder(run) / "run.json"
    merged = {} if reset or not record.exists() else dict(read_record(record, "overrides")["overrides"])
    earlier = ", ".join(f"{key} {json.dumps(value)}" for key, value in merged.items())
    kept = f" (earlier commands gave {earlier}, which --reset forgets)" if earlier else ""
    for script, given in values.items():
        keys = profile_keys(script)
        mine = {name: value for name, value in given.items() if name in keys and value is not None}
        if not mine:
            continue
        merged |= {keys[name]: value for name, value in mine.items()}
        try:
            chosen_arms(load_profile(profile, merged).screening)
        except KvlibError as error:
            shown = " ".join(f"-p {name} {json.dumps(value)}" for name, value in mine.items())
            raise KvlibError(
                f"{script.stem} with {shown}{kept}: {error}; `python -m kvlib params {script.stem}` explains the parameters"
            ) from error
    stages = {notebook: stage for stage, notebook in NOTEBOOKS.items()}
    if len(values) == 1 and (stage := stages.get(next(iter(values)).stem)):
        before = [s for s in sequence(stage)[:-1] if (stage, s) != ("latency", "frozen_evaluation")]
        if before:  # latency needs the frozen map, not what the final evaluation found
            Run(load_profile(profile, merged), run, run_folder(run), merged, profile).require(
                before[-1], stage
            )


@contextlib.contextmanager
def tidy(folder: Path) -> Iterator[None]:
    """A run folder that a refused command made, and put nothing but locks into, goes again, and `results` if it is empty."""
    there, parent_there = folder.exists(), folder.parent.exists()
    try:
        yield
    except KvlibError:
        if (
            not there
            and folder.is_dir()
            and {path.name for path in folder.rglob("*") if path.is_file()} <= LOCKS
        ):
            remove(folder)
            if not parent_there:
                with contextlib.suppress(OSError):  # someone else's run is in it by now
                    folder.parent.rmdir()
        raise
