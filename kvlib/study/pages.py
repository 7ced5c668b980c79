"""Whether a run's executed notebooks are those that its scripts, its parameters and its records would give now."""

from kvlib.errors import KvlibError
from kvlib.study.execution import (
    extra_scripts,
    failed_notebook,
    inputs_key,
    records_key,
    run_folder,
    script_of,
    scripts,
)
from kvlib.study.records import parse_json

CURRENT, NONE = "up to date", "none"


def page_states(run: str) -> dict[str, str]:
    """Notebook name -> the state of its executed page; one that has a command of its own is left out until it ran."""
    names = list(scripts()) + [name for name in extra_scripts() if _place(run, name).exists()]
    return {name: page_state(run, name) for name in names}


def page_state(run: str, name: str) -> str:
    """`up to date`, `none`, or in words why the page is out of date."""
    place = _place(run, name)
    failed = failed_notebook(place)
    if failed.exists():
        return f"its last run failed: {failed}"
    if not place.exists():
        return NONE
    try:
        metadata = parse_json(place)["metadata"]
        kept, values = metadata["kvlib"], metadata["papermill"]["parameters"]
        inputs, records = kept["inputs"], kept["records"]
    except (KvlibError, KeyError, TypeError):
        return "damaged"
    if inputs != inputs_key(script_of(name), values):
        return "its script, kvlib or its settings have changed"
    now = records_key(name, run)
    changed = [file for file in {**records, **now} if records.get(file) != now.get(file)]
    if not changed:
        return CURRENT
    return f"{changed[0]} {'has changed' if changed[0] in now else 'is missing'}"


def _place(run: str, name: str):
    return run_folder(run) / "notebooks" / f"{name}.ipynb"
