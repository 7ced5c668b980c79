"""Every mistake on the command line is one sentence and exit status 2, said before anything starts, and leaves nothing."""

import shutil

import pytest

from kvlib import cli
from kvlib.errors import KvlibError
from kvlib.study import execution, names
from kvlib.study.run import Run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["rn"], "did you mean 'run'?"),
        (["statsu", "laptop"], "did you mean 'status'?"),
        (["run", "--profle", "smoke"], "did you mean '--profile'?"),
        (["--verson"], "option '--verson' given, expected one of --trace"),
        (["run", "--workers", "many"], "--workers is 'many', expected a valid integer"),
        (["run", "--profile"], "option --profile given without a value"),
        (["run", "--reset=3"], "option --reset given with a value, expected none"),
        (["plan", "smoke", "-p", "training.stps", "4"], "did you mean 'training.steps'?"),
        (["plan", "smok"], "did you mean 'smoke'?"),
        (["params"], "given without its NOTEBOOK, expected a notebook, such as 01_screening"),
        (["status", "a", "b"], "(b), expected `python -m kvlib status [OPTIONS] RUN`"),
        (["run", "01_screning"], "did you mean '01_screening'?"),
        (["run", "--profile", "smok"], "expected one of"),
        (["run", "01_screening", "--profile", "smoke", "-p", "step", "40"], "did you mean 'steps'?"),
        (["run", "--profile", "smoke", "-p", "stepz", "40"], "did you mean 'steps'?"),
        (
            ["run", "01_screening", "--profile", "smoke", "-p", "steps", "many"],
            "steps of 01_screening is 'many'",
        ),
        (["run", "01_screening", "--profile", "smoke", "-p", "results", "x"], "KVLIB_HOME"),
        (["run", "--profile", "smoke", "--run", "../out"], "expected a plain folder name"),
        (["run", "--profile", "smoke", "--run", "a", "-p", "run", "b"], "expected one run"),
        (["run", "--profile", "smoke", "-p", "steps"], "expected -p NAME VALUE"),
        (["params", "07"], "expected one of"),
        (["arms", "--profile", "nothing.yaml"], "expected one of"),
        (["status", "nowhere"], "there is no run 'nowhere'"),
        (["book", "nowhere"], "there is no run 'nowhere'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence_and_status_2(kvlib, arguments, sentence):
    status, out, err = kvlib(*arguments)
    assert status == 2
    assert sentence in err
    assert "Traceback" not in err and not out
    assert err.startswith("kvlib: ") and err.count("\n") == 1
    assert "expected" in err or "did you mean" in err or "given without" in err


def test_no_command_at_all_is_answered_with_the_help(kvlib):
    status, out, err = kvlib()
    assert status == 2 and not out
    assert "Commands:" in err and "screen" in err


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["-p", "steps", "-4"], "training.steps is -4, expected a value greater than or equal to 1"),
        (["-p", "learning_rates", "[0.1]"], "screening.learning_rates is [0.1], expected at least 3 items"),
        (["-p", "rank_slice", "[4, 16]"], "screening.centre_rank is 8, expected one of screening.ranks = [4, 16]"),
        (["-p", "checkpoints", "[40]"], "screening.checkpoints holds 40, expected at most training.steps"),
        (["-p", "arms", "[direct-linear-own-r8-lr0.003-w5]"], "did you mean 'direct-linear-own-r8-lr0.003-w4'?"),
        (["-p", "repetitions", "[3]"], "latency.repetitions has 1 entries, expected 3"),
        (["-p", "forcings", "[orcale]"], "evaluation.forcings.0 is 'orcale', expected 'oracle' or 'text'"),
        (["-p", "steps", "1:30"], "parameter steps of 01_screening is '1:30', expected a whole number such as 40"),
        (["-p", "steps", "010"], "parameter steps of 01_screening is '010', expected a whole number"),
        (["-p", "steps", ""], "parameter steps is '', expected a whole number such as 40: correct the value"),
        (["-p", "steps="], "parameter steps is '', expected a whole number"),
        (["-p", "steps", "# none"], "parameter steps is '# none', expected a whole number"),
        (["-p", "arms", "[" * 3000], "expected a list of texts such as [first, second]"),
        (["-p", "arms", "ünï"], "arms of 01_screening is 'ünï', expected a list of texts such as [first, second]"),
        (["-p", "seed", str(2**70)], "seed is 1180591620717411303424, expected a value less than or equal to"),
        (["-p", "seeds", "[-1, 2, 3]"], "confirmation.seeds.0 is -1, expected a value greater than or equal to 0"),
        (["-p", "seed", "[]"], "parameter seed of 00_pair is [], expected a whole number such as 40"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_value_that_the_profile_cannot_have_is_refused_before_anything_starts(
    kvlib, tmp_path, monkeypatch, given, sentence
):
    monkeypatch.setattr(execution, "run_notebook", None)  # none may be reached
    status, _, err = kvlib("run", "--profile", "smoke", *given)
    assert status == 2 and err.count("\n") == 1
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_what_earlier_commands_gave_is_named_where_it_does_not_fit(kvlib, tmp_path):
    Run.open("smoke", results=tmp_path / "results", overrides={"training.steps": 6})
    status, _, err = kvlib("run", "--profile", "smoke", "-p", "checkpoints", "[8]")
    assert status == 2
    assert "earlier commands gave training.steps 6, which --reset forgets" in err


def test_a_refused_start_leaves_nothing(kvlib, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise KvlibError("no network given, expected one: connect")

    monkeypatch.setattr(cli, "_fetch", refused)
    assert kvlib("run", "--profile", "smoke")[0] == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "results" / "smoke").mkdir(parents=True)  # what was there before stays
    assert kvlib("run", "--profile", "smoke")[0] == 2
    assert (tmp_path / "results" / "smoke").is_dir()


@pytest.mark.parametrize("name", [*list(execution.scripts())[1:4], "evidence"])
def test_a_notebook_whose_predecessor_has_not_run_is_refused_before_it_starts(
    kvlib, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(execution, "run_notebook", None)
    status, _, err = kvlib("run", name, "--profile", "smoke")
    assert status == 2 and "which has not been run: run `python -m kvlib run 0" in err
    assert list(tmp_path.iterdir()) == []


def test_the_trace_is_shown_when_asked_for(kvlib):
    status, _, err = kvlib("status", "nowhere", "--trace")
    assert status == 2
    assert "Traceback" in err and "there is no run 'nowhere'" in err


def test_a_stage_whose_predecessor_is_missing_names_the_command(kvlib):
    status, _, err = kvlib("run", "01_screening", "--profile", "smoke")
    assert status == 2
    assert "python -m kvlib run 00_pair --profile smoke --run smoke" in err


@pytest.mark.parametrize(
    "name", [" ", "new\nline", "a b", "-x", "\udcff", "é", "a" * 101, "a/b", ".hidden", "x;y"]
)
def test_a_run_takes_only_a_name_that_any_file_system_and_shell_takes(kvlib, tmp_path, name):
    for command in (["run", "--profile", "smoke", "--run", name], ["status", "--", name]):
        status, out, err = kvlib(*command)
        assert status == 2 and not out and err.count("\n") == 1
        assert "expected a plain folder name such as 'laptop': letters, digits" in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_there_keeps_a_name_that_no_new_one_would_get(kvlib, tmp_path):
    made = Run.open("smoke", "mine", results=tmp_path / "results")
    made.folder.rename(tmp_path / "results" / "my run")
    assert kvlib("status", "my run")[0] == 0
    assert kvlib("clean", "my run", "--yes")[0] == 0


def test_a_file_in_the_place_of_a_run_is_said_to_be_one(kvlib, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine").write_text("a note")
    status, _, err = kvlib("run", "--profile", "smoke", "--run", "mine")
    assert status == 2
    assert "is a file, expected a run's folder or a name that is free: choose another" in err


def test_a_script_that_is_no_python_is_named_with_its_line(kvlib, tmp_path, monkeypatch):
    shutil.copytree(names.SCRIPTS, tmp_path / "notebooks")
    monkeypatch.setattr(names, "SCRIPTS", tmp_path / "notebooks")
    script = tmp_path / "notebooks" / "04_latency.py"
    lines = len(script.read_text().splitlines())
    script.write_text(script.read_text() + "x = (\n")
    status, _, err = kvlib("params", "04_latency", "--profile", "smoke")
    assert status == 2 and err.count("\n") == 1
    assert f"notebook script {script}, line {lines + 1} is no Python ('(' was never closed)" in err
