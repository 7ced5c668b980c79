"""The front page: what was asked, found, and how sure one can be, whatever the records say."""

import copy

import pytest
from fake_records import write_fake_run

from kvlib.report import figures, prose
from kvlib.report.headline import tiles
from kvlib.study.run import read_summary

STAGES = ("pair", "screening", "confirmation", "frozen_evaluation", "latency")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, dict]:
    run = write_fake_run(tmp_path_factory.mktemp("results") / "laptop")
    return {stage: read_summary(run / stage) for stage in STAGES}


@pytest.fixture
def records(whole):
    """The records, free to be changed."""
    return copy.deepcopy(whole)


def test_what_the_difference_rests_on_is_said(records):
    said = prose.front_facts(records, 256)["sure"]
    assert "below zero, on 64 prompts from 22 articles" in said and "another prompt's cache scores" in said


def test_an_interval_around_zero_is_called_that(records):
    records["frozen_evaluation"]["forcing"]["oracle"]["paired"]["learned-direct"]["ci95"] = [-0.01, 0.02]
    assert "on both sides of zero" in prose.front_facts(records, 256)["sure"]


def test_four_figures_stand_there_and_one_without_a_time_says_so(records):
    final, latency = records["frozen_evaluation"], records["latency"]
    markup = tiles(final, latency)
    assert markup.count("<strong>") == 4 and "not measured" not in markup
    latency["rows"] = [row for row in latency["rows"] if row["residency"] == "resident"]
    assert "not measured" in tiles(final, latency)


def test_the_frontier_names_each_path_once(records):
    figure = figures.frontier(records["frozen_evaluation"], records["latency"])
    named = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert sorted(named) == sorted(set(named))
    assert [name for name in named if "cold" in name] == ["open: cold"]  # says what open markers are
