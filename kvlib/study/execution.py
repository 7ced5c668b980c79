"""Run the notebook scripts with papermill: unchanged ones skipped, all written whole or not at all."""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbclient.exceptions import DeadKernelError
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError

from kvlib.errors import KvlibError
from kvlib.study.display import Display
from kvlib.study.kernels import kernel_lock, kernel_manager, last_words, without_its_obituary
from kvlib.study.names import (
    DATA,
    NOTEBOOKS,
    ROOT,
    STAGES,
    extra_scripts,
    home,
    run_folder,
    script_of,  # noqa: F401 (other files know it from here as well)
    scripts,
    sequence,
)
from kvlib.study.parameters import check_parameters, read_script, script_parameters
from kvlib.study.progress import read_progress
from kvlib.study.records import (
    PARTIAL,
    hash_json,
    parse_json,
    read_record,
    remove,
    sha256_file,
    stage_lock,
    write_atomically,
    write_json,
)
from kvlib.study.run import MADE, OUTPUTS, code_files

TRUST = "20_trust"  # the notebook that looks at what other commands left as well
STATE = "progress.json"  # what a running kernel writes and the terminal shows
HIDDEN_TAG = "hide-input"


class NotebookError(RuntimeError):
    """A cell failed for a reason that is no user's mistake; the message says which, and where to read on."""


@dataclass(frozen=True)
class Executed:
    """What became of one notebook: its file, and whether it ran or was found unchanged."""

    path: Path
    ran: bool
    seconds: float


def run_notebook(
    script: Path,
    profile: str,
    run: str,
    parameters: dict,
    *,
    label: str = "",
    force: bool = False,
    environment: dict[str, str] | None = None,
) -> Executed:
    """Execute one script for a run, unless it, its parameters, the code and its records are as they were.

    Args:
        profile, run: as for the command line. parameters: values for names of the script's parameters cell;
            names and types are checked before anything starts. label: for the progress line. environment: variables
        for the kernel, of which no record may depend.

    The caller holds the run's lock. The executed notebook is `results/<run>/notebooks/<name>.ipynb`; one that
    failed is kept as `<name>.failed.ipynb`, which nothing reads but people.

    Raises: KvlibError with the sentence of a KvlibError in a cell; NotebookError for any other failing cell.
    """
    known = script_parameters(script)
    values = check_parameters(script, parameters, known)
    for name, value in (("profile", profile), ("run", run)):
        if name in known:
            values[name] = value
    folder = run_folder(run) / "notebooks"
    place = folder / f"{script.stem}.ipynb"
    inputs = inputs_key(script, values)
    if not force and _unchanged(place, script.stem, run, inputs):
        return Executed(place, False, 0.0)
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    notebook = _execute(script, values, place, run, label or script.stem, environment or {})
    notebook.metadata["kvlib"] = {"inputs": inputs, "records": records_key(script.stem, run)}
    write_atomically(place, lambda path: nbformat.write(notebook, path))
    failed_notebook(place).unlink(missing_ok=True)
    return Executed(place, True, time.monotonic() - started)


def _name(script: Path) -> str:
    """The script's place in the project, so that no path of this machine is recorded."""
    return str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name


def failed_notebook(place: Path) -> Path:
    """Where a half-run notebook is kept for reading; nothing but people reads it."""
    return place.with_name(f"{place.stem}.failed.ipynb")


def _execute(
    script: Path, values: dict, place: Path, run: str, label: str, environment: dict
) -> nbformat.NotebookNode:
    # papermill writes after every cell: aside, so that only a whole notebook takes its place.
    aside = tempfile.TemporaryDirectory(prefix=PARTIAL, dir=place.parent)
    with aside as scratch, kernel_lock(run_folder(run)) as lock:
        partial, log, state = (Path(scratch) / name for name in ("running.ipynb", "kernel.log", STATE))
        try:
            with open(log, "wb") as stream, Display(state, label), without_its_obituary():
                notebook = execute_notebook(
                    read_script(script),
                    str(partial).replace("{", "{{").replace("}", "}}"),  # papermill formats the path
                    parameters=values,
                    kernel_name="python3",
                    progress_bar=False,
                    cwd=str(home()),
                    kernel_manager_class=kernel_manager(state, stream, lock, environment),
                    shutdown_kernel="immediate",
                )
        except PapermillExecutionError as error:
            kept = _keep_failed(partial, script, place)
            if error.ename == "KvlibError":
                raise KvlibError(error.evalue) from error
            raise NotebookError(
                f"cell {error.exec_count} of {_name(script)} failed with {error.ename}: "
                f"{_first_line(error.evalue)}\n    {_first_line(error.source)}\n"
                f"the notebook as far as it ran, with the whole trace: {kept}"
            ) from error
        except DeadKernelError as error:
            kept = _keep_failed(partial, script, place)
            said = last_words(log.read_text(errors="replace"))
            raise NotebookError(
                f"the process that ran {_name(script)} died, most often for want of memory"
                f"{' (its last words: ' + said + ')' if said else ''}: free some memory and run "
                f"the same command again, finished work is kept; the notebook as far as it ran: {kept}"
            ) from error
        except OSError as error:
            raise KvlibError(
                f"{script.stem} could not be run in {scratch} ({error.strerror or error}): free some space, "
                "then run the same command again"
            ) from error
    _dress(notebook, script, place)
    return notebook


def _dress(notebook: nbformat.NotebookNode, script: Path, place: Path) -> None:
    """Say where the notebook came from, and let pages fold the cell that papermill put in."""
    notebook.metadata.papermill["input_path"] = _name(script)
    notebook.metadata.papermill["output_path"] = str(Path("results", *place.parts[-3:]))
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "injected-parameters" in tags and HIDDEN_TAG not in tags:
            cell.metadata["tags"] = [*tags, HIDDEN_TAG]


def _keep_failed(partial: Path, script: Path, place: Path) -> Path:
    if partial.exists():
        notebook = nbformat.read(partial, as_version=4)
        _dress(notebook, script, place)
        return write_atomically(failed_notebook(place), lambda path: nbformat.write(notebook, path))
    return failed_notebook(place)


def _first_line(text: str) -> str:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), "no message")


def inputs_key(script: Path, values: dict) -> str:
    """Hash of everything that a notebook's output comes from, its records apart."""
    code = {str(path.relative_to(ROOT)): sha256_file(path) for path in code_files()}
    data = {str(path.relative_to(ROOT)): sha256_file(path) for path in sorted(DATA.rglob("*.yaml"))}
    pins = ROOT / "requirements.lock"
    return hash_json(
        {
            "script": sha256_file(script), "parameters": values, "code": code, "data": data,
            "python": sys.version_info[:2],
            "packages": sha256_file(pins) if pins.exists() else None,
        }
    )  # fmt: skip


def records_key(name: str, run: str) -> dict[str, str]:
    """SHA-256 of the run's settings and of every finished stage's files that the notebook may have read or written."""
    folder = run_folder(run)
    stage = next((stage for stage, notebook in NOTEBOOKS.items() if notebook == name), STAGES[-1])
    files = [f"{s}/{file}" for s in sequence(stage) for file in ("summary.json", MADE, *OUTPUTS[s])]
    files = [file for file in files if not file.endswith("ledger.jsonl")]  # it grows with other commands
    if name == TRUST:
        files += ["evidence/summary.json", "evidence/attacks.json"]
    paths = [folder / file for file in ("run.json", *files)]
    return {str(path.relative_to(folder)): sha256_file(path) for path in paths if path.exists()}


def _unchanged(place: Path, name: str, run: str, inputs: str) -> bool:
    if not place.exists():
        return False
    try:
        kept = parse_json(place)["metadata"]["kvlib"]
        return kept["inputs"] == inputs and kept["records"] == records_key(name, run)
    except (KvlibError, KeyError, TypeError):
        return False  # not ours, or damaged: it is made again


def running_state(run: str) -> dict | None:
    """The progress of the notebook that runs now, as its kernel last wrote it."""
    found = sorted((run_folder(run) / "notebooks").glob(f"{PARTIAL}*/{STATE}"))
    return read_progress(found[-1]) if found else None


def write_notebooks(folder: Path) -> list[Path]:
    """Every script as an .ipynb file in `folder`, for JupyterLab and papermill's own command.

    Raises: KvlibError where an .ipynb file there was edited after its script: the edit would be lost.
    """
    written = []
    for name, script in (scripts() | extra_scripts()).items():
        notebook, place = read_script(script), Path(folder) / f"{name}.ipynb"
        if (
            place.exists()
            and place.stat().st_mtime > script.stat().st_mtime
            and not _same_cells(place, notebook)
        ):
            raise KvlibError(
                f"{place} was edited after {_name(script)}, expected the script to be the newer one: `jupytext --sync {place}` takes "
                "the edit into the script (see jupytext.toml), or delete the file"
            )
        written.append(
            write_atomically(place, lambda path, nb=notebook: jupytext.write(nb, path, fmt="ipynb"))
        )
    return written


def _same_cells(place: Path, notebook: nbformat.NotebookNode) -> bool:
    """Whether an .ipynb file has the script's cells and tags, whatever its outputs; a file that is none can go."""
    try:
        cells = nbformat.read(place, as_version=4).cells
    except Exception:  # nbformat raises many kinds
        return True
    return [(c.source, c.metadata.get("tags")) for c in cells] == [
        (c.source, c.metadata.get("tags")) for c in notebook.cells
    ]


def forget_parameters(run: str) -> None:
    """Drop the parameters that earlier commands gave a run: its profile's values hold again. Records stay."""
    path = run_folder(run) / "run.json"
    if path.exists():
        write_json(path, {**read_record(path), "overrides": {}})


def remove_leftovers(run: str) -> None:
    """Delete what killed writes left. The caller holds the run's lock, and no stage may be at work either."""
    folder = run_folder(run)
    with stage_lock(folder):
        for path in [*folder.rglob(f"{PARTIAL}*"), *folder.glob(".book-*")]:
            remove(path)
