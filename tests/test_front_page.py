"""The front page: what was asked, found, and how sure one can be, whatever the records say."""

import copy

import pytest
from fake_records import write_fake_run

from kvlib.report import figures, prose
from kvlib.report.agreement import RawTables, first_tokens, paired_first_step, paired_top1, read_raw_tables
from kvlib.report.headline import tiles
from kvlib.report.repetitions import factor_text, ratio_range
from kvlib.study.run import read_summary

STAGES = ("pair", "screening", "confirmation", "frozen_evaluation", "latency")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_fake_run(tmp_path_factory.mktemp("results") / "laptop")


@pytest.fixture(scope="module")
def whole(run) -> dict[str, dict]:
    return {stage: read_summary(run / stage) for stage in STAGES}


@pytest.fixture
def raw(run) -> RawTables:
    """The raw tables, free to be changed."""
    return read_raw_tables(run)


@pytest.fixture
def records(whole):
    """The records, free to be changed."""
    return copy.deepcopy(whole)


def test_what_the_difference_rests_on_is_said(records, raw):
    said = prose.front_facts(records, 256, raw)["sure"]
    assert "below zero, on 64 prompts from 22 articles" in said and "another prompt's cache scores" in said
    assert "covers prompts, not training: one training seed of three was evaluated" in said


def test_an_interval_around_zero_is_called_that(records, raw):
    records["frozen_evaluation"]["forcing"]["oracle"]["paired"]["learned-direct"]["ci95"] = [-0.01, 0.02]
    assert "on both sides of zero" in prose.front_facts(records, 256, raw)["sure"]


def test_the_pair_its_size_and_the_machine_are_named(records, raw):
    said = prose.front_facts(records, 256, raw)["measured_on"]
    assert "135 million parameters" in said and "29\u00a0% smaller" in said
    assert "3.74 against 2.60" in said and said.endswith("on two threads of CPU, 2 cores.")


def test_fidelity_and_time_are_not_joined_where_they_were_measured_at_two_lengths(records, raw):
    said = prose.front_facts(records, 256, raw)["found"]
    assert (
        said.startswith("At 256 tokens direct reuse is ")
        and "At 8,192 tokens, where fidelity was not measured," in said
    )
    assert "of direct reuse's divergence remains." in said
    assert "At the same length" in prose.front_facts(records, 8192, raw)["found"]


def test_the_first_token_and_top_1_are_called_what_their_intervals_allow(records, raw):
    step1 = (raw.steps.step == 1) & (raw.steps.path == "learned")
    direct = raw.steps[(raw.steps.step == 1) & (raw.steps.path == "direct")].kl.to_numpy()
    own = (raw.prompts.path == "learned").to_numpy()
    top1 = raw.prompts[raw.prompts.path == "direct"].top1.to_numpy()
    jitter = [0.01 * (i % 3 - 1) for i in range(len(direct))]
    for shift, said in (
        (0.0, "are not distinguishable from direct reuse"),
        (0.3, "are worse than with direct reuse"),
        (-0.3, None),
    ):
        raw.steps.loc[step1, "kl"] = direct + jitter + shift
        raw.prompts.loc[own, "top1"] = top1 + jitter - shift
        found = prose.front_facts(records, 256, raw)["found"]
        assert (said or "remains.") in found
        assert ("The first token alone and top-1 agreement are" in found) == (said is not None)
        sentence = prose.first_step_sentence(records["frozen_evaluation"], raw)
        other = prose.top1_sentence(records["frozen_evaluation"], raw.prompts)
        for text in (sentence, other):
            assert ("not distinguishable from zero" in text) == (shift == 0)
            assert ("does harm" in text) == (shift > 0) and ("closer to native" in text) == (shift < 0)


def test_paired_differences_of_the_raw_tables_are_those_of_the_prompts(raw):
    wide = raw.prompts[raw.prompts.forcing == "oracle"].pivot(index="prompt", columns="path", values="top1")
    found = paired_top1(raw.prompts, "oracle")
    assert found["mean"] == pytest.approx((wide.learned - wide.direct).mean())
    assert found["wins"] == int((wide.learned > wide.direct).sum()) and found["se_clustered"] > 0
    first = raw.steps[(raw.steps.forcing == "oracle") & (raw.steps.step == 1)]
    kl = first.pivot(index="prompt", columns="path", values="kl")
    step = paired_first_step(raw.steps, raw.prompts, "oracle")
    assert step["mean"] == pytest.approx((kl.learned - kl.direct).mean())


def test_first_tokens_are_counted_by_prompt_and_only_where_native_was_timed(raw):
    found = first_tokens(raw.latency).set_index(["prefix_tokens", "path"])
    assert found.loc[(128, "learned")].tolist() == [3, 3] and found.loc[(128, "direct")].tolist() == [2, 3]
    timed = raw.latency[(raw.latency.path != "native") | (raw.latency.prompt != 0)]
    found = first_tokens(timed).set_index(["prefix_tokens", "path"])
    assert found.loc[(128, "direct")].tolist() == [2, 2]
    fewer = RawTables(raw.prompts, raw.steps, timed)
    assert "twelve of twelve for direct" in prose.first_token_sentence(fewer)
    nothing = RawTables(raw.prompts, raw.steps, raw.latency[raw.latency.path != "native"])
    assert "cannot be said" in prose.first_token_sentence(nothing)


def test_a_ratio_of_few_repetitions_is_a_rough_one_and_cold_a_range(raw):
    times = raw.latency
    assert "about" not in factor_text(times, 8192, "resident")
    few = times[(times.repetition == 0) | (times.residency == "resident") & (times.path != "native")]
    assert factor_text(few, 8192, "resident").startswith("about ")
    low, high = ratio_range(few, 8192, "cold")
    assert low < high and factor_text(few, 8192, "cold") == f"{low:.2f} to {high:.2f}"
    assert factor_text(times[times.path != "native"], 8192, "cold") is None


def test_four_figures_stand_there_and_one_without_a_time_says_so(records, raw):
    final, latency = records["frozen_evaluation"], records["latency"]
    markup = tiles(final, latency, raw.latency, 256)
    assert markup.count("<strong>") == 4 and "not measured" not in markup
    assert markup.count("256 tokens") == 2 and markup.count("8,192 tokens") == 2 and "(n = " in markup
    assert "nats</strong>" in markup and "95 %: " in markup
    assert "not measured" in tiles(final, latency, raw.latency[raw.latency.residency == "resident"], 256)


def test_the_frontier_names_each_path_once(records):
    figure = figures.frontier(records["frozen_evaluation"], records["latency"])
    named = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert sorted(named) == sorted(set(named))
    assert [name for name in named if "cold" in name] == ["open: cold"]  # says what open markers are
