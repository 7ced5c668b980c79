"""Profiles are validated at the door, each mistake in one sentence."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlib import KvlibError
from kvlib.study.profile import DATA, Profile, load_profile, profile_names


def test_the_shipped_profiles_are_there():
    assert {"smoke", "laptop", "quick", "paper", "llama-instruct", "qwen3"} <= set(profile_names())


def test_overrides_reach_the_profile_and_the_rest_stays():
    plain, changed = load_profile("laptop"), load_profile("laptop", {"training.steps": 160})
    assert changed.training.steps == 160
    assert changed.model_copy(update={"training": plain.training}) == plain


def test_fewer_steps_take_the_checkpoints_along_and_more_leave_them():
    planned = load_profile("laptop")
    assert load_profile("laptop", {"training.steps": 40}).screening.checkpoints == [
        round(step * 40 / planned.training.steps) for step in planned.screening.checkpoints
    ]
    longer = load_profile("laptop", {"training.steps": planned.training.steps + 60})
    assert longer.screening.checkpoints == planned.screening.checkpoints


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"training.stepz": 3}, "unknown key 'training.stepz'"),
        ({"nonsense": 3}, "unknown key 'nonsense'"),
        ({"training.steps": "many"}, "training.steps is 'many'"),
        ({"training.steps": 1.5}, "training.steps is 1.5"),
        ({"training.steps": True}, "training.steps is True"),
        ({"training.steps": 0}, "training.steps is 0"),
        ({"training.steps": 60, "screening.checkpoints": [75]}, "expected at most training.steps"),
        ({"screening.warmup_steps": 100}, "screening.warmup_steps is 100"),
        ({"screening.ranks": [8]}, "screening.ranks is"),
        ({"screening.centre_rank": 7}, "screening.centre_rank is 7"),
        ({"screening.finalists": 7}, "screening.finalists is 7"),
        ({"screening.scales": []}, "screening.scales is []"),
        ({"screening.scales": [0.0]}, "screening.scales.0 is 0.0"),
        ({"partitions.final.items": 0}, "partitions.final.items is 0"),
        ({"partitions.final.items": 1}, "a standard error needs two prompts"),
        ({"prompt.prefix_tokens": 1}, "prompt.prefix_tokens is 1"),
        ({"prompt.forced_steps": 1000}, "partitions.window_tokens is 1024"),
        ({"latency.prefix_tokens": [128, 128, 512, 1024, 2048, 4096]}, "expected different lengths"),
        ({"latency.repetitions": [3]}, "latency.repetitions has 1 entries, expected 6"),
        ({"latency.pipeline_repetitions": [3]}, "latency.pipeline_repetitions has 1 entries, expected 6"),
        ({"latency.modes": ["in_place", "in_place"]}, "expected different values"),
        ({"latency.modes": ["sideways"]}, "latency.modes"),
        ({"evaluation.forcings": ["orakel"]}, "evaluation.forcings.0 is 'orakel'"),
        ({"pair.dtype": "float8"}, "pair.dtype is 'float8'"),
        ({"pair.target": {"kind": "pt"}}, "pair.target is"),
    ],
)
def test_bad_values_are_one_sentence(overrides, sentence):
    with pytest.raises(KvlibError) as refusal:
        load_profile("laptop", overrides)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_rank_above_the_head_is_refused_before_anything_runs():
    with pytest.raises(KvlibError, match="head_dim = 16"):
        load_profile("smoke", {"screening.ranks": [4, 8, 16, 32]})


def test_bad_files_are_one_sentence(tmp_path):
    with pytest.raises(KvlibError, match="expected one of laptop, quick, smoke|expected one of"):
        load_profile("labtop")
    path = tmp_path / "mine.yaml"
    for content, sentence in (
        ("a: [", "no readable YAML"),
        ("- 1", "holds list"),
        ("", "holds NoneType"),
        ("name: x", "is missing"),
    ):
        path.write_text(content)
        with pytest.raises(KvlibError, match=sentence):
            load_profile(str(path))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats()
    | st.text(max_size=4)
    | st.lists(st.integers(-2, 2), max_size=2)
)


@given(key=st.sampled_from(sorted(Profile.model_fields)), value=LEAVES)
def test_whatever_stands_for_a_section_is_valid_or_one_sentence(key, value):
    try:
        profile = load_profile("smoke", {key: value})
    except KvlibError as refusal:
        assert "\n" not in str(refusal)
    else:
        assert getattr(profile, key) == value


def test_a_profile_copied_to_a_file_is_the_same(tmp_path):
    path = tmp_path / "copy.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load((DATA / "profiles" / "laptop.yaml").read_text())))
    assert load_profile(str(path)) == load_profile("laptop")


def extended(tmp_path, content: str) -> Profile:
    path = tmp_path / "extended.yaml"
    path.write_text(content)
    return load_profile(str(path))


def test_a_profile_that_extends_another_differs_in_what_it_says(tmp_path):
    text = (
        "extends: paper\nname: mine\nlabel: mine\npair: {source: {revision: v2}}\nlatency: {memory: false}\n"
    )
    found, paper = extended(tmp_path, text).model_dump(), load_profile("paper").model_dump()
    assert found["pair"]["source"].pop("revision") == "v2" and found["latency"].pop("memory") is False
    assert (found.pop("name"), found.pop("label")) == ("mine", "mine")
    assert paper["pair"]["source"].pop("revision") is None and paper["latency"].pop("memory") is True
    assert found == {key: value for key, value in paper.items() if key not in ("name", "label")}


def test_a_section_of_another_kind_takes_nothing_over(tmp_path):
    text = "extends: laptop\nname: mine\nlabel: mine\npair: {source: {kind: hub, id: some/model}}\n"
    assert extended(tmp_path, text).pair.source.id == "some/model"
    assert load_profile("laptop", {"training.steps": 160}) != extended(tmp_path, text)


def test_an_override_reaches_what_was_taken_over(tmp_path):
    assert load_profile("qwen3", {"training.steps": 500}).training.steps == 500
    assert load_profile("qwen3", {"corpus.texts.web.keep": 4}).corpus.texts["web"].keep == 4


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("extends: papper\nname: a\nlabel: b", "extends is 'papper', expected one of laptop, paper, quick, smoke"),
        ("extends: qwen3\nname: a\nlabel: b", "extends is 'qwen3', expected one of"),
        ("extends: [paper]\nname: a\nlabel: b", "extends is \\['paper'\\], expected one of"),
        ("extends: paper\nname: a", "key 'label' is missing, which is not taken over from paper"),
        ("extends: paper\nname: a\nlabel: b\npairs: {}", "unknown key 'pairs'"),
        ("extends: paper\nname: a\nlabel: b\ntraining: {steps: 0}", "training.steps is 0"),
        ("extends: paper\nname: a\nlabel: b\npartitions: {final: {text: tset}}", "partitions.final.text is tset, expected one of"),
        ("extends: laptop\nname: a\nlabel: b\npartitions: {final: {text: test}}", "expected none: this corpus has one text"),
        ("extends: laptop\nname: a\nlabel: b\npartitions: {build: null}", "partitions.build is missing"),
        ("extends: paper\nname: a\nlabel: b\ncorpus: {texts: {web: {streamin: true}}}", "unknown key 'corpus.texts.web.streamin'"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_profile_that_extends_another_is_one_sentence(tmp_path, content, sentence):
    with pytest.raises(KvlibError, match=sentence) as refusal:
        extended(tmp_path, content)
    assert "\n" not in str(refusal.value)
