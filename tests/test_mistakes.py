"""Every mistake on the command line is one sentence and exit status 2, said before anything starts, and leaves nothing."""

import pytest

from kvlib import cli
from kvlib.errors import KvlibError
from kvlib.study import execution
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
