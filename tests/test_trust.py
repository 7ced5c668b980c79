"""“Can this be trusted?”: whatever the records hold, its sentences and tables say what is so."""

import copy

import pytest
from fake_evidence import write_fake_evidence
from fake_records import write_fake_run

from kvlib.report import tables
from kvlib.report.prose import trust_facts
from kvlib.study.controls import CONTROLS
from kvlib.study.records import read_table
from kvlib.study.run import STAGES, read_summary

CLEAN = [
    {"check": "files", "checked": 40, "mismatches": []},
    {"check": "final", "checked": 2, "mismatches": []},
]
ATTACKS = {
    "kvlib": "f" * 64,
    "commit": "0123abc",
    "attacks": [
        {"attack": "killed while pruning", "moment": "m", "times": 7, "outcome": "same", "held": True, "seconds": 1.0},
        {"attack": "disk full", "moment": "m", "times": 6, "outcome": "one sentence", "held": True, "seconds": 1.0},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_fake_run(tmp_path_factory.mktemp("trust") / "laptop")


@pytest.fixture
def records(run):
    return copy.deepcopy({stage: read_summary(run / stage) for stage in STAGES})


def facts(records, checks=CLEAN, attacks=ATTACKS, evidence=None) -> dict:
    return trust_facts(records, checks, attacks, evidence)


def test_every_sentence_is_whole(records):
    for key, text in facts(records).items():
        assert text and "nan" not in text.split() and "None" not in text, (key, text)


def test_gates_that_failed_are_said_in_capitals(records):
    assert "five gates" in facts(records)["gates"].lower() and "all of them passed" in facts(records)["gates"]
    records["latency"]["gates"] = [{**records["latency"]["gates"][0], "passed": False}]
    assert "one FAILED" in facts(records)["gates"]


def test_the_noise_is_set_against_the_gain(records):
    assert "more than a thousand times that" in facts(records)["noise"]
    entry = records["frozen_evaluation"]["forcing"]["oracle"]
    gain = abs(entry["paired"]["learned-direct"]["mean"])
    for level, said in (
        (gain / 5, "5 times that"),
        (gain, "not larger than that"),
        (0.0, "above it, which is zero"),
        (-gain / 5, "5 times that"),
    ):
        entry["noise"]["native_two_parts"]["kl32"]["mean"] = level
        assert said in facts(records)["noise"]
    entry["noise"] = {}
    assert "was not measured" in facts(records)["noise"]


def test_controls_that_are_no_worse_than_direct_reuse_are_named(records):
    controls = records["frozen_evaluation"]["controls"]
    assert "trained on wrong prompts" in facts(records)["controls"]
    for entry in controls.values():
        entry["kl32"]["mean"] = 9.0
    assert "Every control is worse than direct reuse" in facts(records)["controls"]
    controls["zeros"]["kl32"]["mean"] = 0.0
    assert "Not worse than direct reuse is: all zero" in facts(records)["controls"]


def test_what_wrong_prompts_teach_is_said_as_a_share(records):
    final = records["frozen_evaluation"]
    for share, said in ((0.4, "recovers 40.0"), (-0.1, "recovers nothing"), (None, "has no gain of which")):
        final["decision"]["content_share"] = share
        assert said in facts(records)["wrong_trained"]
    del final["controls"]["wrong_trained"]
    records["confirmation"]["wrong_trained"] = {
        "status": "not_finite",
        "reason": "the kl loss became nan at step 3",
    }
    assert (
        "no map trained on wrong prompts: the kl loss became nan at step 3" in facts(records)["wrong_trained"]
    )


@pytest.mark.parametrize("verdict", ["improves", "harms", "undecided"])
def test_the_verdict_is_the_rules(records, verdict):
    decision = records["frozen_evaluation"]["decision"]
    decision["verdict"] = verdict
    decision["criteria"] = dict.fromkeys(decision["criteria"], verdict != "undecided")
    text = facts(records)["verdict"]
    assert {"improves": "improves on", "harms": "does harm", "undecided": "is undecided"}[verdict] in text
    assert ("Not met: " in text) == (verdict == "undecided")


def test_records_that_do_not_match_are_named(records):
    wrong = [*CLEAN, {"check": "screening", "checked": 9, "mismatches": ["a file", "another"]}]
    assert "all of them match" in facts(records)["verified"]
    assert "DO NOT MATCH (screening)" in facts(records, wrong)["verified"]
    table = tables.checks(wrong)
    assert table["do not match"].tolist() == [0, 0, 2] and table["the first"].tolist()[-1] == "a file"


def test_attacks_that_were_not_made_or_did_not_hold_are_said(records):
    assert "13 times beside this run, in two ways; every one ended" in facts(records)["attacks"]
    assert "python -m kvlib evidence laptop" in facts(records, attacks=None)["attacks"]
    broken = copy.deepcopy(ATTACKS)
    broken["attacks"][1]["held"] = False
    assert "NOT every one ended as promised: disk full" in facts(records, attacks=broken)["attacks"]


def test_the_last_table_says_what_how_often_and_what_happened(records):
    table = tables.attacked(records, CLEAN, ATTACKS)
    said = dict(zip(table["what was attacked"], table["how often"]))
    assert said["a run: killed while pruning"] == 7
    assert said["the records: every figure computed again, every hash compared"] == 42
    assert said["the gain: caches and maps that should know nothing"] == 2 * 64 * len(CONTROLS)
    assert tables.attacked(records, CLEAN, None)["how often"].tolist()[-1] == 0


def test_what_this_run_does_not_have_is_not_counted_as_checked():
    table = tables.checks([*CLEAN, {"check": "evidence", "checked": 0, "mismatches": []}])
    assert (
        table["compared"].tolist() == [40, 2, None]
        and table["the first"].tolist()[-1] == "nothing of it in this run"
    )


def test_evidence_of_the_frozen_map_is_quoted_and_of_another_is_not(run, records):
    assert "has not been asked" in facts(records)["evidence"]
    evidence = write_fake_evidence(run)
    assert "python -m kvlib evidence" not in facts(records, evidence=evidence)["evidence"]
    assert "another frozen map" in facts(records, evidence={**evidence, "frozen": "0" * 64})["evidence"]


def test_the_worst_prompts_come_with_the_token_where_they_part(run, records):
    prompts, steps = (
        read_table(run / "frozen_evaluation" / f"{name}.parquet") for name in ("prompts", "steps")
    )
    table = tables.worst(prompts, steps, records["frozen_evaluation"])
    losses = table["learned − direct"].tolist()
    assert len(table) == 5 and losses == sorted(losses, reverse=True)
    first = table.iloc[0]
    own = steps[(steps.forcing == "oracle") & (steps.path == "learned") & (steps.prompt == first["prompt"])]
    parted = own[~own.agree]
    assert first["they part at step"] == parted.step.min()
    assert first["learned says"] == repr(parted.sort_values("step").iloc[0].path_token)


def test_tables_name_paths_and_controls_in_the_pages_order(records):
    final = records["frozen_evaluation"]
    assert tables.first_step(final)["path"].tolist()[:2] == ["native prefill", "direct reuse"]
    assert tables.controls(final)["what it is"].tolist()[: len(CONTROLS)] == [
        said for _, _, said in CONTROLS.values()
    ]
    assert tables.gates(records)["stage"].tolist() == [
        "pair",
        "screening",
        "confirmation",
        "final evaluation",
        "latency",
    ]
