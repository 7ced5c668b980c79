"""`clean` removes what can be made again and never a record; `--stale` what belongs to other settings."""

import json
import re
import shutil

import pytest
import typer

from kvlib.study import cleaning
from kvlib.study.cleaning import caches, pages, stale
from kvlib.study.records import read_record, remove, run_lock, write_json
from kvlib.study.run import Run, read_summary
from tests.test_status import finish, open_run

KEPT = (
    "run.json",
    "screening/summary.json",
    "screening/ridge-old.safetensors",
    "frozen_evaluation/ledger.jsonl",
)


@pytest.fixture
def run(tmp_path) -> Run:
    """A run with every kind of thing in its folder, its pair stage and its final evaluation finished."""
    run = open_run(tmp_path)
    finish(run, "pair", training_dtype="float32")
    finish(run, "screening", finalists=[])
    finish(run, "confirmation", manifest_hash="m")
    finish(run, "frozen_evaluation", frozen="m")
    for name in (
        "screening/windows-old/source.bin", "confirmation/prompts-old/0.safetensors", "screening/ridge-old.safetensors",
        "frozen_evaluation/work-1/prompts-0000.safetensors", "frozen_evaluation/work-1/steps-0000.parquet",
        "screening/arms/direct-old/trained.json", "latency/parts/00032-0123456789abcdef.parquet",
        "notebooks/00_pair.ipynb", "notebooks/01_screening.failed.ipynb", "book/index.html", "book.json",
    ):  # fmt: skip
        (run.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (run.folder / name).write_bytes(b"x" * 1000)
    return run


def names(run: Run, parts) -> set[str]:
    return {str(part.path.relative_to(run.folder)) for part in parts}


def test_caches_and_pages_are_told_apart_and_no_record_is_among_them(run):
    assert names(run, caches(run)) == {
        "screening/windows-old", "confirmation/prompts-old", "frozen_evaluation/work-1/prompts-0000.safetensors",
    }  # fmt: skip
    assert names(run, pages(run)) == {
        "notebooks/00_pair.ipynb", "notebooks/01_screening.failed.ipynb", "book", "book.json",
    }  # fmt: skip


def test_caches_of_an_evaluation_that_is_not_finished_stay(run):
    (run.stage("frozen_evaluation") / "summary.json").unlink()
    assert "frozen_evaluation/work-1/prompts-0000.safetensors" not in names(run, caches(run))


def test_stale_is_what_other_settings_made(run):
    found = names(run, stale(run))
    assert {"screening/windows-old", "screening/ridge-old.safetensors", "screening/arms/direct-old"} <= found
    assert "latency/parts/00032-0123456789abcdef.parquet" in found
    assert "frozen_evaluation/work-1/steps-0000.parquet" not in found


def test_the_command_shows_sizes_removes_and_keeps_every_record(run, kvlib):
    status, out, err = kvlib("clean", "mine", "--yes")
    assert status == 0
    assert "screening/windows-old" in out and "1000 bytes" in out
    assert "removed: 7 of them" in err
    assert not (run.folder / "book").exists() and not (run.folder / "screening" / "windows-old").exists()
    assert all(
        (run.folder / name).exists() for name in (*KEPT, "frozen_evaluation/work-1/steps-0000.parquet")
    )
    assert kvlib("clean", "mine", "--yes")[1].startswith("nothing to remove")


def test_what_kvlib_did_not_make_stays(run, kvlib):
    own = [
        run.folder / name
        for name in ("my-thesis.pdf", "book.notes.md", "notebooks/mine.ipynb", "notebook.md")
    ]
    for path in (*own, run.folder / "book.pdf"):
        path.write_bytes(b"x")
    assert kvlib("clean", "mine", "--yes")[0] == 0
    assert all(path.exists() for path in own)
    assert not (run.folder / "book.pdf").exists()


def test_of_a_link_the_link_goes_and_what_it_leads_to_stays(run, kvlib, tmp_path):
    shutil.move(run.folder / "book", tmp_path / "elsewhere")
    (run.folder / "book").symlink_to(tmp_path / "elsewhere")
    status, out, _ = kvlib("clean", "mine", "--yes")
    assert status == 0 and re.search(r"^book +0 bytes", out, re.MULTILINE)
    assert not (run.folder / "book").is_symlink()
    assert (tmp_path / "elsewhere" / "index.html").exists()


def test_what_could_not_be_removed_is_named(run, kvlib, monkeypatch):
    def kept(path):
        if path.name == "book.json":
            raise PermissionError(13, "Permission denied")
        if path.name != "book":
            remove(path)

    monkeypatch.setattr(cleaning, "remove", kept)
    status, _, err = kvlib("clean", "mine", "--yes")
    assert status == 2 and "removed:" not in err
    assert f"2 of 7 could not be removed ({run.folder / 'book'}, {run.folder / 'book.json'})" in err
    assert not (run.folder / "screening" / "windows-old").exists()


def test_only_caches_leaves_the_pages(run, kvlib):
    kvlib("clean", "mine", "--caches", "--yes")
    assert (run.folder / "book" / "index.html").exists() and (
        run.folder / "notebooks" / "00_pair.ipynb"
    ).exists()
    assert not (run.folder / "screening" / "windows-old").exists()


def test_it_asks_and_a_no_removes_nothing(run, kvlib, monkeypatch):
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda question, **_: asked.append(question))
    status, _, err = kvlib("clean", "mine")
    assert status == 0 and "nothing was removed" in err
    assert asked == ["remove 7 of them, 6.84\xa0KiB?"]
    assert (run.folder / "book" / "index.html").exists()


def test_without_a_terminal_it_wants_to_be_told(run, kvlib):
    status, _, err = kvlib("clean", "mine")
    assert status == 2 and "give --yes" in err
    assert (run.folder / "book" / "index.html").exists()


def test_a_run_at_work_is_left_alone(run, kvlib):
    with run_lock(run.folder):
        status, _, err = kvlib("clean", "mine", "--yes")
    assert status == 2 and "in use by another process" in err
    assert (run.folder / "book" / "index.html").exists()


def test_a_finished_run_loses_nothing_that_verify_or_its_book_needs(kvlib, smoke_run, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    folder = shutil.copytree(smoke_run.folder, tmp_path / "results" / "smoke")
    before = {stage: read_summary(folder / stage) for stage in ("screening", "confirmation", "latency")}
    assert not stale(Run.open("smoke", "smoke", results=folder.parent))
    assert kvlib("clean", "smoke", "--yes")[0] == 0
    status, out, _ = kvlib("verify", "smoke")
    assert status == 0 and "everything matches" in out
    assert before == {stage: read_summary(folder / stage) for stage in before}
    assert json.loads((folder / "run.json").read_text())


def test_of_a_finished_run_only_arms_of_other_settings_are_stale_once_it_was_run_again(smoke_run, tmp_path):
    folder = shutil.copytree(smoke_run.folder, tmp_path / "results" / "smoke")
    changed = Run.open("smoke", "smoke", results=folder.parent, overrides={"screening.ranks": [8, 16]})
    arms = {path.name for path in (folder / "screening" / "arms").iterdir()}
    assert not stale(changed)  # the summary that is there still rests on them
    summary = {
        key: value
        for key, value in read_record(folder / "screening" / "summary.json").items()
        if key != "seal"
    }
    write_json(folder / "screening" / "summary.json", summary | {"key": changed.key("screening")})
    found = {part.path.name for part in stale(changed)}
    assert found & arms == {name for name in arms if "-r4-" in name or "-r12-" in name}
