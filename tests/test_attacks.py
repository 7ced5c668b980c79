"""The record of the attacks that the book shows: made once for the code that is there, kept with the run."""

import pytest

from kvlib.study import attacks
from kvlib.study.attacks import recorded_attacks, run_attacks
from kvlib.study.profile import load_profile
from kvlib.study.records import read_json
from kvlib.study.run import Run, code_hash

FOUND = [{"attack": "disk full", "moment": "m", "times": 3, "outcome": "same", "held": True, "seconds": 1.0}]


@pytest.fixture
def run(tmp_path):
    return Run(load_profile("smoke"), "smoke", tmp_path / "smoke", {}, "smoke")


def test_they_are_made_once_for_the_same_code_and_again_for_other_code(run, monkeypatch):
    made = []

    def attack(folder, say):
        made.append(folder)
        say("disk full")
        return FOUND

    monkeypatch.setattr(attacks, "attack", attack)
    said = []
    assert recorded_attacks(run) is None
    record, new = run_attacks(run, said.append)
    assert new and record["attacks"] == FOUND and record["kvlib"] == code_hash() and said == ["disk full"]
    assert run_attacks(run) == (record, False) and recorded_attacks(run) == record
    monkeypatch.setattr(attacks, "code_hash", lambda: "other")
    assert run_attacks(run)[1] and len(made) == 2
    assert read_json(run.stage("evidence") / "attacks.json")["kvlib"] == "other"
    assert not list(run.folder.glob(".partial-*"))
