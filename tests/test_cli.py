"""The command line: what it lists, the parameters that it takes, and a run again."""

import json
import re
from pathlib import Path

import jupytext
import pytest
from papermill import inspect_notebook

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
from kvlib.study.run import EXTRA, STAGES

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
        ("1:30", "int", "1:30"),  # YAML 1.1 read 90
        ("010", "int", "010"),  # and 8
        ("0x10", "int", "0x10"),
        ("1_000", "int", "1_000"),
        ("2024-01-01", "any", "2024-01-01"),
        ("yes", "bool", "yes"),
        ("[.5, +3, True, ~, 08]", "any", [0.5, 3, True, None, "08"]),
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
