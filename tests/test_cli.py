"""The command line: what it lists, and that every mistake is one sentence and exit status 2."""

import json
import re
from pathlib import Path

import jupytext
import pytest
from papermill import inspect_notebook

from kvlib import cli
from kvlib.errors import KvlibError
from kvlib.options import DEFAULT_PROFILE
from kvlib.study import execution
from kvlib.study.arms import all_arms
from kvlib.study.parameters import (
    check_parameters,
    parse_value,
    profile_keys,
    script_parameters,
    values_by_script,
)
from kvlib.study.profile import load_profile, profile_names
from kvlib.study.run import EXTRA, STAGES, Run

ROOT = Path(__file__).resolve().parents[1]


def test_profiles_are_listed_with_what_they_are(kvlib):
    status, out, _ = kvlib("profiles")
    assert status == 0
    for name in profile_names():
        assert load_profile(name).label in out


def test_arms_are_the_twenty_of_the_profile(kvlib):
    status, out, _ = kvlib("arms", "--profile", "laptop")
    listed = [line.split()[0] for line in out.splitlines()[1:]]
    assert status == 0
    assert listed == [arm.id for arm in all_arms(load_profile("laptop").screening)]
    assert len(set(listed)) == 20


def test_params_says_what_the_parameters_cell_says(kvlib):
    status, out, _ = kvlib("params", "01_screening")
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}
    assert status == 0
    known = script_parameters(execution.script_of("01_screening"))
    assert list(rows) == list(known)
    for name, parameter in known.items():
        assert parameter.meaning and rows[name].endswith(parameter.meaning)


def test_the_defaults_that_params_shows_are_the_profiles(kvlib):
    for profile in ("laptop", "smoke"):
        _, out, _ = kvlib("params", "01_screening", "--profile", profile)
        rows = {line.split()[0]: line for line in out.splitlines()[1:]}
        screening, training = load_profile(profile).screening, load_profile(profile).training
        assert f" {training.steps} " in rows["steps"]
        assert f" {screening.ranks} " in rows["rank_slice"]
        assert f" {screening.scales} " in rows["scales"]
        assert f" {profile} " in rows["profile"] and f" {profile} " in rows["run"]
        assert " null " in rows["arms"]


def test_every_parameter_but_a_few_is_a_setting_of_the_profile():
    every = {script.stem: script for script in execution.scripts().values()} | execution.extra_scripts()
    for name, script in every.items():
        own = {"profile", "run", "results", "gpu_results", "seed", "cards", "planned"}
        assert set(script_parameters(script)) - own == set(profile_keys(script)) - own, name


def shown_defaults() -> list[tuple[str, object, str]]:
    """(command and option, the real default, what --help shows for it) of whatever shows one."""
    import typer

    from kvlib.cli import app

    found = []
    for name, command in typer.main.get_command(app).commands.items():
        context = typer.Context(command)
        for parameter in command.params:
            record = parameter.get_help_record(context) if hasattr(parameter, "get_help_record") else None
            shown = re.search(r"default: ([^;\]]+)", " ".join(record)) if record else None
            if shown:
                found.append((f"{name} {parameter.name}", parameter.default, shown.group(1)))
    return found


def test_every_default_that_help_shows_is_the_real_one():
    found = shown_defaults()
    assert {"notebooks out", "evidence attacks"} <= {where for where, _, _ in found}
    for where, default, shown in found:
        real = default() if callable(default) else default
        name = where.split()[-1]
        assert shown in ((name if real else f"no-{name}",) if isinstance(real, bool) else (str(real),)), where


@pytest.mark.parametrize("command", [("arms",), ("params", "01_screening")])
def test_the_profile_that_help_names_is_taken_when_none_is_given(kvlib, command):
    assert kvlib(*command) == kvlib(*command, "--profile", DEFAULT_PROFILE)
    assert f"else {DEFAULT_PROFILE}" in kvlib(*command, "--help")[1].replace("\n", " ").replace("  ", " ")
    makefile = (ROOT / "Makefile").read_text()
    assert f"PROFILE ?= {DEFAULT_PROFILE}\n" in makefile


def test_the_example_of_two_ranks_and_fewer_steps_is_taken(tmp_path):
    script = execution.script_of("01_screening")
    values = values_by_script([script], {"rank_slice": "[4,8]", "steps": "40"})[script]
    keys = profile_keys(script)
    settings = load_profile("laptop", {keys[name]: value for name, value in values.items()})
    arms = all_arms(settings.screening)
    assert (settings.training.steps, {arm.rank for arm in arms}) == (40, {4, 8})
    assert max(settings.screening.checkpoints) == 40


@pytest.mark.parametrize(
    "script", [*execution.scripts().values(), *execution.extra_scripts().values()], ids=lambda path: path.stem
)
def test_every_parameter_of_a_notebook_is_seen_by_papermill_and_explained(script):
    source = next(c.source for c in jupytext.read(script).cells if "parameters" in c.metadata.get("tags", []))
    assigned = [line.split("=")[0].split(":")[0].strip() for line in source.splitlines() if "=" in line]
    known = script_parameters(script)
    assert list(known) == assigned
    assert {"profile", "run"} <= known.keys()
    assert all(parameter.meaning for parameter in known.values())


def test_notebooks_keep_their_tags_on_the_way_out(kvlib, tmp_path):
    status, out, _ = kvlib("notebooks", str(tmp_path / "out"))
    assert status == 0
    written = [Path(line) for line in out.splitlines()]
    assert [path.stem for path in written] == [*execution.scripts(), *execution.extra_scripts()]
    for path in written:
        assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"
        assert list(inspect_notebook(path)) == list(script_parameters(execution.script_of(path.stem)))


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


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("40", "int", 40),
        ("1e-3", "float", 0.001),
        ("true", "bool", True),
        ("null", "any", None),
        ("[4, 8]", "any", [4, 8]),
        ("[oracle, text]", "any", ["oracle", "text"]),
        ("laptop", "any", "laptop"),
        ("2026", "str", "2026"),
    ],
)
def test_values_mean_what_they_look_like(text, kind, value):
    assert parse_value(text, kind) == value


@pytest.fixture
def typed(tmp_path) -> Path:
    path = tmp_path / "00_typed.py"
    path.write_text(
        '# %% tags=["parameters"]\n'
        "steps = None  # type: int training steps\n"
        "rate = 0.1  # the learning rate\n"
        "ranks = [4, 8]  # the ranks\n"
        "scales = None  # type: list[float] the scales\n"
        "quiet: bool = False  # whether to say less\n"
    )
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 4), ("steps", None), ("rate", 1), ("ranks", [1]), ("scales", [0.5, 1]), ("quiet", True)],
)
def test_a_value_that_fits_is_taken(typed, name, value):
    assert check_parameters(typed, {name: value}, script_parameters(typed)) == {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 4.5), ("steps", True), ("steps", "many"), ("rate", "fast"), ("rate", float("nan")),
        ("rate", None), ("ranks", [4.5]), ("ranks", 4), ("scales", ["a"]), ("quiet", 1),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(typed, name, value):
    with pytest.raises(KvlibError, match=f"parameter {name} of 00_typed is .*expected"):
        check_parameters(typed, {name: value}, script_parameters(typed))


def test_the_status_of_a_finished_run_is_all_done(kvlib, smoke_run, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(smoke_run.home))
    status, out, _ = kvlib("status", "smoke")
    assert status == 0
    assert len([line for line in out.splitlines() if " done " in line]) == len(STAGES) + len(EXTRA)
    assert "nothing running" in out


def test_a_run_again_changes_nothing_and_takes_seconds(kvlib, smoke_run, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(smoke_run.home))
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in smoke_run.folder.rglob("*") if p.is_file()}
    status, out, err = kvlib("run", "--profile", "smoke")
    after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in smoke_run.folder.rglob("*") if p.is_file()}
    locks = {smoke_run.folder / ".lock", smoke_run.folder / ".kernel.lock"}
    assert status == 0
    assert err.count("nothing has changed since it was") == len(execution.scripts()) + 1
    assert {p for p in after if after[p] != before.get(p)} <= locks and before.keys() <= after.keys()
    assert out.startswith("The book is ready: open ")


def test_the_last_line_says_where_the_book_is(smoke_run):
    assert smoke_run.output.rstrip().splitlines()[-1].startswith("The book is ready: open ")
    assert (smoke_run.book / "index.html").exists()
