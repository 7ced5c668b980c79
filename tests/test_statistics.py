"""Statistics: the study's own figures, brute force, and answers for data that has none."""

import json
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib.errors import KvlibError
from kvlib.study.statistics import describe, holm, normal_interval, paired

RNG = np.random.default_rng(0)
DIFFERENCES = RNG.normal(-0.02, 0.03, 64)


def test_the_studys_interval_follows_from_its_mean_and_error():
    low, high = normal_interval(-0.01913, 0.00378)
    assert (round(low, 5), round(high, 5)) == (-0.02654, -0.01172)


def test_54_wins_of_64_have_the_exact_sign_test_of_a_fair_coin():
    signs = np.array([-1.0] * 54 + [1.0] * 10) * np.linspace(0.5, 1.5, 64)
    result = paired(signs, seed=0)
    tail = sum(math.comb(64, k) for k in range(11)) / 2**64
    assert (result["wins"], result["losses"], result["prompts"]) == (54, 10, 64)
    assert result["sign_p"] == pytest.approx(2 * tail, rel=1e-9)


def test_mean_error_and_interval_match_their_definitions():
    result = paired(DIFFERENCES, seed=0, baseline=0.2)
    se = DIFFERENCES.std(ddof=1) / 8
    assert result["mean"] == pytest.approx(DIFFERENCES.mean())
    assert result["se"] == pytest.approx(se)
    assert result["ci95"] == pytest.approx(
        [DIFFERENCES.mean() - 1.959964 * se, DIFFERENCES.mean() + 1.959964 * se]
    )
    assert result["relative"] == pytest.approx(DIFFERENCES.mean() / 0.2)
    assert "note" not in result


def test_wilcoxon_matches_the_enumeration_of_all_signs():
    d = np.array([0.3, -0.1, 0.7, 0.4, -0.2, 0.9, 0.5, 0.6])
    ranks = np.argsort(np.argsort(np.abs(d))) + 1
    observed = min(ranks[d > 0].sum(), ranks[d < 0].sum())
    sums = [
        sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in product((0, 1), repeat=8)
    ]
    assert paired(d, seed=0)["wilcoxon_p"] == pytest.approx(2 * np.mean(np.array(sums) <= observed))


def test_the_bootstrap_is_near_the_normal_interval_and_repeats_with_its_seed():
    first, second = paired(DIFFERENCES, seed=3), paired(DIFFERENCES, seed=3)
    assert first == second
    assert first["bca95"] == pytest.approx(first["ci95"], abs=0.003)


def test_clustered_error_matches_the_sandwich_formula():
    clusters = [f"article {i // 3}" for i in range(64)]
    residual = DIFFERENCES - DIFFERENCES.mean()
    sums = [residual[[c == name for c in clusters]].sum() for name in dict.fromkeys(clusters)]
    groups = len(sums)
    # G / (G − 1) · (n − 1) / (n − 1): one regressor.
    expected = math.sqrt(groups / (groups - 1) * np.square(sums).sum()) / 64
    assert paired(DIFFERENCES, clusters, seed=0)["se_clustered"] == pytest.approx(expected)


def test_copies_of_one_prompt_do_not_shrink_the_clustered_error():
    d = np.repeat(DIFFERENCES[:16], 4)
    result = paired(d, np.repeat(np.arange(16), 4).tolist(), seed=0)
    assert result["se_clustered"] > 1.8 * result["se"]


def test_a_tie_is_no_win_and_stays_out_of_the_sign_test():
    result = paired([-1.0, -2.0, 0.0, 3.0, -0.5], seed=0)
    assert (result["wins"], result["losses"], result["ties"]) == (3, 1, 1)
    assert result["sign_p"] == pytest.approx(0.625)


def test_where_higher_is_better_wins_turn_round():
    result = paired([1.0, 2.0, -3.0], seed=0, lower_is_better=False)
    assert (result["wins"], result["losses"]) == (2, 1)


def test_equal_differences_have_no_bootstrap_and_say_why():
    result = paired([-0.5] * 10, seed=0)
    assert result["bca95"] is None and "all differences are equal" in result["note"]
    assert result["ci95"] == [-0.5, -0.5] and result["wins"] == 10


def test_zero_differences_have_no_test_and_say_why():
    result = paired([0.0] * 10, list("aabbccddee"), seed=0)
    assert result["sign_p"] is None and result["wilcoxon_p"] is None
    assert "every difference is zero" in result["note"] and result["ties"] == 10
    assert result["se_clustered"] == 0


def test_one_prompt_has_a_mean_and_no_error():
    result = paired([-0.3], ["a"], seed=0)
    assert result["mean"] == -0.3 and result["se"] is None and "one prompt" in result["note"]
    assert describe([2.0]) == {
        "mean": 2.0, "se": None, "median": 2.0, "q10": 2.0, "q90": 2.0, "n": 1,
        "note": "one value has no standard error",
    }  # fmt: skip


def test_one_article_has_no_clustered_error():
    result = paired(DIFFERENCES, ["only"] * 64, seed=0)
    assert result["se_clustered"] is None and "one article" in result["note"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_give_no_figure_at_all(bad):
    result = paired([0.1, bad, 0.2], seed=0)
    assert result["mean"] is None and result["wins"] is None and "1 of 3" in result["note"]
    assert describe([0.1, bad])["mean"] is None


def test_no_values_say_so():
    assert describe([])["note"] == "there are no values"
    assert paired([], seed=0)["prompts"] == 0


def test_a_zero_baseline_has_no_relative_difference():
    result = paired(DIFFERENCES, seed=0, baseline=[0.0] * 64)
    assert result["relative"] is None and "baseline" in result["note"]


def test_labels_that_do_not_match_are_refused():
    with pytest.raises(KvlibError, match="64 values came with 3 cluster labels"):
        paired(DIFFERENCES, ["a", "b", "c"], seed=0)
    with pytest.raises(KvlibError, match=r"shape \(2, 2\)"):
        describe([[1.0, 2.0], [3.0, 4.0]])


def test_describe_matches_numpy():
    x = RNG.normal(size=50)
    found = describe(x)
    expected = (x.mean(), x.std(ddof=1) / math.sqrt(50), np.median(x), *np.quantile(x, (0.1, 0.9)))
    assert [found[key] for key in ("mean", "se", "median", "q10", "q90")] == pytest.approx(expected)


def test_holm_matches_the_step_down_rule_and_keeps_gaps():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([]) == [] and holm([None]) == [None]
    with pytest.raises(KvlibError, match="between 0 and 1"):
        holm([0.5, math.nan])


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, math.nan, math.inf]), max_size=6), st.booleans())
def test_every_result_is_plain_json_without_nan(values, clustered):
    clusters = [i // 2 for i in range(len(values))] if clustered else None
    for result in (paired(values, clusters, seed=0, baseline=0.2), describe(values)):
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert "note" in result or None not in result.values()
