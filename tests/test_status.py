"""What `status` says of a run: done, running, left, the time it takes, and what is out of date and why."""

import json
import time

import pytest

from kvlib.errors import KvlibError
from kvlib.study.execution import inputs_key, records_key, script_of
from kvlib.study.pages import page_state
from kvlib.study.records import run_lock
from kvlib.study.run import OUTPUTS, STAGES, Run
from kvlib.study.standing import BEGUN, DAMAGED, DONE, STALE, TO_DO, changes, same_elsewhere, standing


def open_run(home, name="mine", **overrides) -> Run:
    return Run.open("smoke", name, results=home / "results", overrides=overrides)


def finish(run: Run, stage: str, seconds: float = 0.0, **found) -> None:
    folder = run.stage(stage)
    folder.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS[stage]:
        (folder / name).write_text("{}")
    run.publish(stage, found, time.time() - seconds)


def test_a_stage_is_to_do_then_begun_then_done(tmp_path):
    run = open_run(tmp_path)
    assert standing(run, "pair").state == TO_DO
    run.stage("pair").mkdir(parents=True)
    run.add_time("pair", time.time() - 40)
    assert (standing(run, "pair").state, round(standing(run, "pair").seconds)) == (BEGUN, 40)
    finish(run, "pair")
    assert (standing(run, "pair").state, round(standing(run, "pair").seconds)) == (DONE, 40)


def test_a_stage_made_with_other_settings_names_what_was_changed(tmp_path):
    finish(open_run(tmp_path), "pair")
    found = standing(open_run(tmp_path, **{"prompt.prefix_tokens": 20}), "pair")
    assert (found.state, found.why) == (STALE, "prompt.prefix_tokens was 24, is 20")


def test_a_measurement_of_another_frozen_map_is_out_of_date(tmp_path):
    run = open_run(tmp_path)
    finish(run, "confirmation", manifest_hash="new")
    finish(run, "frozen_evaluation", frozen="old")
    finish(run, "latency", frozen="new")
    assert standing(run, "frozen_evaluation").why == "it measured another frozen map"
    assert standing(run, "latency").state == DONE


def test_a_lost_record_is_said(tmp_path):
    run = open_run(tmp_path)
    finish(run, "pair")
    (run.stage("pair") / "partitions.json").unlink()
    found = standing(run, "pair")
    assert (found.state, found.why) == (DAMAGED, "partitions.json is missing")


def test_a_swapped_file_is_said_and_its_stage_does_not_count_as_finished(tmp_path):
    run = open_run(tmp_path)
    finish(run, "confirmation", manifest_hash="m")
    path = run.stage("confirmation") / "learned.safetensors"
    path.write_text("another map")
    found = standing(run, "confirmation")
    assert (found.state, found.why) == (
        DAMAGED,
        f"{path.name} is not the file that its summary was written with",
    )
    with pytest.raises(KvlibError, match=f"{path} is not the file .*: restore it, or delete it and run"):
        run.finished("confirmation")


def test_a_swapped_file_makes_its_notebook_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    run = open_run(tmp_path)
    finish(run, "confirmation", manifest_hash="m")
    before = records_key("02_confirmation", "mine")
    (run.stage("confirmation") / "learned.safetensors").write_text("another map")
    assert records_key("02_confirmation", "mine") != before


def test_a_page_says_of_a_record_that_is_gone_that_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    run, script = open_run(tmp_path), script_of("00_pair")
    finish(run, "pair")
    kept = {"inputs": inputs_key(script, {}), "records": records_key("00_pair", "mine")}
    (run.folder / "notebooks").mkdir()
    page = {"metadata": {"kvlib": kept, "papermill": {"parameters": {}}}}
    (run.folder / "notebooks" / "00_pair.ipynb").write_text(json.dumps(page))
    assert page_state("mine", "00_pair") == "up to date"
    (run.stage("pair") / "made.json").unlink()
    assert page_state("mine", "00_pair") == "pair/made.json is missing"


@pytest.mark.parametrize("command", ["book", "pdf"])
def test_a_run_that_is_not_finished_has_no_book(kvlib, tmp_path, monkeypatch, command):
    monkeypatch.setattr("kvlib.report.pdf.build_pdf", None)  # neither may be reached
    monkeypatch.setattr("kvlib.report.freshness.build_if_stale", None)
    run = open_run(tmp_path)
    finish(run, "confirmation", manifest_hash="m")
    for stage in STAGES:
        if stage not in ("confirmation", "latency"):
            finish(run, stage, frozen="m")
    status, _, err = kvlib(command, "mine")
    assert status == 2 and err.count("\n") == 1
    assert "run mine is not finished (04_latency is to do), expected every stage to be done" in err
    finish(run, "latency", frozen="m")
    (run.stage("latency") / "raw.parquet").unlink()
    assert "04_latency is damaged: raw.parquet is missing" in kvlib(command, "mine")[2]


def test_a_book_of_other_settings_says_so(kvlib, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlib.report.freshness.build_if_stale", lambda folder: (folder / "index.html", True))
    run = open_run(tmp_path)
    finish(run, "confirmation", manifest_hash="m")
    for stage in STAGES:
        if stage != "confirmation":
            finish(run, stage, frozen="m")
    assert "out of date" not in kvlib("book", "mine")[2]
    open_run(tmp_path, **{"latency.memory": False})
    status, _, err = kvlib("book", "mine")
    assert status == 0
    assert "in the book as it was: 04_latency: latency.memory was True, is False" in err


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        (None, "made with other settings, which its record does not name"),
        ({"a": {"b": 1}, "c": 2}, "a.b was 1, is 3"),
        ({"a": {"b": 3}, "c": 2, "d": 4}, "d was 4, is not there"),
        (
            {"a": 1, "e": 0, "f": 0, "g": 0},
            "a was 1, is not there; e was 0, is not there; f was 0, is not there; 3 more",
        ),
    ],
)
def test_changes_name_the_first_few_settings(before, sentence):
    assert changes(before, {"a": {"b": 3}, "c": 2}) == sentence


def test_the_time_of_a_stage_that_is_to_do_comes_from_a_run_with_the_same_settings(tmp_path):
    finish(open_run(tmp_path, "first"), "pair", seconds=100)
    name, seconds = same_elsewhere(open_run(tmp_path, "second"), "pair")
    assert (name, round(seconds)) == ("first", 100)
    assert same_elsewhere(open_run(tmp_path, "third", **{"prompt.prefix_tokens": 20}), "pair") is None


def test_status_prints_what_is_left_and_why(kvlib, tmp_path):
    finish(open_run(tmp_path, "other", **{"prompt.prefix_tokens": 20}), "pair", seconds=100)
    finish(open_run(tmp_path), "pair", seconds=100)
    open_run(tmp_path, **{"prompt.prefix_tokens": 20})
    status, out, _ = kvlib("status", "mine")
    assert status == 0
    assert "parameters: prompt.prefix_tokens = 20" in out
    assert "out of date: 00_pair: prompt.prefix_tokens was 24, is 20" in out
    assert "done: 0 of 5 stages" in out and "left: 00_pair, 01_screening" in out
    assert "book: none" in out


def test_status_of_a_run_at_work_says_how_far_it_is(kvlib, tmp_path):
    run = open_run(tmp_path)
    scratch = run.folder / "notebooks" / ".partial-1"
    scratch.mkdir(parents=True)
    now = time.time()
    state = {
        "stage": "screening",
        "total": 100,
        "done": 40,
        "initial": 0,
        "started": now - 400,
        "updated": now,
    }
    (scratch / "progress.json").write_text(json.dumps(state | {"note": "arm 8 of 20"}))
    with run_lock(run.folder):
        _, out, _ = kvlib("status", "mine")
    assert "running: screening, 40 %, about 10 min left, arm 8 of 20" in out
