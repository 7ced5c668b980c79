"""Whatever is written comes back, and of a file that was cut or changed anywhere nothing comes back."""

import math
import os
import tempfile

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvlib import KvlibError
from kvlib.cache import Geometry
from kvlib.maps import ResidualMap, load_map, save_map
from kvlib.study.folders import check_folder, write_folder
from kvlib.study.records import (
    append_line,
    hash_json,
    read_json,
    read_lines,
    read_table,
    read_tensors,
    run_lock,
    write_json,
    write_table,
    write_tensors,
)

NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
RECORD = st.dictionaries(st.text(max_size=6).filter(lambda key: key != "seal"), JSON, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def columns(rows: int):
    return st.one_of(
        arrays.arrays(np.float64, rows, elements=st.floats(allow_nan=False)),
        arrays.arrays(np.int64, rows),
        arrays.arrays(np.bool_, rows),
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=rows, max_size=rows),
        st.lists(st.none() | st.text("abc", max_size=3), min_size=rows, max_size=rows),
    )


@st.composite
def tables(draw):
    rows = draw(st.integers(0, 6))
    names = draw(st.lists(st.text("abcde", min_size=1, max_size=3), min_size=1, max_size=4, unique=True))
    return pd.DataFrame({name: draw(columns(rows)) for name in names})


@st.composite
def tensors(draw):
    kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
    shapes = st.lists(st.integers(0, 3), max_size=3)
    names = draw(st.lists(st.text("abc.", min_size=1, max_size=4), min_size=1, max_size=3, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return {name: (torch.randn(draw(shapes), generator=generator) * 9).to(draw(kinds)) for name in names}


@given(RECORD)
def test_json_comes_back_and_hashes_alike(folder, value):
    path = write_json(folder / "value.json", value)
    assert read_json(path) == value and hash_json(read_json(path)) == hash_json(value)


@given(st.dictionaries(st.integers(-3, 300), st.tuples(st.integers(0, 2)), max_size=4))
def test_keys_that_are_numbers_come_back_as_the_text_they_are_in_json(folder, value):
    path = write_json(folder / "numbers.json", value)
    assert read_json(path) == {str(key): list(inner) for key, inner in value.items()}


@given(tables())
def test_tables_come_back(folder, table):
    found = read_table(write_table(folder / "table.parquet", table))
    pd.testing.assert_frame_equal(found, table, check_dtype=False)


@given(tensors(), st.dictionaries(st.text("abc", max_size=3), st.text(max_size=5), max_size=3))
def test_tensors_come_back(folder, given_tensors, metadata):
    path = folder / "t.safetensors"
    found, described = read_tensors(write_tensors(path, given_tensors, metadata))
    assert described == metadata and found.keys() == given_tensors.keys()
    assert all(torch.equal(found[name], given_tensors[name]) for name in found)
    whole = path.read_bytes()
    assert write_tensors(path, given_tensors, metadata).read_bytes() == whole  # equal tensors are equal files


@given(st.lists(RECORD, min_size=1, max_size=4))
def test_lines_come_back_and_only_a_torn_last_one_is_lost(folder, values):
    path = folder / "lines.jsonl"
    path.unlink(missing_ok=True)
    for value in values:
        append_line(path, value)
    assert read_lines(path) == values
    whole = path.read_bytes()
    for size in {0, 1, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:size])
        assert read_lines(path) == values[: whole[:size].count(b"\n")]
    append_line(path, {"after": 1})
    assert read_lines(path)[-1] == {"after": 1}


@given(st.lists(RECORD, min_size=2, max_size=4), st.data())
def test_a_line_that_is_missing_changed_or_moved_is_refused(folder, values, data):
    path = folder / "lines.jsonl"
    path.unlink(missing_ok=True)
    for number, value in enumerate(values):
        append_line(path, {**value, "number": number})
    lines = path.read_bytes().splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 2))
    spoilt = data.draw(
        st.sampled_from(
            [
                lines[:number] + lines[number + 1 :],
                [*lines[:number], lines[number].replace(b'"number":', b'"numbex":'), *lines[number + 1 :]],
                [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]],
                [*lines, lines[number]],
            ]
        )
    )
    path.write_bytes(b"".join(spoilt))
    with pytest.raises(KvlibError, match="restore it from a copy"):
        read_lines(path)


def written(folder, kind: str):
    """(path, reader) of a small record of a kind."""
    if kind == "json":
        return write_json(folder / "a.json", {"kl32": [0.1, 0.25], "name": "x", "n": 3}), read_json
    if kind == "parquet":
        return write_table(folder / "a.parquet", pd.DataFrame({"p": [1, 2], "kl": [0.1, 0.2]})), read_table
    if kind == "safetensors":
        return write_tensors(folder / "a.safetensors", {"x": torch.arange(5.0)}, {"who": "me"}), read_tensors
    ones = torch.ones(2, 2)
    initial = ResidualMap.initial(ones, ones, 8, 2, generator=torch.Generator().manual_seed(0))
    assert initial.geometry == Geometry(2, 2, 8)
    save_map(initial, folder / "m.safetensors", pair="p", provenance={"step": 8})
    return folder / "m.safetensors", lambda path: load_map(path, pair="p")


RECORDS = ("json", "parquet", "safetensors", "map")


@pytest.mark.parametrize("kind", RECORDS)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(folder, kind, share):
    path, read = written(folder, kind)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole.rstrip()) * share)])
    with pytest.raises(KvlibError) as refused:
        read(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def same(left, right) -> bool:
    if isinstance(left, pd.DataFrame):
        return left.equals(right)
    if isinstance(left, ResidualMap):
        parts = zip(left.tensors().values(), right.tensors().values())
        return left.settings() == right.settings() and all(torch.equal(a, b) for a, b in parts)
    if isinstance(left, tuple):
        return left[1] == right[1] and all(torch.equal(left[0][name], right[0][name]) for name in left[0])
    return left == right


@pytest.mark.parametrize("kind", RECORDS)
@settings(max_examples=200)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_file_changed_anywhere_is_refused_or_says_the_same(folder, kind, share, bit):
    path, read = written(folder, kind)
    whole = read(path)
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = read(path)
    except KvlibError as refused:
        assert "\n" not in str(refused)
    else:
        assert same(found, whole)


@pytest.mark.parametrize("kind", RECORDS)
@given(
    content=st.binary(max_size=200) | st.text(max_size=50).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_other_content_is_refused(folder, kind, content):
    path, read = written(folder, kind)
    path.write_bytes(content)
    with pytest.raises(KvlibError) as refused:
        read(path)
    assert "\n" not in str(refused.value)


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=20), min_size=1, max_size=4),
    st.data(),
)
def test_a_folder_with_a_file_changed_missing_or_too_many_is_refused(folder, files, data):
    def write(place):
        for name, content in files.items():
            (place / name).write_bytes(content)

    place = write_folder(folder / "whole", write)
    assert check_folder(place) == place and [p.name for p in folder.glob(".partial-*")] == []
    name = data.draw(st.sampled_from(sorted(files)))
    change = data.draw(st.sampled_from(["changed", "missing", "too many"]))
    if change == "missing":
        (place / name).unlink()
    else:
        (place / (name if change == "changed" else f"{name}-more")).write_bytes(files[name] + b"!")
    with pytest.raises(KvlibError, match=change):
        check_folder(place)


WRITERS = {
    "json": lambda path: write_json(path, {"n": 1}),
    "table": lambda path: write_table(path, pd.DataFrame({"n": [1]})),
    "tensors": lambda path: write_tensors(path, {"x": torch.ones(2)}),
    "lines": lambda path: append_line(path, {"n": 1}),
    "map": lambda path: save_map(
        ResidualMap.initial(torch.ones(1, 1), torch.ones(1, 1), 4, 1, generator=torch.Generator()),
        path,
        pair="p",
    ),
    "folder": lambda path: write_folder(path, lambda place: (place / "file").write_text("x")),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("number", [13, 28, 30, 122])  # no permission, no space, a read-only disk, no quota
def test_a_folder_that_cannot_be_written_is_one_sentence_and_keeps_what_is_there(
    tmp_path, monkeypatch, kind, number
):
    """Tests run as root, whom permission bits do not bind: the system's answer is given in its place."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", refuse)
        patch.setattr(tempfile, "mkdtemp", refuse)
        with pytest.raises(KvlibError) as refused:
            WRITERS[kind](tmp_path / "a" / "record")
    assert os.strerror(number) in str(refused.value) and "\n" not in str(refused.value)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == []
    WRITERS[kind](tmp_path / "a" / "record")
    assert (tmp_path / "a" / "record").exists()


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_where_a_folder_is_wanted_is_one_sentence(tmp_path, kind):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KvlibError, match="could not be written|no readable|holds a line") as refused:
        WRITERS[kind](tmp_path / "file" / "record")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "read", [read_json, read_table, read_tensors, lambda p: load_map(p, pair=None), check_folder]
)
def test_a_file_that_may_not_be_read_is_one_sentence(tmp_path, monkeypatch, read):
    (tmp_path / "folder").mkdir()
    with pytest.raises(KvlibError) as refused:
        read(tmp_path / "folder")
    assert "\n" not in str(refused.value)
    with pytest.raises(KvlibError):
        read(tmp_path / "folder" / "missing")


def test_a_lock_that_cannot_be_taken_is_one_sentence(tmp_path):
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(KvlibError, match="cannot be used"), run_lock(tmp_path / "run"):
        pass


def test_nan_is_written_by_none(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"n": math.nan})
    with pytest.raises(ValueError):
        append_line(tmp_path / "a.jsonl", {"n": math.nan})
    assert list(tmp_path.iterdir()) == []
