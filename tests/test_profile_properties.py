"""Any one wrong edit of a valid profile is refused in one sentence that names the key; valid ones come back as they were."""

import copy
import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlib import KvlibError
from kvlib.study.profile import DATA, Profile, load_profile, profile_names

VALID = {
    name: yaml.safe_load((DATA / "profiles" / f"{name}.yaml").read_text()) for name in ("smoke", "laptop")
}


def places(values, path=()) -> list[tuple]:
    """The paths of all keys of a profile, sections and leaves."""
    found = []
    for key, value in values.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += places(value, (*path, key))
    return found


def sections(values) -> list[tuple]:
    return [(), *(path for path in places(values) if isinstance(dig(values, path), dict))]


def dig(values, path):
    for key in path:
        values = values[key]
    return values


@st.composite
def edits(draw, change, of=places):
    """(a profile's name, its values after one change, the dotted key that the change is at)."""
    name = draw(st.sampled_from(sorted(VALID)))
    values = copy.deepcopy(VALID[name])
    path = draw(st.sampled_from(of(values)))
    return values, change(draw, values, path)


def refusal(values, tmp_path_factory) -> str:
    path = tmp_path_factory.getbasetemp() / "edited.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(KvlibError) as refused:
        load_profile(str(path))
    said = str(refused.value)
    assert "\n" not in said and len(said) < 700
    return said.removeprefix(f"profile {path}: ")


KEYS = st.text(
    st.characters(codec="ascii", categories=["L", "N"], include_characters="_-"), min_size=1, max_size=12
)
# What is the wrong type, or out of range, wherever it stands: every leaf is text, a number, true or false, or a list of these.
WRONG = [{"a": {"b": 1}}, [[1]], [None], -1.5, math.nan, math.inf, -math.inf, "\n\t", b"bytes"]


def add_key(draw, values, path):
    section = dig(values, path)
    key = draw(
        (KEYS | st.sampled_from(["hub", "random", "generated", "kind_", "Steps"])).filter(
            lambda k: k not in KNOWN | set(section)
        )
    )
    section[key] = draw(st.sampled_from([1, "x", None, [], {}]))
    return ".".join((*path, key))


KNOWN = {
    "revision",
    "micro_batch",
    "penalty",
    "arms",
    "ridge_penalty",
    "modes",
    "breakdown",
    "native_repetitions",
    "pipeline_repetitions",
    "spread",
    "memory",
    "dtype",
    "seed",
    "cache_dtype",
}


@given(edits(add_key, of=sections))
def test_an_unknown_key_at_any_depth_is_named(tmp_path_factory, edited):
    values, key = edited
    assert refusal(values, tmp_path_factory).startswith(f"unknown key {key!r} given")


def spell_wrong(draw, values, path):
    section, key = dig(values, path[:-1]), path[-1]
    at = draw(st.integers(0, len(key) - 1))
    wrong = draw(st.sampled_from([key[:at] + key[at] + key[at:], key[:at] + "X" + key[at + 1 :]]))
    section[wrong] = section.pop(key)
    return ".".join((*path[:-1], wrong)), path


@given(edits(spell_wrong))
def test_a_misspelt_key_is_the_one_that_is_named(tmp_path_factory, edited):
    values, (wrong, path) = edited
    said = refusal(values, tmp_path_factory)
    if path[-1] == "kind":  # without its kind nothing can be said of the keys beside it
        assert said.startswith(".".join(path[:-1]))
    else:
        assert said.startswith(f"unknown key {wrong!r} given")


def drop(draw, values, path):
    del dig(values, path[:-1])[path[-1]]
    return path


@given(edits(drop))
def test_a_missing_key_is_named_unless_it_has_a_default(tmp_path_factory, edited):
    values, path = edited
    try:
        Profile.model_validate(values)
    except ValueError:
        said = refusal(values, tmp_path_factory)
        key = ".".join(path[:-1]) if path[-1] == "kind" else ".".join(path)
        assert said.startswith((f"key {key!r} is missing", f"{key} is "))
    else:
        assert path[-1] in KNOWN


def put_wrong(draw, values, path):
    dig(values, path[:-1])[path[-1]] = draw(st.sampled_from(WRONG))
    return path


@given(edits(put_wrong))
def test_a_value_of_another_type_or_out_of_range_is_named(tmp_path_factory, edited):
    values, path = edited
    if path == ("label",) and isinstance(values["label"], str):
        return  # a label may be any text
    if path[-1] in ("asset", "id") and isinstance(dig(values, path), str):
        return  # so may a name in data/assets.yaml; whether it is there is asked when it is fetched
    said = refusal(values, tmp_path_factory)
    head = said.split(" is ")[0].removeprefix("key ").strip("'").removeprefix("unknown key '").split("'")[0]
    key = ".".join(path)
    assert head == key or head.startswith(f"{key}.") or key.startswith(f"{head}."), said


def put_small(draw, values, path):
    """Numbers below what is allowed, at keys of which there is a least one."""
    section, key = dig(values, path[:-1]), path[-1]
    least = section[key]
    wrong = draw(st.integers(-(10**6), 0))
    section[key] = [wrong, *least[1:]] if isinstance(least, list) else wrong
    return path


def counted(values) -> list[tuple]:
    free = {"seed", "cold_repetitions", "warmups", "seeds", "arms"}
    found = []
    for path in places(values):
        value = dig(values, path)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, (int, float)) and not isinstance(first, bool) and path[-1] not in free:
            found.append(path)
    return found


@given(edits(put_small, of=counted))
def test_a_number_that_is_not_positive_is_named(tmp_path_factory, edited):
    values, path = edited
    assert refusal(values, tmp_path_factory).startswith(".".join(path))


@given(st.sampled_from(sorted(VALID)), st.data())
def test_a_key_written_twice_is_named(tmp_path_factory, name, data):
    lines = (DATA / "profiles" / f"{name}.yaml").read_text().splitlines()
    tops = [line for line in lines if line and line[0].isalpha() and line.split(":")[1].strip()]
    line = data.draw(st.sampled_from(tops))
    path = tmp_path_factory.getbasetemp() / "twice.yaml"
    path.write_text("\n".join([*lines, line]) + "\n")
    with pytest.raises(KvlibError, match=f"key '{line.split(':')[0]}' is written twice"):
        load_profile(str(path))


@given(st.sampled_from(sorted(VALID)), st.data())
def test_overrides_are_held_to_the_same_rules(name, data):
    key = ".".join(data.draw(st.sampled_from(places(VALID[name]))))
    part = data.draw(KEYS)
    leaf = not isinstance(dig(VALID[name], key.split(".")), dict)
    with pytest.raises(KvlibError) as refused:
        load_profile(name, {f"{key}.{part}.{part}": 1} if leaf else {f"{key}.{part}_{part}": 1})
    assert "\n" not in str(refused.value) and key.split(".")[0] in str(refused.value)


LABELS = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=30)


@given(st.sampled_from(sorted(VALID)), st.integers(0, 10**9), LABELS, st.floats(1e-6, 1e6))
def test_a_valid_profile_comes_back_as_it_was(tmp_path_factory, name, seed, label, penalty):
    path = tmp_path_factory.getbasetemp() / "valid.yaml"
    values = copy.deepcopy(VALID[name]) | {"seed": seed, "label": label}
    values["pair"]["source"]["penalty"] = penalty
    path.write_text(yaml.safe_dump(values, allow_unicode=True), "utf-8")
    found = load_profile(str(path))
    assert (found.seed, found.label, found.pair.source.penalty) == (seed, label, penalty)
    path.write_text(yaml.safe_dump(found.model_dump(mode="json"), allow_unicode=True), "utf-8")
    assert load_profile(str(path)) == found


@given(
    st.binary(max_size=60)
    | st.text(max_size=40).map(str.encode)
    | st.sampled_from([b"[" * 5000, b"a: &a [*a]", b"? [1]\n: 2", b"1: 2"])
)
def test_whatever_stands_in_the_file_is_one_sentence(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    with pytest.raises(KvlibError) as refused:
        load_profile(str(path))
    assert "\n" not in str(refused.value)


WHOLE = [
    name
    for name in profile_names()
    if "extends" not in yaml.safe_load((DATA / "profiles" / f"{name}.yaml").read_text())
]


@given(
    st.sampled_from(WHOLE), st.floats(0, 1)
)  # one that extends another is a profile wherever its changes end
def test_a_truncated_profile_is_refused_or_still_a_profile(tmp_path_factory, name, share):
    content = (DATA / "profiles" / f"{name}.yaml").read_bytes()
    path = tmp_path_factory.getbasetemp() / "cut.yaml"
    path.write_bytes(content[: int(len(content) * share)])
    try:
        found = load_profile(str(path))
    except KvlibError as refused:
        assert "\n" not in str(refused)
    else:  # cut in the white space or the comment at its end
        assert found == load_profile(name) or len(content) * share > 0.95 * len(content)
