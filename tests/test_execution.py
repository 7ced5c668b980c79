"""Notebook scripts through papermill: unchanged ones skipped, failures kept out, kernels that end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from kvlib.errors import KvlibError
from kvlib.study import execution
from kvlib.study.execution import NotebookError, run_notebook

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """\
# %% tags=["parameters"]
profile = "smoke"  # the profile
run = None  # the run
steps = 3  # how many
shares = [0.5]  # of what

# %%
{body}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script with the given last cell, for a run in a folder of this test."""
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path / "home"))

    def write(body: str, name: str = "00_test") -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(SCRIPT.format(body=body))
        return path

    return write


def outputs(path: Path) -> str:
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    return "".join(output.get("text", "") for cell in cells for output in cell.outputs)


def test_parameters_reach_the_notebook_and_its_origin_is_recorded(script):
    path = script("print(profile, run, steps, shares)")
    done = run_notebook(path, "smoke", "mine", {"steps": 5})
    assert outputs(done.path) == "smoke mine 5 [0.5]\n"
    notebook = nbformat.read(done.path, 4)
    assert notebook.metadata.papermill.input_path == "00_test.py"
    assert notebook.metadata.papermill.output_path == "results/mine/notebooks/00_test.ipynb"
    injected = [c for c in notebook.cells if "injected-parameters" in c.metadata.get("tags", [])]
    assert len(injected) == 1 and "hide-input" in injected[0].metadata.tags


def test_an_unchanged_notebook_is_not_run_again_and_a_changed_one_is(script):
    path = script("print(steps)")
    assert run_notebook(path, "smoke", "mine", {}).ran
    first = execution.run_folder("mine") / "notebooks" / "00_test.ipynb"
    before = first.read_bytes()
    assert not run_notebook(path, "smoke", "mine", {}).ran
    assert first.read_bytes() == before
    assert run_notebook(path, "smoke", "mine", {"steps": 4}).ran
    path.write_text(path.read_text() + "\n# %%\nprint('more')\n")
    assert run_notebook(path, "smoke", "mine", {"steps": 4}).ran
    (execution.run_folder("mine") / "run.json").write_text("{}")
    assert run_notebook(path, "smoke", "mine", {"steps": 4}).ran
    first.write_text(first.read_text()[:-40])
    assert run_notebook(path, "smoke", "mine", {"steps": 4}).ran


def test_a_failing_cell_names_itself_and_its_notebook_stays_out_of_the_way(script):
    path = script("print('so far')\n1 / 0")
    with pytest.raises(
        NotebookError, match=r"cell \d+ of 00_test.py failed with ZeroDivisionError"
    ) as caught:
        run_notebook(path, "smoke", "mine", {})
    folder = execution.run_folder("mine") / "notebooks"
    assert [p.name for p in folder.glob("*.ipynb")] == ["00_test.failed.ipynb"]
    assert str(folder / "00_test.failed.ipynb") in str(caught.value)
    assert "so far" in outputs(folder / "00_test.failed.ipynb")
    path.write_text(SCRIPT.format(body="print('well')"))
    run_notebook(path, "smoke", "mine", {})
    assert [p.name for p in folder.glob("*.ipynb")] == ["00_test.ipynb"]


def test_a_users_mistake_in_a_cell_comes_out_as_its_sentence(script):
    path = script("from kvlib.errors import KvlibError\nraise KvlibError('3 given, expected 4: add one')")
    with pytest.raises(KvlibError, match="^3 given, expected 4: add one$"):
        run_notebook(path, "smoke", "mine", {})


def test_a_kernel_that_dies_is_said_to_have_died(script, caplog, capfd):
    path = script("import os\nos._exit(9)")
    with pytest.raises(
        NotebookError, match="00_test.py died, most often for want of memory: free some memory"
    ):
        run_notebook(path, "smoke", "mine", {})
    assert "Kernel died" not in caplog.text + "".join(capfd.readouterr())


def test_its_last_words_are_those_of_the_notebook_not_of_every_kernel(script):
    path = script("import os\nos.write(2, b'out of memory in add_one\\n')\nos._exit(9)")
    with pytest.raises(NotebookError, match=r"\(its last words: out of memory in add_one\)"):
        run_notebook(path, "smoke", "mine", {})


def test_the_kernel_is_this_python_and_shows_no_bars(script, monkeypatch, tmp_path):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "nothing"))
    body = "import os, sys\nprint(sys.executable, os.environ['TQDM_DISABLE'], 'KVLIB_PROGRESS' in os.environ)"
    done = run_notebook(script(body), "smoke", "mine", {})
    assert outputs(done.path).split() == [sys.executable, "1", "True"]


def test_braces_in_a_folder_name_are_only_braces(script, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path / "{odd}"))
    assert run_notebook(script("print(1)"), "smoke", "mine", {}).path.exists()


COMMAND = """\
import sys
from pathlib import Path
from kvlib import cli
from kvlib.study import names
names.SCRIPTS = Path(sys.argv.pop(1))
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGKILL, -9, "")],
)
def test_a_stopped_command_takes_its_kernel_along(script, tmp_path, number, status, word):
    mark = tmp_path / "pid"
    script(
        f"import os, pathlib\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\nwhile True:\n    pass"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path), "run", "00_test", "--profile", "smoke"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        kernel = int(wait_for(lambda: mark.exists() and mark.read_text(), 120))
        process.send_signal(number)
        said = process.communicate(timeout=90)[1]
    finally:  # a command that did not stop would go on for ever, and its kernel with it
        process.kill()
    assert process.returncode == status
    assert word in said and "Traceback" not in said and "Kernel died" not in said
    assert wait_for(lambda: not alive(kernel), 30)
    if word:
        assert "finished work is kept" in said
        assert not list((tmp_path / "home").rglob(".partial-*"))


def wait_for(condition, seconds: float):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.1)
    pytest.fail("waited in vain")


def interruptible() -> None:
    """In a new process: Ctrl-C counts, also where the tests themselves run in the background, whose children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
