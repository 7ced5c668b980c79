"""The decision rule: what it needs to say "improves", and that missing figures never count in favour."""

import copy

import pytest

from kvlib.study.decision import DECISION_RULE, decide, decision_rule_hash
from kvlib.study.statistics import holm, paired, with_holm

CLUSTERS = [n // 2 for n in range(24)]


def forcing(shift=-0.03, spread=0.01, wrong_trained=0.19, noise=1e-8, control_shift=1.0):
    differences = [shift + spread * (n % 5 - 2) / 2 for n in range(24)]
    found = with_holm({"learned-direct": paired(differences, CLUSTERS, seed=1)})["learned-direct"]
    control = {
        "kl32": {"mean": 0.2 + control_shift},
        "paired": paired([control_shift + 0.01 * (n % 3) for n in range(24)], CLUSTERS, seed=1),
    }
    return {
        "paths": {"direct": {"kl32": {"mean": 0.2}}, "learned": {"kl32": {"mean": 0.2 + shift}}},
        "paired": {"learned-direct": found},
        "controls": {
            **dict.fromkeys(("other_prompt", "random_moments", "zeros"), control),
            "learned_heads_permuted": {"kl32": {"mean": 0.25}, "paired": {}},
            "wrong_trained": {"kl32": {"mean": wrong_trained}, "paired": {}},
        },
        "noise": {"native_two_parts": {"kl32": {"mean": noise}}},
    }


def test_a_clear_gain_improves_needs_content_and_exceeds_the_noise():
    found = decide(forcing())
    assert found["verdict"] == "improves" and all(found["criteria"].values()) and len(found["criteria"]) == 4
    assert found["needs_content"] is True and found["exceeds_noise"] is True
    assert found["content_share"] == pytest.approx(1 / 3)


def test_the_same_size_upwards_harms():
    found = decide(forcing(shift=0.03))
    assert found["verdict"] == "harms" and all(found["criteria"].values())
    assert found["content_share"] is None and found["needs_content"] is None


def test_a_mean_within_its_error_is_undecided():
    assert decide(forcing(shift=-0.001, spread=0.05))["verdict"] == "undecided"


def test_a_gain_that_wrong_prompts_can_teach_does_not_need_content():
    found = decide(forcing(wrong_trained=0.175))
    assert found["content"]["wrong_trained"] is False and found["needs_content"] is False


def test_an_empty_cache_as_good_as_direct_reuse_breaks_the_content_claim():
    assert decide(forcing(control_shift=-0.01))["needs_content"] is False


def test_noise_of_a_tenth_of_the_gain_is_too_much():
    assert decide(forcing(noise=0.004))["exceeds_noise"] is False


def test_what_was_not_measured_is_neither_true_nor_false():
    bare = copy.deepcopy(forcing())
    bare["controls"], bare["noise"] = {}, {}
    found = decide(bare)
    assert found["needs_content"] is None and found["exceeds_noise"] is None
    bare["paired"]["learned-direct"] |= {"bca95": None, "se_clustered": None, "wilcoxon_p_holm": None}
    assert decide(bare)["verdict"] == "undecided"


def test_degenerate_differences_are_undecided_and_never_nan():
    for values in ([0.0] * 24, [-0.03] * 24):
        found = with_holm({"a": paired(values, CLUSTERS, seed=1)})["a"]
        entry = forcing()
        entry["paired"]["learned-direct"] = found
        assert decide(entry)["verdict"] == "undecided"


def test_holm_reads_all_comparisons_together_and_leaves_gaps():
    found = with_holm({"a": {"wilcoxon_p": 0.01}, "b": {"wilcoxon_p": None}, "c": {"wilcoxon_p": 0.04}})
    assert [f["wilcoxon_p_holm"] for f in found.values()] == holm([0.01, None, 0.04]) == [0.02, None, 0.04]
    assert all(f["sign_p_holm"] is None for f in found.values())


def test_the_rule_is_a_page_and_its_hash_follows_its_text(tmp_path):
    changed = tmp_path / "rule.md"
    changed.write_bytes(DECISION_RULE.read_bytes())
    assert decision_rule_hash(changed) == decision_rule_hash()
    changed.write_text(changed.read_text().replace("below zero", "near zero", 1))
    assert decision_rule_hash(changed) != decision_rule_hash()
