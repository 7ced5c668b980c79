"""Records are whole or absent, hashes are stable, one writer at a time, progress can be read while it moves."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from kvlib import KvlibError
from kvlib.study.progress import Progress, read_progress, seconds_left
from kvlib.study.records import (
    append_line,
    canonical_json,
    read_json,
    read_lines,
    read_record,
    read_table,
    read_tensors,
    run_lock,
    write_atomically,
    write_json,
    write_table,
    write_tensors,
)


def test_equal_values_have_one_spelling_and_nan_has_none():
    assert (
        canonical_json({"b": 1, "a": [1, 2]}) == canonical_json({"a": [1, 2], "b": 1}) == '{"a":[1,2],"b":1}'
    )
    with pytest.raises(ValueError):
        canonical_json(math.nan)


def test_tables_and_tensors_come_back(tmp_path):
    table = pd.DataFrame({"prompt": [0, 1], "kl32": [0.1, 0.2], "text": ["a", "b"]})
    pd.testing.assert_frame_equal(read_table(write_table(tmp_path / "t.parquet", table)), table)
    tensors, metadata = read_tensors(
        write_tensors(tmp_path / "t.safetensors", {"x": torch.arange(3)}, {"who": "me"})
    )
    assert tensors["x"].tolist() == [0, 1, 2] and metadata == {"who": "me"}


def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = write_json(tmp_path / "value.json", {"n": 1})

    def fail(file):
        file.write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        write_atomically(path, fail)
    assert read_json(path) == {"n": 1} and [p.name for p in tmp_path.iterdir()] == ["value.json"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("[]", "holds a list"), ("null", "holds a NoneType"), ('{"a": 1, "b": 2}', "carries no seal")],
)
def test_a_record_of_another_shape_is_refused(tmp_path, content, sentence):
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(KvlibError, match=sentence):
        read_record(path, "a", "b")
    write_json(path, {"a": 1})
    with pytest.raises(KvlibError, match="lacks 'b'"):
        read_record(path, "a", "b")


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    def fail(file):
        raise OSError(28, "No space left on device")

    with pytest.raises(KvlibError, match="No space left on device.*free some space"):
        write_atomically(tmp_path / "value.json", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KvlibError, match="could not be written"):
        write_json(tmp_path / "file" / "value.json", {"n": 1})
    with pytest.raises(KvlibError, match="cannot be used"), run_lock(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize(
    ("read", "name"), [(read_json, "a.json"), (read_table, "a.parquet"), (read_tensors, "a.safetensors")]
)
def test_missing_truncated_and_foreign_files_are_one_sentence(tmp_path, read, name):
    path = tmp_path / name
    with pytest.raises(KvlibError, match="is missing.*run that stage first"):
        read(path)
    for content in (b"", b"\x00\xff\xfenonsense", b"{"):
        path.write_bytes(content)
        with pytest.raises(KvlibError, match="delete it and run its stage again") as refusal:
            read(path)
        assert str(path) in str(refusal.value)


def test_a_ledger_only_grows(tmp_path):
    path = tmp_path / "ledger.jsonl"
    assert read_lines(path) == []
    append_line(path, {"n": 1})
    append_line(path, {"n": 2})
    assert [line["n"] for line in read_lines(path)] == [1, 2]
    whole = path.read_text()
    path.write_text(whole + '{"n": ')  # killed in the middle of a line: that line was never written
    assert [line["n"] for line in read_lines(path)] == [1, 2]
    append_line(path, {"n": 3})
    assert [line["n"] for line in read_lines(path)] == [1, 2, 3]
    path.write_text("nonsense\n" + whole)
    with pytest.raises(KvlibError, match="no JSON"):
        read_lines(path)


def test_a_second_writer_is_refused_until_the_first_dies(tmp_path):
    script = "import sys, time; from kvlib.study.records import run_lock\nwith run_lock(sys.argv[1]):\n print('in', flush=True); time.sleep(60)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    with process.stdout as said:
        assert said.readline() == b"in\n"
    with pytest.raises(KvlibError, match="in use by another process"), run_lock(tmp_path):
        pass
    process.kill()
    process.wait()
    with run_lock(tmp_path):
        pass


def test_progress_tells_the_time_left_from_fresh_work_only(tmp_path, monkeypatch):
    path = tmp_path / "progress.json"
    monkeypatch.setenv("KVLIB_PROGRESS", str(path))
    progress = Progress("stage", 10)
    progress.skip(6)
    assert seconds_left({**read_progress(path), "done": 6, "initial": 6}) is None
    state = {"done": 8, "initial": 6, "total": 10, "started": 100.0, "updated": 120.0}
    assert seconds_left(state) == 20.0
    progress.advance(4, "the end")
    assert read_progress(path)["done"] == 10 and read_progress(path)["note"] == "the end"
    assert read_progress(tmp_path / "nowhere") is None


def test_a_link_stays_a_link_and_what_is_no_file_is_left_alone(tmp_path):
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(real)
    write_json(link, {"a": 1})
    assert link.is_symlink() and json.loads(real.read_text())["a"] == 1
    os.mkfifo(pipe)
    for place, what in ((pipe, "a device or a pipe"), (tmp_path, "a folder")):
        with pytest.raises(
            KvlibError, match=f"is {what}, expected a file or a name that is free: name another"
        ):
            write_json(place, {"a": 1})
    assert pipe.is_fifo() and {path.name for path in tmp_path.iterdir()} == {"real.json", "link.json", "pipe"}
