"""Scripts and .ipynb files: a change goes both ways through jupytext, and tags and the parameters cell come through whole."""

import os
import shutil
from pathlib import Path

import nbformat
import pytest
from jupytext.cli import jupytext
from papermill import inspect_notebook

from kvlib.study import execution, names
from kvlib.study.parameters import script_parameters

ROOT = Path(__file__).resolve().parents[1]
NAMES = [path.stem for path in sorted((ROOT / "notebooks").glob("*.py"))]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The scripts and jupytext's settings in a folder of their own, paired as the project pairs them."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "jupytext.toml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sync(path: Path) -> None:
    """`jupytext --sync`, the file just edited."""
    later = path.stat().st_mtime + 10
    os.utime(path, (later, later))
    jupytext(["--quiet", "--sync", str(path)])


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_a_script_is_what_it_was(project, name):
    script, notebook = project / "notebooks" / f"{name}.py", project / "build" / "notebooks" / f"{name}.ipynb"
    before = script.read_text()
    sync(script)
    sync(notebook)
    assert script.read_text() == before
    assert list(inspect_notebook(notebook)) == list(script_parameters(script))


def test_an_edit_in_jupyter_reaches_the_script_and_keeps_every_tag(project):
    script, place = (
        project / "notebooks" / "01_screening.py",
        project / "build" / "notebooks" / "01_screening.ipynb",
    )
    sync(script)
    before = script.read_text()
    notebook = nbformat.read(place, 4)
    cell = next(c for c in notebook.cells if "parameters" in c.metadata.get("tags", []))
    cell.source = cell.source.replace("steps = None", "steps = 40")
    added = nbformat.v4.new_code_cell(
        "print('mine')", metadata={"tags": ["hide-input", "mine"], "collapsed": True}
    )
    notebook.cells.append(added)
    nbformat.write(notebook, place)
    sync(place)
    after = script.read_text()
    assert (
        after
        == before.replace("steps = None", "steps = 40")
        + '\n# %% tags=["hide-input", "mine"]\nprint(\'mine\')\n'
    )
    assert script_parameters(script)["steps"].default == 40


def test_an_edit_in_the_script_reaches_the_notebook_and_keeps_its_outputs(project):
    script, place = project / "notebooks" / "00_pair.py", project / "build" / "notebooks" / "00_pair.ipynb"
    sync(script)
    notebook = nbformat.read(place, 4)
    code = next(c for c in notebook.cells if c.cell_type == "code")
    code.outputs = [nbformat.v4.new_output("stream", name="stdout", text="kept")]
    nbformat.write(notebook, place)
    script.write_text(script.read_text() + "\n# %% [markdown]\n# A remark.\n")
    sync(script)
    found = nbformat.read(place, 4)
    assert found.cells[-1].source == "A remark."
    assert any(o.get("text") == "kept" for c in found.cells for o in c.get("outputs", []))


def test_what_the_command_writes_can_be_synced_back(project, monkeypatch):
    monkeypatch.setattr(names, "SCRIPTS", project / "notebooks")
    place = next(
        p for p in execution.write_notebooks(project / "build" / "notebooks") if p.stem == "02_confirmation"
    )
    notebook = nbformat.read(place, 4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("From Jupyter."))
    nbformat.write(notebook, place)
    sync(place)
    assert "# From Jupyter." in (project / "notebooks" / "02_confirmation.py").read_text()


def test_an_edited_notebook_is_not_written_over(project, kvlib, monkeypatch):
    monkeypatch.setattr(names, "SCRIPTS", project / "notebooks")
    out = project / "build" / "notebooks"
    assert kvlib("notebooks", str(out))[0] == 0
    assert kvlib("notebooks", str(out))[0] == 0  # nothing was edited
    notebook = nbformat.read(out / "00_pair.ipynb", 4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("From Jupyter."))
    nbformat.write(notebook, out / "00_pair.ipynb")
    later = (out / "00_pair.ipynb").stat().st_mtime + 10
    os.utime(out / "00_pair.ipynb", (later, later))
    status, _, err = kvlib("notebooks", str(out))
    assert status == 2 and "jupytext --sync" in err
    assert nbformat.read(out / "00_pair.ipynb", 4).cells[-1].source == "From Jupyter."
