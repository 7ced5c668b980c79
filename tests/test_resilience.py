"""Runs that are killed, crowded or short of disk end with the records of an undisturbed one; locks; nothing trained twice."""

import multiprocessing
import shutil

import pytest

from kvlib import KvlibError
from kvlib.study import resilience
from kvlib.study.moments import CROWDED, FULL, KILLED, KILLED_FETCHING
from kvlib.study.records import RUN_RECORD, stage_lock, write_json
from kvlib.study.resilience import KINDS, attack, not_whole, quality_records
from kvlib.study.sabotage import FileLimit, Life, Moment, Started
from kvlib.study.stages import open_run, run_pair

KINDS_OF_KILLS = [kind for kind in KINDS if kind.startswith("killed")]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """Every attack, once, by its name; and the folder in which the undisturbed run lies."""
    folder = tmp_path_factory.mktemp("attacked")
    return {record["attack"]: record for record in attack(folder)}, folder


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happens_to_a_run_it_ends_with_the_same_records(attacked, kind):
    record = attacked[0][kind]
    assert record["held"], record["outcome"]
    assert set(record) == {"attack", "moment", "times", "outcome", "held", "seconds"}


def test_the_attacks_are_many_and_everywhere(attacked):
    records = attacked[0]
    assert sum(records[kind]["times"] for kind in KINDS_OF_KILLS) >= 40
    assert records["disk full"]["times"] == len(FULL) >= 6 and records["started twice at once"]["times"] == 4
    whens = {moment.when for moments in (*KILLED.values(), KILLED_FETCHING) for moment in moments}
    assert whens == {"before", "half", "after"}
    assert {stages[-1] for stages, _ in [*FULL, *CROWDED]} == set(resilience.QUALITY)
    assert sum(isinstance(moment, FileLimit) for _, moment in FULL) >= 6


def test_the_records_compared_are_those_that_a_reader_reads(attacked):
    names = quality_records(attacked[1] / "undisturbed" / "results" / "smoke")
    for stage in resilience.QUALITY:
        assert f"{stage}/summary.json" in names
    assert {
        "confirmation/manifest.json",
        "confirmation/learned.safetensors",
        "pair/source/model.safetensors",
    } <= set(names)
    assert {"frozen_evaluation/steps.parquet", "screening/curves.parquet", "pair/partitions.json"} <= set(
        names
    )
    assert sum(name.endswith("step-00012.safetensors") for name in names) >= 20
    assert not any("windows-" in name or name.endswith((".lock", "trained.json")) for name in names)


def test_one_changed_number_is_another_record(attacked, tmp_path):
    shutil.copytree(attacked[1] / "undisturbed" / "results" / "smoke", tmp_path / "smoke")
    before = quality_records(tmp_path / "smoke")
    assert not_whole(tmp_path / "smoke") == []
    path = tmp_path / "smoke" / "screening" / "summary.json"
    path.write_text(path.read_text().replace('"windows": 12', '"windows": 13'))
    after = quality_records(tmp_path / "smoke")
    assert [name for name in before if before[name] != after[name]] == ["screening/summary.json"]
    assert [line.split(":")[0] for line in not_whole(tmp_path / "smoke")] == ["screening/summary.json"]


def test_a_step_after_an_arm_was_finished_is_seen(tmp_path):
    place = resilience._Place(tmp_path / "place")
    place.log.write_text("step a\nstep a\nstep b\nfinished a\nstep b\nfinished b\nfinished a\n")
    assert place.trained_again() == []
    place.log.write_text("step a\nfinished a\nstep b\nstep a\n")
    assert place.trained_again() == ["a"]


def test_an_attack_that_does_not_hold_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(resilience, "QUALITY", ("pair",))
    never = Moment("os.replace", "*/no-such-file")
    monkeypatch.setitem(KINDS, "killed nowhere", resilience._killed([never]))
    monkeypatch.setitem(
        KINDS, "spoilt", lambda place, records: resilience._repeated(place, {**records, "more": "0"})
    )
    nowhere, spoilt = attack(tmp_path, ["killed nowhere", "spoilt"])
    assert not nowhere["held"] and "never came: done" in nowhere["outcome"]
    assert not spoilt["held"] and spoilt["outcome"] == "other records: more"
    with pytest.raises(KvlibError, match="attack 'earthquake' given, expected some of run a second time"):
        attack(tmp_path, ["earthquake"])


def test_a_stage_begun_by_hand_is_refused_while_another_process_is_in_the_folder(tmp_path):
    run = open_run("smoke", results=tmp_path)
    with stage_lock(run.folder), pytest.raises(KvlibError, match="in use by another process: wait for it"):
        run_pair(run)
    assert not run.stage("pair").exists()


def test_two_starts_in_the_same_instant_leave_one_whole_run(attacked, tmp_path):
    records = quality_records(attacked[1] / "undisturbed" / "results" / "smoke")
    place = resilience._Place(tmp_path / "race")
    racers = [place.start(None, None) for _ in range(2)]
    lives = [racer.life() for racer in racers]
    assert {life.end for life in lives} <= {"done", "refused"} and any(
        life.end == "done" for life in lives
    ), lives
    assert place.end(records) is None


def test_a_disk_error_outside_of_any_record_is_one_sentence(tmp_path, monkeypatch):
    run = open_run("smoke", results=tmp_path)
    write_json(run.stage("pair") / "key.json", {"key": "of other settings"})
    write_json(run.stage("pair") / "pruning.json", {"made": "before"})

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(run.stage("pair")))

    monkeypatch.setattr(
        "kvlib.study.pairing.os.replace", refuse
    )  # the former pair is set aside: no record is written
    with pytest.raises(
        KvlibError, match=r"smoke/pair could not be read or written \(Permission denied\)"
    ) as refusal:
        run_pair(run)
    assert "\n" not in str(refusal.value)


def test_a_process_that_fails_is_told_from_one_that_was_killed(tmp_path):
    log = tmp_path / "log"
    assert (
        Started(("fetch", str(tmp_path), str(tmp_path / "none.yaml")), "kill", None, log).life().end
        == "refused"
    )
    assert Started(("no such job",), "kill", None, log).life() == Life("failed", "KeyError: 'no such job'")
    assert multiprocessing.get_start_method(allow_none=True) in (None, "fork")  # ours is a context of its own
    assert RUN_RECORD == "run.json"
