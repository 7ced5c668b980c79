"""Notebooks executed in this process on made-up records, where finished stages are found and nothing is computed."""

import sys
import types
from pathlib import Path

import jupytext
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from kvlib.study import stages, verification
from kvlib.study.profile import load_profile
from kvlib.study.run import STAGES, Run, read_summary

ROOT = Path(__file__).resolve().parents[1]
CHECKS = [verification.Check("files", 40), verification.Check("screening", 8000, ["one <differs>"])]


def execute(name: str, run: Path) -> nbformat.NotebookNode:
    """A notebook's cells run in this process, its displays kept: as papermill would, without a kernel."""
    notebook, shell = jupytext.read(ROOT / "notebooks" / f"{name}.py"), InteractiveShell.instance()
    for count, cell in enumerate((c for c in notebook.cells if c.cell_type == "code"), 1):
        source = cell.source
        if "parameters" in cell.metadata.get("tags", []):
            source += f"\nresults = {str(run.parent)!r}"
        with capture_output() as captured:
            shell.run_cell(source, store_history=False).raise_error()
        cell.execution_count = count
        cell.outputs = [
            nbformat.v4.new_output("display_data", data=output.data, metadata=output.metadata or {})
            for output in captured.outputs
        ]
    return notebook


def execute_all(run: Path, names) -> Path:
    """The named notebooks in `run`/notebooks; what `kvlib verify` would find is made up too."""
    with pytest.MonkeyPatch.context() as patch:
        found = Run(load_profile("laptop"), run.name, run, {}, "laptop")
        patch.setattr(stages, "open_run", lambda *args, **kwargs: found)
        for stage in STAGES:
            patch.setattr(stages, f"run_{stage}", lambda study, stage=stage: read_summary(run / stage))
        patch.setattr(verification, "verify", lambda study: CHECKS)
        evidence = types.ModuleType("kvlib.study.evidence")
        evidence.run_evidence = lambda study: read_summary(run / "evidence")
        patch.setitem(sys.modules, "kvlib.study.evidence", evidence)
        (run / "notebooks").mkdir(exist_ok=True)
        for name in names:
            nbformat.write(execute(name, run), run / "notebooks" / f"{name}.ipynb")
        InteractiveShell.clear_instance()
    return run
