"""Revisions of hub models and data sets: resolved once, kept, asked for at every load."""

import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest

from kvlib.pair import load_tokenizer
from kvlib.study import hub, models
from kvlib.study.pairing import run_pair
from kvlib.study.screening import run_screening
from tests.standins import config_of, save_model
from tests.tiny import refused

pytest_plugins = ["tests.hub_fixtures"]
ID, COMMIT, OTHER = "meta-llama/Llama-3.1-8B", "a" * 40, "b" * 40


def test_offline_a_branch_is_the_commit_that_it_was_when_it_was_fetched(hub_cache):
    folder = hub_cache / "models--meta-llama--Llama-3.1-8B"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    assert hub.commit_of(ID, None) == hub.commit_of(ID, "main") == hub.commit_of(ID, COMMIT) == COMMIT
    refused(lambda: hub.commit_of(ID, "other"), match="HF_HUB_OFFLINE")
    shutil.rmtree(folder / "refs")  # fetched by its commit: the only one there is
    assert hub.commit_of(ID, None) == COMMIT
    (folder / "snapshots" / OTHER).mkdir()
    refused(lambda: hub.commit_of(ID, None), match="HF_HUB_OFFLINE")


def test_fetch_downloads_both_models_before_anything_runs(kvlib, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "commit_of", lambda place, revision: COMMIT)
    asked = []
    monkeypatch.setattr(models, "snapshot", lambda place, commit: asked.append((place, commit)) or tmp_path)
    status, _, said = kvlib("fetch", "--profile", "qwen3")
    assert status == 0 and f"target: Qwen/Qwen3-8B-Base at commit {COMMIT[:12]}" in said
    assert asked == [("Qwen/Qwen3-8B-Base", COMMIT), ("Qwen/Qwen3-4B-Base", COMMIT)]
    models.write_json(
        tmp_path / "results" / "qwen3" / "pair" / "revisions.json",
        {"target": OTHER, "source": COMMIT, "texts": {}},
    )
    assert kvlib("fetch", "--profile", "qwen3")[0] == 0 and asked[2:] == [
        ("Qwen/Qwen3-8B-Base", OTHER), ("Qwen/Qwen3-4B-Base", COMMIT),
    ]  # fmt: skip


def test_a_run_keeps_the_commits_that_it_began_with(small_run, monkeypatch):
    asked = []

    def info(self, place, *, revision, repo_type):
        asked.append((place, revision, repo_type))
        return SimpleNamespace(sha=COMMIT if len(asked) < 4 else OTHER)

    monkeypatch.setattr(hub.HfApi, "repo_info", info)
    ids = {
        "pair.target.id": ID,
        "pair.target.revision": "v2",
        "corpus.texts.web.id": "HuggingFaceFW/fineweb",
    }
    run = small_run(**ids)
    first = models.pin_revisions(run)
    assert first["target"] == COMMIT and first["source"] is None
    assert first["texts"] == {"test": None, "train": None, "web": COMMIT}
    assert asked == [(ID, "v2", "model"), ("HuggingFaceFW/fineweb", None, "dataset")]
    asked += [None, None]  # the branch moves
    assert models.pin_revisions(run)["target"] == first["target"]
    assert models.address_of(run, "target") == (ID, COMMIT)


def test_commits_that_were_lost_come_back_from_the_stages_summary(small_run, monkeypatch):
    run = small_run()
    run_pair(run)
    record = run.stage("pair") / "revisions.json"
    before = record.read_bytes()
    record.unlink()
    monkeypatch.setattr(models, "commit_of", lambda *_: pytest.fail("asked the hub again"))
    models.pin_revisions(run)
    assert record.read_bytes() == before


def test_every_load_asks_for_the_kept_commit(small_run, small_pair, monkeypatch):
    run = small_run(**{"pair.target.id": ID})
    monkeypatch.setattr(models, "commit_of", lambda *_: COMMIT)
    asked = {}

    def downloaded(place, *, revision, **_):
        asked["snapshot"] = revision
        return str(small_pair.places["target"])

    def tokenizer(place, *, revision):
        asked["tokenizer"] = place, revision

    def config(place, *, revision):
        asked["config"] = place, revision

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    monkeypatch.setattr(models, "load_tokenizer", tokenizer)
    models.load_pair_model(run, "target")
    models.load_pair_tokenizer(run)
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", config)
    models.load_pair_config(run, "target")
    assert asked == {"snapshot": COMMIT, "tokenizer": (ID, COMMIT), "config": (ID, COMMIT)}


def test_a_local_model_that_changes_during_a_run_is_noticed(small_run, small_pair):
    run = small_run()
    run_pair(run)
    tokenizer = load_tokenizer(small_pair.places["source"])
    save_model(small_pair.places["source"], config_of("llama", 48, len(tokenizer)), tokenizer, 7)
    refused(
        lambda: run_screening(run), match="the source's weights are not those that the pair stage recorded"
    )
