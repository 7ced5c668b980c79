"""Tab completion: commands, options, notebooks, profiles, runs and the parameters of the notebook that was named."""

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvlib.study import execution, names
from kvlib.study.arms import all_arms
from kvlib.study.parameter_names import parameter_meanings
from kvlib.study.parameters import script_parameters
from kvlib.study.profile import load_profile, profile_names
from kvlib.study.run import Run

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def complete(kvlib, tmp_path, monkeypatch):
    """What a shell would offer for the last word of a line, with two runs in place."""
    for name in ("mine", "other"):
        Run.open("smoke", name, results=tmp_path / "results")

    def offered(*words: str) -> list[str]:
        monkeypatch.setenv("_KVLIB_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", shlex.join(["kvlib", *filter(None, words)]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return kvlib()[1].split()

    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("sta",), ["status"]),
        (("run", "--pro"), ["--profile"]),
        (("run", "01"), ["01_screening"]),
        (("params", "evi"), ["evidence"]),
        (("run", "--run", ""), ["mine", "other"]),
        (("run", "--run", "o"), ["other"]),
        (("status", "mi"), ["mine"]),
        (("compare", "mine", "o"), ["other"]),
        (("book", ""), ["mine", "other"]),
        (("clean", "m"), ["mine"]),
        (("run", "01_screening", "-p", "rank"), ["rank_slice"]),
        (("run", "01_screening", "-p", "steps", "40", "-p", "warm"), ["warmup_steps"]),
        (("run", "01_screening", "-p", "steps", ""), []),
        (("run", "-p", "run", "o"), ["other"]),
        (("run", "01_screening", "-p", "profile", "smo"), ["smoke"]),
        (("plan", "smoke", "-p", "training.mi"), ["training.micro_batch", "training.min_prefix_tokens"]),
        (("plan", "-p", "training.steps", ""), []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_words_are_completed(complete, words, offered):
    assert complete(*words) == offered


def test_every_profile_and_every_parameter_is_offered(complete):
    assert complete("run", "--profile", "") == profile_names()
    assert complete("arms", "--profile", "") == profile_names()
    assert complete("run", "04_latency", "-p", "") == sorted(
        script_parameters(execution.script_of("04_latency"))
    )
    assert {"seed", "rank_slice", "forcings"} <= set(complete("run", "-p", ""))


def test_arms_are_offered_for_a_list_of_them_each_once(complete):
    arms = [arm.id for arm in all_arms(load_profile("smoke").screening)]
    begun = ("run", "01_screening", "--profile", "smoke", "-p", "arms")
    assert complete(*begun, "") == [f"[{arm}" for arm in arms]
    assert complete(*begun, f"[{arms[0]},direct-q") == [f"[{arms[0]},direct-quadratic-own-r8-lr0.003-w4"]
    assert f"[{arms[0]},{arms[0]}" not in complete(*begun, f"[{arms[0]},")


@pytest.mark.parametrize(
    "script", [*names.scripts().values(), *names.extra_scripts().values()], ids=lambda path: path.stem
)
def test_the_names_that_are_offered_are_those_that_papermill_sees(script):
    assert parameter_meanings(script) == {name: p.meaning for name, p in script_parameters(script).items()}


@pytest.mark.parametrize(
    "line",
    ["kvlib ru", "kvlib run 01_screening -p rank", "kvlib run 01_screening -p arms [d", "kvlib status m"],
)
def test_a_line_is_completed_without_the_libraries_that_take_seconds(tmp_path, line):
    code = "import sys\nfrom kvlib.cli import main\ntry:\n    main()\nfinally:\n    print(sorted(sys.modules), file=sys.stderr)"
    environment = {
        **os.environ, "_KVLIB_COMPLETE": "complete_bash", "COMP_WORDS": line, "KVLIB_HOME": str(tmp_path),
        "COMP_CWORD": str(len(line.split()) - 1),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    slow = {"torch", "transformers", "pandas", "numpy", "papermill", "jupytext", "pyarrow"}
    loaded = set(ast.literal_eval(done.stderr))
    assert "typer" in loaded and not loaded & slow


def test_a_shell_gets_its_answer_from_the_installed_command(tmp_path):
    environment = {
        **os.environ, "_KVLIB_COMPLETE": "complete_bash", "COMP_WORDS": "kvlib run --profile la", "COMP_CWORD": "3",
        "KVLIB_HOME": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-c", "from kvlib.cli import main; main()"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["laptop"], done.stderr
