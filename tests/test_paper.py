"""The study's own profile and the shipped pairs, with other sizes and places only, from nothing to a book, without a network."""

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvlib.study.profile import load_profile, profile_names
from kvlib.study.records import read_lines
from kvlib.study.run import Run, read_summary
from kvlib.study.stages import run_confirmation, run_frozen_evaluation, run_pair, run_screening
from tests.standins import save_fineweb, save_pair, save_profile, save_wikitext, texts_of

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = {"paper": "llama", "llama-instruct": "llama", "qwen3": "qwen3"}
CHOICES = (
    "seed", "pair.dtype", "training.dtype", "training.cache_dtype", "screening.learning_rates", "screening.ranks",
    "screening.select", "screening.finalists", "confirmation", "evaluation.forcings", "latency.modes", "latency.breakdown",
)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    wikitext: Path
    fineweb: Path


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Texts:
    folder = tmp_path_factory.mktemp("texts")
    splits = {"train": 40, "validation": 3, "test": 10}
    return Texts(save_wikitext(folder / "wikitext", splits), save_fineweb(folder / "fineweb", 8))


def small(folder: Path, name: str, texts: Texts, family: str | None = None) -> Path:
    pair = save_pair(folder / "models", family or FAMILIES[name], texts_of(texts.wikitext))
    return save_profile(folder, name, pair, texts.wikitext, texts.fineweb)


@pytest.fixture(scope="module")
def paper_run(tmp_path_factory, texts) -> Path:
    """The run's folder, made by the command line as a person would, the hub switched off."""
    home = tmp_path_factory.mktemp("paper")
    profile = small(home, "paper", texts)
    found = kvlib(home, "run", "--profile", str(profile))
    assert found.returncode == 0, found.stdout + found.stderr
    return home / "results" / "small-paper"


def kvlib(home: Path, *arguments: str) -> subprocess.CompletedProcess:
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return subprocess.run(
        [sys.executable, "-m", "kvlib", *arguments], cwd=ROOT, text=True, capture_output=True,
        env={**os.environ, **offline, "KVLIB_HOME": str(home), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def page(run: Path, name: str) -> str:
    """The text of a page of the book, without its code."""
    found = next(run.glob(f"book/**/{name}.html")).read_text()
    found = re.sub(r"(?s)<(script|style|pre).*?</\1>", "", found)
    found = found[found.index("<article") : found.index("</article>")]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", found)))


def test_every_profile_of_hub_models_is_tried_here():
    hub = [name for name in profile_names() if load_profile(name).pair.target.kind == "hub"]
    assert set(hub) == set(FAMILIES)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_small_profile_differs_in_sizes_counts_and_places_only(tmp_path, texts, name):
    given, wanted = (
        load_profile(str(small(tmp_path, name, texts))).model_dump(),
        load_profile(name).model_dump(),
    )
    for key in CHOICES:
        ours, theirs = given, wanted
        for part in key.split("."):
            ours, theirs = ours[part], theirs[part]
        assert ours == theirs, key
    for name, text in wanted["corpus"]["texts"].items():
        for key in ("config", "split", "layout", "column", "title", "streaming", "licence"):
            assert given["corpus"]["texts"][name][key] == text[key]
    assert all(
        part["text"] == given["partitions"][name]["text"]
        for name, part in wanted["partitions"].items()
        if isinstance(part, dict)
    )


def test_the_page_on_another_pair_shows_a_profile_that_is_shipped_and_one_that_is_valid(tmp_path):
    shown = re.findall(r"(?s)```yaml\n(.*?)```", (ROOT / "book" / "another_pair.md").read_text())
    assert yaml.safe_load(shown[0]) == yaml.safe_load((ROOT / "data" / "profiles" / "qwen3.yaml").read_text())
    for content in shown:
        path = tmp_path / "shown.yaml"
        path.write_text(content)
        assert load_profile(str(path)).pair.target.kind == "hub"


def test_the_papers_counts_are_the_studys():
    profile = load_profile("paper")
    study = yaml.safe_load((ROOT / "data" / "published.yaml").read_text())["protocol"]
    assert profile.screening.select == study["selected_for_scale"]
    assert profile.screening.finalists == study["confirmed"]
    assert len(profile.confirmation.seeds) == study["seeds"]
    assert profile.partitions.final.items == study["final_prompts"]
    assert len(profile.latency.prefix_tokens) == study["prefix_lengths"]
    assert set(profile.latency.warmups) == {20} and set(profile.latency.repetitions) == {50}
    assert (profile.prompt.prefix_tokens, profile.prompt.forced_steps) == (256, 32)


def test_the_run_is_whole_and_every_number_of_it_verifies(paper_run):
    found = kvlib(paper_run.parents[1], "verify", "small-paper")
    assert found.returncode == 0 and "everything matches" in found.stdout, found.stdout + found.stderr
    assert len(read_summary(paper_run / "screening")["arms"]) == 20


def test_every_partition_is_of_the_text_that_it_names_and_final_is_opened_after_the_freeze(paper_run):
    parts = json.loads((paper_run / "pair" / "partitions.json").read_text())["partitions"]
    assert "build" not in parts
    begins = {"final": "Test ", "latency": "https://example.org/"}
    for name, part in parts.items():
        assert all(a["title"].startswith(begins.get(name, "Train ")) for a in part["articles"]), name
    assert not any("tokens_sha256" in item for item in parts["final"]["items"])
    assert read_lines(paper_run / "frozen_evaluation" / "ledger.jsonl")


def test_the_record_says_what_was_read_of_each_text(paper_run):
    corpus = read_summary(paper_run / "pair")["corpus"]
    by_name = {text["text"]: text for text in corpus["texts"]}
    assert [by_name[name]["split"] for name in ("test", "train", "web")] == ["test", "train", "train"]
    assert (
        by_name["web"]["documents"] == 6 and by_name["web"]["articles"] == 3
    )  # every other page is too short
    assert by_name["train"]["documents"] == 32 and by_name["test"]["licence"] == "CC BY-SA 3.0 and GFDL"
    assert sum(text["articles"] for text in corpus["texts"]) == corpus["articles"]


def test_the_book_tells_of_this_pair_and_this_text(paper_run):
    chapter, comparison, front = (page(paper_run, name) for name in ("00_pair", "10_study_and_run", "index"))
    assert "nothing was pruned" in chapter and "Nothing was pruned for this run" in chapter
    assert "pruned from the target" not in chapter and "neither the pruning" not in chapter
    assert "from the text test: final" in chapter and "What was read" in chapter
    assert "pruned in closed form" not in comparison and "this run from source to target" in comparison
    for text in (chapter, comparison, front):
        assert "Wikipedia" not in text and "pruned to a width" not in text


@pytest.mark.parametrize(
    ("name", "family"), [("llama-instruct", "llama"), ("qwen3", "qwen3"), ("qwen3", "qwen2")]
)
def test_the_shipped_pairs_run_too(tmp_path, texts, monkeypatch, name, family):
    monkeypatch.setenv("KVLIB_HOME", str(tmp_path))
    run = Run.open(str(small(tmp_path, name, texts, family)), results=tmp_path)
    pair, screening, confirmation = run_pair(run), run_screening(run), run_confirmation(run)
    assert pair["gate"]["passed"] and pair["target"]["dtype"] == "bfloat16"
    assert len(screening["chosen"]) == 6
    assert all(arm["kl32"] is not None for arm in screening["arms"])
    final = run_frozen_evaluation(run)
    assert final["frozen"] == confirmation["manifest_hash"]
