"""The evidence stage on the smoke profile: records that agree, kills that cost nothing, a freeze left alone."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from kvlib import KvlibError, cli
from kvlib.study import execution, learning
from kvlib.study.evidence import learning as curves
from kvlib.study.evidence import lengths, run_evidence, stage
from kvlib.study.evidence.learning import first_windows, frozen_arm, train_on
from kvlib.study.evidence.stage import summarise_tables
from kvlib.study.freezing import check_manifest, ledger, openings, profile_hash
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.records import read_json, read_lines, read_table, write_json
from kvlib.study.run import EXTRA, OUTPUTS, STAGES
from kvlib.study.scoring import Scorer
from kvlib.study.screening import prepare
from kvlib.study.stages import open_run, run_frozen_evaluation
from kvlib.terminal import run_app

SCRIPT = """
import sys
from kvlib.study.stages import open_run, run_confirmation, run_frozen_evaluation, run_pair, run_screening
run = open_run("smoke", results=sys.argv[1])
for stage in (run_pair, run_screening, run_confirmation, run_frozen_evaluation):
    stage(run)
"""
TABLES = [name.removesuffix(".parquet") for name in OUTPUTS["evidence"]]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The results folder of a run up to its final evaluation."""
    folder = tmp_path_factory.mktemp("evaluated")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(evaluated, tmp_path_factory):
    """The same run with its evidence, undisturbed."""
    folder, threads = tmp_path_factory.mktemp("whole"), torch.get_num_threads()
    torch.set_num_threads(1)
    shutil.copytree(evaluated / "smoke", folder / "smoke")
    run_evidence(open_run("smoke", results=folder))
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def run(evaluated, tmp_path):
    """A copy of the evaluated run without any evidence."""
    shutil.copytree(evaluated / "smoke", tmp_path / "smoke")
    return open_run("smoke", results=tmp_path)


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the run with its evidence."""
    shutil.copytree(whole / "smoke", tmp_path / "smoke")
    return open_run("smoke", results=tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def summary_of(run) -> dict:
    return read_json(run.stage("evidence") / "summary.json")


def test_the_summary_is_what_the_tables_give(finished):
    summary = summary_of(finished)
    again = summarise_tables(finished, summary["learning"]["windows"])
    assert {key: summary[key] for key in again} == again
    settings, layers = (
        finished.profile.evidence,
        read_json(finished.stage("pair") / "summary.json")["target"]["layers"],
    )
    assert [e["prefix_tokens"] for e in summary["lengths"]] == settings.prefix_tokens
    assert [e["prompts"] for e in summary["lengths"]] == settings.prompts
    assert [e["windows"] for e in summary["learning"]["windows"]] == settings.windows
    assert [e["step"] for e in summary["learning"]["steps"]] == settings.steps
    assert len(summary["ablation"]["off"]) == len(summary["ablation"]["only"]) == layers
    frozen = read_json(finished.stage("confirmation") / "summary.json")
    assert summary["frozen"] == frozen["manifest_hash"] and summary["arm"] == frozen["frozen"]["arm"]
    assert summary["training_prefix_tokens"] == [8, 56]
    final = read_json(finished.stage("frozen_evaluation") / "summary.json")["forcing"]["oracle"]
    assert summary["power"]["effect"] == pytest.approx(final["paired"]["learned-direct"]["mean"])
    assert summary["power"]["prompts"] == finished.profile.partitions.final.items


def test_the_same_maps_score_as_they_did_in_the_confirmation(finished):
    summary, confirmation = summary_of(finished), read_json(finished.stage("confirmation") / "summary.json")
    for path in ("direct", "ridge"):
        assert summary["learning"][path] == confirmation[path]
    frozen = confirmation["frozen"]
    arm = next(arm for arm in confirmation["arms"] if arm["id"] == frozen["arm"])
    seed = next(entry for entry in arm["runs"] if entry["seed"] == frozen["seed"])
    full = summary["ablation"]["full"]
    assert full["kl32"] == pytest.approx(seed["kl32"], rel=1e-9)
    at_freeze = next(e for e in summary["learning"]["steps"] if e["step"] == frozen["checkpoint_step"])
    assert at_freeze["kl32"] == pytest.approx(full["kl32"], rel=1e-9)
    assert summary["learning"]["windows"][-1]["kl32"] == summary["learning"]["steps"][-1]["kl32"]


def test_tables_have_the_columns_and_rows_that_were_agreed(finished):
    pair = read_json(finished.stage("pair") / "summary.json")["target"]
    layers, heads = pair["layers"], pair["kv_heads"]
    tables = {name: read_table(finished.stage("evidence") / f"{name}.parquet") for name in TABLES}
    prompts = finished.profile.partitions.confirm_validate.items
    assert list(tables["lengths"].columns) == [
        "prefix_tokens",
        "path",
        "prompt",
        "article",
        "kl32",
        "top1",
        "text",
    ]
    assert len(tables["lengths"]) == 3 * sum(finished.profile.evidence.prompts)
    assert tables["lengths"]["text"].str.len().between(1, 200).all()
    assert list(tables["learning"].columns) == ["axis", "value", "prompt", "kl32", "top1"]
    assert len(tables["learning"]) == (2 + 2 + 3) * prompts
    assert list(tables["ablation"].columns) == ["which", "layer", "prompt", "kl32", "top1"]
    assert len(tables["ablation"]) == (3 + 2 * layers) * prompts
    assert list(tables["singular_values"].columns) == ["layer", "head", "kind", "index", "value"]
    rank = tables["singular_values"]["index"].max() + 1
    assert len(tables["singular_values"]) == layers * heads * 2 * rank
    assert list(tables["size"].columns) == ["layer", "kind", "cache_rms", "correction_rms", "ratio"]
    assert len(tables["size"]) == 2 * layers and (tables["size"]["ratio"] > 0).all()
    assert list(tables["ridge"].columns) == ["layer", "kind", "path", "r2", "cosine"]
    assert len(tables["ridge"]) == 3 * 3 * layers
    r2 = tables["ridge"][tables["ridge"]["kind"] != "attention"].pivot_table(index="path", values="r2")
    assert r2.loc["ridge", "r2"] > r2.loc["direct", "r2"]  # least squares, on prompts it was not fitted on


def test_the_final_articles_are_read_again_once_and_it_is_said(finished):
    lines = read_lines(ledger(finished))
    assert [line.get("purpose") for line in lines] == [None, "evidence"]
    assert len(openings(finished)) == 1 and len(openings(finished, "evidence")) == 1
    assert openings(finished, "evidence")[0]["manifest"] == summary_of(finished)["frozen"]
    titles = set(read_table(finished.stage("evidence") / "lengths.parquet")["article"])
    partitions = read_json(finished.stage("pair") / "partitions.json")["partitions"]
    assert titles <= {article["title"] for article in partitions["final"]["articles"]}


def test_earlier_stages_are_left_as_they_were(evaluated, finished):
    for name in STAGES[:4]:
        before, after = (contents(place / name) for place in (evaluated / "smoke", finished.folder))
        before.pop("ledger.jsonl", None), after.pop("ledger.jsonl", None)
        assert before == after
    assert all(finished.finished(name) for name in STAGES[:4])
    assert check_manifest(finished)


def test_found_finished_it_does_nothing(finished):
    before = {p: p.stat().st_mtime_ns for p in finished.folder.rglob("*") if p.is_file()}
    run_evidence(finished)
    assert before == {p: p.stat().st_mtime_ns for p in finished.folder.rglob("*") if p.is_file()}


def test_a_lost_summary_is_made_from_the_records_alone(finished, monkeypatch):
    whole = summary_of(finished)
    for path in finished.stage("evidence").glob("*.*"):
        path.unlink()
    never = lambda *_, **__: pytest.fail("something was computed again")
    monkeypatch.setattr(learning, "train", never)
    monkeypatch.setattr(Scorer, "table", never)
    monkeypatch.setattr(lengths, "score_batch", never)
    monkeypatch.setattr(stage, "measure_quality", never)
    run_evidence(finished)
    assert summary_of(finished) == whole


class Killed(BaseException):
    pass


def test_killed_again_and_again_it_ends_with_the_same_records(run, whole, monkeypatch):
    """Every life ends at its third piece of new work, wherever that falls; what was finished is not done again."""
    done, lives = [], 0

    def dying(function, name):
        def work(*arguments, **settings):
            if len(done) >= 3 * (lives + 1):
                raise Killed
            done.append(name)
            return function(*arguments, **settings)

        return work

    monkeypatch.setattr(Scorer, "table", dying(Scorer.table, "table"))
    monkeypatch.setattr(lengths, "score_batch", dying(lengths.score_batch, "length"))
    monkeypatch.setattr(learning, "train", dying(learning.train, "train"))
    monkeypatch.setattr(stage, "measure_quality", dying(stage.measure_quality, "quality"))
    while True:
        try:
            run_evidence(run)
            break
        except Killed:
            lives += 1
            assert lives < 20 and not (run.stage("evidence") / "summary.json").exists()
    undisturbed = open_run("smoke", results=whole)
    assert lives >= 5
    # five batches of lengths, two trainings, 2 + 1 + 3 scored maps, nine ablations, one comparison: each once
    assert [done.count(name) for name in ("length", "train", "table", "quality")] == [5, 2, 15, 1]
    assert summary_of(run) == summary_of(undisturbed)
    for name in TABLES:
        pd.testing.assert_frame_equal(
            *(read_table(r.stage("evidence") / f"{name}.parquet") for r in (run, undisturbed))
        )
    assert len(openings(run, "evidence")) == 1


def prepared(run):
    return prepare(run, "confirm", read_json(run.stage("pair") / "summary.json"), Progress("test", 1))


def test_fewer_windows_are_the_first_of_the_same_ones(run, monkeypatch):
    trainer, _ = prepared(run)
    store = trainer.store
    small, large = store.first(3), store.first(7)
    assert torch.equal(small.windows, store.windows[:3]) and torch.equal(large.windows[:3], small.windows)
    ours, theirs = (
        small.batch([2, 0], [20, 30], 8, with_target=True),
        store.batch([2, 0], [20, 30], 8, with_target=True),
    )
    assert all(torch.equal(a, b) for a, b in zip(ours.source.rows, theirs.source.rows))
    assert torch.equal(ours.hidden, theirs.hidden)
    direct = [
        k.double().pow(2).mean((0, 2, 3)).sqrt() for k in (store.source[:3, layer, 0] for layer in range(3))
    ]
    torch.testing.assert_close(small.source_scale()[0].double(), torch.stack(direct), rtol=1e-6, atol=0)
    for count in (0, 13):
        with pytest.raises(KvlibError, match="ask for 1 to 12"):
            store.first(count)

    # A training on three windows never looks at another.
    seen = []
    monkeypatch.setattr(type(store), "batch", spying(type(store).batch, seen))
    frozen = read_json(run.stage("confirmation") / "summary.json")["frozen"]
    arm = frozen_arm(run, frozen["arm"])
    part = first_windows(trainer, arm, 3, [12], run.stage("evidence") / "arms")
    train_on(part, trainer, Task(arm, frozen["seed"], 12), 3, Progress("test", 12), "three")
    assert seen and {n for chosen in seen for n in chosen} == {0, 1, 2}


def spying(function, seen):
    def batch(self, chosen, *arguments, **settings):
        seen.append(chosen)
        return function(self, chosen, *arguments, **settings)

    return batch


def test_what_a_training_on_all_windows_gives_is_what_the_confirmation_kept(run):
    trainer, _ = prepared(run)
    frozen = read_json(run.stage("confirmation") / "summary.json")["frozen"]
    arm, step = frozen_arm(run, frozen["arm"]), frozen["checkpoint_step"]
    part = first_windows(trainer, arm, 12, [step], run.stage("evidence") / "arms")
    task = Task(arm, frozen["seed"], step)
    train_on(part, trainer, task, 12, Progress("test", step), "all")
    ours, theirs = part.load(task, step).tensors(), trainer.load(task, step).tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_training_that_diverges_leaves_nulls_and_the_stage_goes_on(run, monkeypatch):
    whole_training = learning.train

    def broken(*arguments, **settings):
        for step in whole_training(*arguments, **settings):
            yield (
                step.__class__(step.number, step.phase, float("nan"), step.map) if step.number == 6 else step
            )
            if step.number == 6:
                return

    monkeypatch.setattr(learning, "train", broken)
    found = run_evidence(run)["learning"]
    assert found["windows"][0]["kl32"] is None and "stopped being finite" in found["windows"][0]["note"]
    assert found["windows"][1]["kl32"] is not None  # of the confirmation stage, before the breakage
    assert run.finished("evidence")


def test_short_articles_give_fewer_prompts_and_none_is_an_entry_too(run):
    settings = {"evidence.prefix_tokens": [8, 300, 590], "evidence.prompts": [3, 50, 4]}
    changed = open_run("smoke", results=run.folder.parent, **settings)
    found = run_evidence(changed)["lengths"]
    assert [entry["prompts"] for entry in found][0] == 3 and 0 < found[1]["prompts"] < 50
    assert found[1]["articles"] <= found[1]["prompts"] and found[2]["prompts"] == 0
    assert found[2]["paths"]["learned"]["kl32"]["mean"] is None


def test_lengths_beyond_the_models_positions_are_refused_before_anything_is_read(run):
    settings = {"evidence.prefix_tokens": [8, 593], "evidence.prompts": [3, 3]}
    changed = open_run("smoke", results=run.folder.parent, **settings)
    with pytest.raises(KvlibError, match="holds 593, which is 601 positions .* lower it to 592 at most"):
        run_evidence(changed)
    assert openings(run, "evidence") == []


def test_counts_that_a_run_does_not_have_are_left_out(run):
    settings = {"evidence.windows": [5, 40], "evidence.steps": [2, 100]}
    changed = open_run("smoke", results=run.folder.parent, **settings)
    assert curves.window_counts(changed) == [5, 12] and curves.step_counts(changed) == [2, 12]


def test_its_settings_touch_no_other_stage(finished):
    changed = open_run("smoke", results=finished.folder.parent, **{"evidence.prompts": [2, 2]})
    assert all(changed.finished(name) for name in STAGES[:4]) and changed.finished("evidence") is None
    assert profile_hash(changed) == profile_hash(finished)
    assert run_frozen_evaluation(changed)["opened"] == 1


def test_it_needs_the_final_evaluation_of_the_map_that_is_frozen(run):
    path = run.stage("frozen_evaluation") / "summary.json"
    whole = read_json(path)
    write_json(path, {**whole, "frozen": "0" * 64})
    with pytest.raises(
        KvlibError, match="is of manifest 000000000000, the frozen one is .*03_frozen_evaluation"
    ):
        run_evidence(run)
    path.unlink()
    with pytest.raises(KvlibError, match="stage evidence of run smoke needs stage frozen_evaluation"):
        run_evidence(run)
    assert not (run.stage("evidence") / "lengths.parquet").exists()


@pytest.mark.parametrize("name", ["learned", "ridge"])
def test_another_map_than_the_frozen_one_is_refused(run, name):
    path = run.stage("confirmation") / f"{name}.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(KvlibError, match=f"{name}.safetensors is not the map that was frozen"):
        run_evidence(run)


def test_the_ordinary_run_leaves_its_notebook_out_and_its_name_finds_it():
    assert set(EXTRA) == {"evidence"} and "evidence" not in execution.scripts()
    script = execution.script_of("evidence")
    assert script.stem == "evidence" and script.exists() and not script.stem[0].isdigit()


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs a command in this process with `tmp_path` as home, the book left out; gives (status, all that was said)."""
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "_build", lambda run, note="": print(f"the book of {run} would be built"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as left:
            run_app(cli.app, list(arguments))
        said = capsys.readouterr()
        return left.value.code or 0, said.out + said.err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_runs_the_notebook_once_then_builds_the_book(evaluated, command, tmp_path):
    home = tmp_path / "results" / "smoke"
    shutil.copytree(evaluated / "smoke", home)
    status, said = command("evidence", "smoke", "--no-attacks")
    assert status == 0 and "[evidence]: done in" in said
    assert "enters the book when the run is finished" in said  # there is no latency stage here
    notebook, summary = home / "notebooks" / "evidence.ipynb", home / "evidence" / "summary.json"
    assert notebook.exists() and summary.exists()
    again = command("evidence", "--profile", "smoke", "--no-attacks")[1]
    assert "nothing has changed since it was run" in again
    assert "evidence" in command("status", "smoke")[1]
    write_json(summary, {**read_json(summary), "label": "edited"})
    assert "done in" in command("evidence", "smoke", "--no-attacks")[1]


def test_the_command_refuses_a_run_that_is_not_there_or_not_far_enough(evaluated, command, tmp_path):
    status, said = command("evidence", "nothing")
    assert status == 2 and "there is no run 'nothing'" in said
    home = tmp_path / "results" / "smoke"
    shutil.copytree(evaluated / "smoke", home, ignore=shutil.ignore_patterns("frozen_evaluation"))
    status, said = command("evidence", "smoke")
    assert status == 2 and "needs stage frozen_evaluation, which has not been run" in said
