"""The README's commands and code, run on the smoke profile in a copy of the project."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COPIED = (
    "kvlib",
    "notebooks",
    "book",
    "benchmarks",
    "data",
    "_config.yml",
    "jupytext.toml",
    "requirements.lock",
)
TESTED = re.findall(r"<!-- test -->\n```(bash|python)\n(.*?)```", README, re.S)


@pytest.fixture(scope="module")
def project(smoke_run, tmp_path_factory) -> Path:
    """A copy of the project with the smoke run in it, so that the commands may change what they like."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(smoke_run.home / "results", folder / "results")
    return folder


def environment(project: Path) -> dict:
    here = {name: value for name, value in os.environ.items() if name != "KVLIB_HOME"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**here, "PATH": path, "PYTHONPATH": str(project)}


@pytest.mark.parametrize("number", range(len(TESTED)))
def test_a_block_of_the_readme_runs(project, number):
    language, text = TESTED[number]
    text = re.sub(r"\bquick\b", "smoke", text)
    command = (
        [sys.executable, "-c", text] if language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    )
    done = subprocess.run(command, cwd=project, env=environment(project), capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"


def test_a_changed_script_shows_in_the_book(project):
    assert "A remark of mine." in (project / "results/smoke/book/chapters/04_latency.html").read_text()


def test_papermill_itself_wrote_a_notebook(project):
    assert '"papermill"' in (project / "build" / "pair.ipynb").read_text()


def test_the_readme_opens_with_the_two_commands():
    first = README.index("```bash\nmake book")
    assert first < README.index("make test") < README.index("## ")


def test_every_make_target_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets


def test_every_command_and_profile_that_is_named_exists():
    from kvlib.cli import app
    from kvlib.study.profile import profile_names

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"python -m kvlib ([a-z]+)", README)) <= commands
    assert set(re.findall(r"PROFILE=([a-z]+)", README)) <= set(profile_names())
