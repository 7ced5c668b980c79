"""Partitions: disjoint by article, seeded, hashed, the final text left untokenised, mismatches named."""

import json
from itertools import combinations

import pytest
import tokenizers
import torch

from kvlib.errors import KvlibError
from kvlib.study import planning
from kvlib.study.corpus import Article, build_word_tokenizer, generated_articles
from kvlib.study.partitions import Partitions
from kvlib.study.planning import PartitionRequest, plan_partitions

REQUESTS = {
    "build": PartitionRequest("windows", 4, 6, 64),
    "screen_train": PartitionRequest("windows", 3, 8, 64),
    "screen_validate": PartitionRequest("prompts", 2, 5, 24),
    "confirm_train": PartitionRequest("windows", 3, 8, 64),
    "confirm_validate": PartitionRequest("prompts", 2, 5, 24),
    "final": PartitionRequest("prompts", 5, 12, 24),
    "latency": PartitionRequest("prefixes", 2, 2, 200),
}


@pytest.fixture(scope="module")
def articles():
    return generated_articles(21, 40, seed=1)


@pytest.fixture(scope="module")
def tokenizer(articles):
    return build_word_tokenizer(articles)


@pytest.fixture(scope="module")
def partitions(articles, tokenizer):
    return plan_partitions(articles, REQUESTS, 7, tokenizer)


def with_bos(articles):
    tokenizer = build_word_tokenizer(articles)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_partitions_share_no_article_and_have_what_was_asked(partitions, tokenizer):
    titles = {name: {a.title for a in part.articles} for name, part in partitions.parts.items()}
    assert all(titles[one].isdisjoint(titles[other]) for one, other in combinations(titles, 2))
    for name, request in REQUESTS.items():
        assert len(titles[name]) == request.articles
        assert {item.article for item in partitions.items(name)} == titles[name]
        tokens = partitions.tokens(name, tokenizer)
        assert tokens.shape == (request.items, request.tokens_each) and tokens.dtype == torch.int64


def test_spans_of_one_article_never_overlap(partitions):
    for part in partitions.parts.values():
        for one, other in combinations(part.spans, 2):
            if one.article == other.article:
                assert (
                    one.end_character <= other.start_character or other.end_character <= one.start_character
                )


def test_items_are_spread_evenly_and_any_first_part_too(partitions):
    for part in partitions.parts.values():
        first = [span.article for span in part.spans[: len(part.articles)]]
        assert len(set(first)) == min(len(part.articles), len(part.spans))


def test_final_articles_are_not_tokenised(articles, tokenizer, monkeypatch):
    seen = []
    encode = planning.encode
    monkeypatch.setattr(planning, "encode", lambda tok, text: seen.append(text) or encode(tok, text))
    partitions = plan_partitions(articles, REQUESTS, 7, tokenizer)
    assert seen and not {article.text for article in partitions.parts["final"].articles} & set(seen)


def test_prompts_begin_and_end_at_words_and_hold_their_tokens(partitions, articles, tokenizer):
    texts = {article.title: article.text for article in articles}
    part = partitions.parts["final"]
    for span in part.spans:
        around = texts[span.article][max(0, span.start_character - 1) : span.end_character + 1]
        assert span.start_character == 0 or around[0].isspace()
        assert span.end_character == len(texts[span.article]) or around[-1].isspace()
    for row, item in zip(partitions.tokens("final", tokenizer), partitions.items("final"), strict=True):
        assert item.text.split()[:24] == tokenizer.convert_ids_to_tokens(row.tolist())


def test_windows_text_and_tokens_agree(partitions, tokenizer):
    for name in ("build", "latency"):
        for row, item in zip(partitions.tokens(name, tokenizer), partitions.items(name), strict=True):
            assert item.text.split() == tokenizer.convert_ids_to_tokens(row.tolist())


def test_a_bos_stands_first_and_counts(articles):
    tokenizer = with_bos(articles)
    partitions = plan_partitions(articles, REQUESTS, 7, tokenizer)
    for name, request in REQUESTS.items():
        tokens = partitions.tokens(name, tokenizer)
        assert tokens.shape[1] == request.tokens_each
        assert (tokens[:, 0] == tokenizer.bos_token_id).all() and (
            tokens[:, 1:] != tokenizer.bos_token_id
        ).all()


def test_the_same_seed_gives_the_same_manifest_and_another_another(articles, tokenizer, partitions):
    assert plan_partitions(articles, REQUESTS, 7, tokenizer).manifest() == partitions.manifest()
    assert plan_partitions(articles, REQUESTS, 8, tokenizer).manifest() != partitions.manifest()


def test_a_manifest_read_back_gives_the_same_partitions(articles, tokenizer, partitions):
    manifest = json.loads(json.dumps(partitions.manifest()))
    again = Partitions.from_manifest(manifest, articles)
    assert again == partitions
    assert torch.equal(again.tokens("build", tokenizer), partitions.tokens("build", tokenizer))
    assert again.summary()["final"]["hash"] == manifest["partitions"]["final"]["hash"]


def edit_article(manifest, articles):
    title = manifest["partitions"]["final"]["articles"][0]["title"]
    return [
        Article(a.title, a.text + ("!" if a.title == title else "")) for a in articles
    ], f"article '{title}'"


def edit_span(manifest, articles):
    manifest["partitions"]["build"]["items"][2]["start_character"] += 1
    return articles, "item 2 of partition build"


def edit_count(manifest, articles):
    manifest["partitions"]["final"]["items"].pop()
    return articles, "partition final has hash"


def remove_article(manifest, articles):
    title = manifest["partitions"]["latency"]["articles"][1]["title"]
    return [a for a in articles if a.title != title], f"'{title}' of partition latency is not in the corpus"


def share_article(manifest, articles):
    manifest["partitions"]["copy"] = manifest["partitions"]["build"]
    return articles, "stands in partitions build and copy"


def lose_field(manifest, articles):
    del manifest["partitions"]["build"]["tokens_each"]
    return articles, "lacks a field"


@pytest.mark.parametrize(
    "damage",
    [edit_article, edit_span, edit_count, remove_article, share_article, lose_field],
    ids=lambda f: f.__name__,
)
def test_a_manifest_that_does_not_match_names_what(articles, partitions, damage):
    manifest = json.loads(json.dumps(partitions.manifest()))
    articles, message = damage(manifest, articles)
    with pytest.raises(KvlibError, match=message):
        Partitions.from_manifest(manifest, articles)


def test_windows_with_another_tokenizer_are_refused(articles, partitions):
    other = build_word_tokenizer([*articles, Article("more", "aardvark")])
    with pytest.raises(KvlibError, match="item 0 of partition build .* other tokens"):
        partitions.tokens("build", other)


def test_too_little_text_says_what_was_asked_and_what_there_is(articles, tokenizer):
    more = REQUESTS | {"screen_train": PartitionRequest("windows", 3, 80, 64)}
    with pytest.raises(
        KvlibError,
        match="screen_train: asked for 80 windows of 64 tokens from 3 articles; of the 1. articles left",
    ):
        plan_partitions(articles, more, 7, tokenizer)
    with pytest.raises(KvlibError, match="too little text for partition latency.* 0 are long enough"):
        plan_partitions(
            articles, REQUESTS | {"latency": PartitionRequest("prefixes", 2, 2, 5000)}, 7, tokenizer
        )


def test_a_prompt_with_too_few_tokens_is_named(articles, tokenizer):
    partitions = plan_partitions(articles, REQUESTS, 7, tokenizer, characters_per_token=3)
    with pytest.raises(KvlibError, match="item 0 of partition final .*more characters_per_token"):
        partitions.tokens("final", tokenizer)


def test_an_unknown_partition_lists_the_known(partitions):
    with pytest.raises(KvlibError, match="no partition 'finale'.*final"):
        partitions.items("finale")
