"""The arms are the study's 20, and selection is a pure function of records, ties included."""

import pytest
import yaml

from kvlib import KvlibError
from kvlib.study.arms import all_arms, chosen_arms, slices
from kvlib.study.profile import DATA, load_profile
from kvlib.study.selection import (
    by_kl32,
    choose_settings,
    freeze,
    median_seed,
    places,
    rank_arms,
    why_frozen,
)

SCREENING = load_profile("laptop").screening


def test_the_screen_has_twenty_different_arms():
    arms = all_arms(SCREENING)
    assert (
        len(arms) == 20 == len({arm.id for arm in arms}) == len({tuple(arm.record().items()) for arm in arms})
    )
    assert sum(arm.base == "direct" for arm in arms) == 10
    assert {arm.rank for arm in arms} == {4, 8, 16, 32} and len({arm.learning_rate for arm in arms}) == 3


def test_a_slice_varies_one_setting_only():
    for axis, by_base in slices(SCREENING).items():
        for base, arms in by_base.items():
            others = [{k: v for k, v in arm.record().items() if k not in ("id", axis)} for arm in arms]
            assert all(other == others[0] for other in others) and arms[0].base == base
            assert len({getattr(arm, axis) for arm in arms}) == len(arms)


def test_every_shipped_profile_is_valid_and_names_real_arms():
    for path in sorted((DATA / "profiles").glob("*.yaml")):
        profile = load_profile(path.stem)
        assert profile.name == path.stem and chosen_arms(profile.screening)
        assert yaml.safe_load(path.read_text())["name"] == path.stem


def test_an_unknown_arm_is_refused():
    with pytest.raises(KvlibError, match="arm 'nonsense' given"):
        chosen_arms(SCREENING.model_copy(update={"arms": ["nonsense"]}))


def arm(name, kl32, parameters=10, status="finished"):
    return {"id": name, "kl32": kl32, "parameters": parameters, "status": status}


def test_arms_are_ranked_by_kl_then_size_then_id():
    arms = [
        arm("c", 0.2),
        arm("b", 0.1, 20),
        arm("a", 0.1, 20),
        arm("z", 0.1, 5),
        arm("broken", None, status="not_finite"),
    ]
    assert rank_arms(arms) == ["z", "a", "b", "c"]


def test_records_that_cannot_be_true_are_refused():
    with pytest.raises(KvlibError, match="more than one record"):
        rank_arms([arm("a", 0.1), arm("a", 0.2)])
    for value in (None, float("nan"), "0.1"):
        with pytest.raises(KvlibError, match="expected a finite number"):
            rank_arms([arm("a", value)])


def cell(name, step, scale, kl32):
    return {"arm": name, "checkpoint_step": step, "scale": scale, "kl32": kl32}


def test_ties_of_the_grid_go_to_the_earlier_checkpoint_and_the_smaller_scale():
    grid = [
        cell("a", 100, 0.5, 0.1),
        cell("a", 50, 1.0, 0.1),
        cell("a", 50, 0.75, 0.1),
        cell("b", 50, 1.0, 0.3),
        cell("b", 100, 1.0, 0.2),
    ]
    best = choose_settings(grid)
    assert (best["a"]["checkpoint_step"], best["a"]["scale"]) == (50, 0.75)
    assert best["b"]["checkpoint_step"] == 100
    assert [entry["arm"] for entry in by_kl32(best, {"a": 9, "b": 9}, 3)] == ["a", "b"]


def candidate(name, scores, parameters=10, absorbable=True):
    return {
        "id": name,
        "kl32": sum(scores) / len(scores),
        "parameters": parameters,
        "absorbable": absorbable,
        "scores": scores,
    }


def placed(*arms, count=2):
    return places(list(arms), {arm["id"]: arm["scores"] for arm in arms}, count)


FAR, LOW = [0.3, 0.3, 0.3, 0.3], [0.10, 0.12, 0.10, 0.12]
NEAR = [0.11, 0.11, 0.11, 0.1201]  # as good as LOW within a standard error, prompt by prompt


def test_finalists_are_the_lowest_where_prompts_tell_arms_apart():
    worse = [score + 0.01 for score in LOW]  # by the same on every prompt: no spread at all
    found = placed(candidate("worse", worse), candidate("low", LOW, absorbable=False), candidate("far", FAR))
    assert [place["arm"] for place in found] == ["low", "worse"]
    assert all(place["lowest"] == place["arm"] and place["tied"] == [] for place in found)


def test_arms_that_the_prompts_cannot_tell_apart_go_by_what_attention_can_absorb_then_by_size():
    lowest, near = candidate("rms", LOW, absorbable=False), candidate("own", NEAR, 20)
    first, second = placed(lowest, near, candidate("far", FAR))
    assert (first["arm"], first["lowest"], second["arm"]) == ("own", "rms", "rms")
    (tie,) = first["tied"]
    assert tie["arm"] == "own" and 0 < tie["difference"] <= tie["se"]
    assert placed(lowest, near, candidate("small", NEAR, 5))[0]["arm"] == "small"
    assert placed(candidate("rms", LOW), near)[0]["arm"] == "rms"  # of two that can be absorbed, the smaller


def test_a_place_is_compared_with_the_lowest_that_has_none_yet():
    best = candidate("best", [score - 0.05 for score in LOW], absorbable=False)
    found = placed(best, candidate("rms", LOW, absorbable=False), candidate("own", NEAR))
    assert [(place["arm"], place["lowest"]) for place in found] == [("best", "best"), ("own", "rms")]


def test_on_one_prompt_only_equal_scores_tie():
    found = placed(candidate("a", [0.1], absorbable=False), candidate("b", [0.1000001]), count=1)
    assert found[0]["arm"] == "a" and found[0]["tied"] == []
    found = placed(candidate("a", [0.1], absorbable=False), candidate("b", [0.1]), count=1)
    assert found == [{"arm": "b", "lowest": "a", "tied": [{"arm": "b", "difference": 0.0, "se": None}]}]


def test_fewer_arms_than_places_is_an_error():
    with pytest.raises(KvlibError, match="2 arms finished the screen, expected at least 3"):
        placed(candidate("a", LOW), candidate("b", FAR), count=3)


def confirmed(name, values, parameters=10, absorbable=True):
    runs = [
        {"seed": seed, "kl32": value, "status": "finished" if value is not None else "not_finite"}
        for seed, value in values.items()
    ]
    return {"id": name, "parameters": parameters, "absorbable": absorbable, "runs": runs}


def test_the_lower_mean_wins_with_its_median_seed_not_its_luckiest():
    arms = [confirmed("a", {11: 0.10, 12: 0.30, 13: 0.16}), confirmed("b", {11: 0.17, 12: 0.19, 13: 0.18})]
    assert freeze(arms) == ("b", 13)


def test_ties_of_the_freeze_go_to_fewer_parameters_then_to_the_id():
    same = {11: 0.1, 12: 0.1, 13: 0.1}
    assert freeze([confirmed("a", same, 20), confirmed("b", same, 10)]) == ("b", 11)
    assert freeze([confirmed("b", same), confirmed("a", same)]) == ("a", 11)


def test_within_one_standard_error_the_arm_that_attention_can_absorb_is_taken():
    lower = confirmed("a", {11: 0.118, 12: 0.120, 13: 0.119}, absorbable=False)
    tied = confirmed("b", {11: 0.1195, 12: 0.1196, 13: 0.1194})
    assert freeze([lower, tied]) == ("b", 11)
    assert "a tie within the standard error" in why_frozen([lower, tied], "b", 11)
    assert "decided by what attention can absorb" in why_frozen([lower, tied], "b", 11)
    apart = confirmed("b", {11: 0.1205, 12: 0.1206, 13: 0.1204})
    assert freeze([lower, apart]) == ("a", 13)
    assert "tie" not in why_frozen([lower, apart], "a", 13)


def test_one_seed_has_no_standard_error_so_only_equal_means_tie():
    arms = [confirmed("a", {11: 0.1}, absorbable=False), confirmed("b", {11: 0.1000001})]
    assert freeze(arms) == ("a", 11)


def test_an_arm_with_a_failed_seed_is_not_frozen():
    assert freeze([confirmed("a", {11: 0.01, 12: None}), confirmed("b", {11: 0.2, 12: 0.3})])[0] == "b"
    with pytest.raises(KvlibError, match="no confirmed arm finished every seed"):
        freeze([confirmed("a", {11: 0.01, 12: None})])


def test_the_median_of_an_even_number_is_the_better_of_the_middle_two():
    assert median_seed([{"seed": s, "kl32": k} for s, k in ((1, 0.4), (2, 0.1), (3, 0.2), (4, 0.3))]) == 3
