"""Draw the partitions of a corpus, by article, disjoint and seeded, before anything runs.

Final and validation prompts are spans of characters, so that the final text is not even tokenised when the
partitions are made. Windows and prefixes are spans of tokens of an article.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from kvlib.errors import KvlibError
from kvlib.study.corpus import Article
from kvlib.study.partitions import (
    Kind,
    Partition,
    Partitions,
    Span,
    content_tokens,
    encode,
    hash_ids,
    hash_text,
)

CHARACTERS_PER_TOKEN = 8  # room given to a prompt: English has about 4.4, no article of ours more than 5.5
LONG_CHARACTERS_PER_TOKEN = 6  # from so many characters per token on, a prefix surely fits an article
PARAGRAPH_REACH = (
    400  # a prompt starts at a paragraph if one begins within so many characters, else at a word
)


@dataclass(frozen=True)
class PartitionRequest:
    """`items` spans of `tokens_each` tokens (a BOS included where one is added) from `articles` articles.

    origin: only of articles of this text, where the corpus has several.
    """

    kind: Kind
    articles: int
    items: int
    tokens_each: int
    origin: str | None = None


def plan_partitions(
    articles: list[Article],
    requests: dict[str, PartitionRequest],
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    characters_per_token: int = CHARACTERS_PER_TOKEN,
) -> Partitions:
    """Draw every requested partition from the articles, none of them twice.

    Drawn in this order: prefixes, because long articles are few; `final`, so that it is a fair sample of the
    rest; windows; the other prompts, which need least. No article of `final` is ever tokenised here. Raises
    KvlibError where there is too little text, with what was asked and what there is.
    """
    for what in ("title", "sha256"):
        if len({getattr(article, what) for article in articles}) < len(articles):
            raise KvlibError(
                f"two articles have the same {what}; give every article a title and text of its own"
            )
    pool = list(articles)
    random.Random(f"{seed}/articles").shuffle(pool)
    seen: set[str] = set()  # titles that were tokenised

    def slots_of(name: str, request: PartitionRequest, article: Article) -> list[Span]:
        if request.kind == "prompts":
            slots = list(_prompt_slots(article, request.tokens_each * characters_per_token))
        else:
            seen.add(article.title)
            slots = _window_slots(article, request.tokens_each, tokenizer)
        if request.kind != "prefixes":  # a prefix is an article's beginning, wherever it can be
            random.Random(f"{seed}/{name}/{article.title}").shuffle(slots)
        return slots

    parts = {}
    rank = {"prefixes": 0, "windows": 2, "prompts": 3}
    for name in sorted(requests, key=lambda name: 1 if name == "final" else rank[requests[name].kind]):
        request = requests[name]
        candidates = [article for article in pool if article.origin == request.origin]
        if request.kind == "prefixes":
            candidates.sort(key=partial(_is_short, request.tokens_each * LONG_CHARACTERS_PER_TOKEN))
        elif name == "final":
            candidates = [article for article in candidates if article.title not in seen]
        drawn = _draw(name, request, candidates, partial(slots_of, name, request))
        chosen = tuple(article for article, _ in drawn)
        spans = tuple(_round_robin([slots for _, slots in drawn], request.items))
        parts[name] = Partition(request.kind, request.tokens_each, chosen, spans)
        titles = {article.title for article in chosen}
        pool = [article for article in pool if article.title not in titles]
    return Partitions(seed, {name: parts[name] for name in requests})


def _is_short(characters: int, article: Article) -> bool:
    return len(article.text) < characters


def _draw(
    name: str, request: PartitionRequest, candidates: list[Article], slots_of: Callable[[Article], list[Span]]
) -> list[tuple[Article, list[Span]]]:
    """The first articles in order that together have room; while they have not, the least roomy makes way."""
    drawn: list[tuple[Article, list[Span]]] = []
    with_room = 0
    for article in candidates:
        slots = slots_of(article)
        if not slots:
            continue
        with_room += 1
        drawn.append((article, slots))
        if len(drawn) > request.articles:
            drawn.remove(min(reversed(drawn), key=lambda entry: len(entry[1])))
        if len(drawn) == request.articles and sum(len(slots) for _, slots in drawn) >= request.items:
            return drawn
    room = sum(len(slots) for _, slots in drawn)
    raise KvlibError(
        f"too little text for partition {name}{f' in {request.origin}' if request.origin else ''}: asked for {request.items} {request.kind} of "
        f"{request.tokens_each} tokens from {request.articles} articles; of the {len(candidates)} articles "
        f"left {with_room} are long enough, and the best {len(drawn)} hold {room}: ask for less or give more"
    )


def _round_robin(slots: list[list[Span]], items: int) -> Iterator[Span]:
    """One slot of each article in turn, so that any first part of the items is spread over the articles."""
    turns = max(len(each) for each in slots)
    in_turn = (each[turn] for turn in range(turns) for each in slots if turn < len(each))
    for _, span in zip(range(items), in_turn, strict=False):
        yield span


def _prompt_slots(article: Article, characters: int) -> Iterator[Span]:
    """Spans of at least `characters`, none overlapping, from a paragraph's or word's start to a word end."""
    text, position = article.text, 0
    while (start := _next_start(text, position)) is not None and start + characters <= len(text):
        space = re.compile(r"\s|\Z").search(text, start + characters)
        position = space.start()
        yield _span(article, start, position)


def _next_start(text: str, position: int) -> int | None:
    if position == 0:
        return 0
    paragraph = text.find("\n\n", position, position + PARAGRAPH_REACH)
    word = re.compile(r"\s(?=\S)").search(text, position)
    if paragraph >= 0:
        return paragraph + 2
    return word.end() if word else None


def _window_slots(article: Article, tokens_each: int, tokenizer: PreTrainedTokenizerBase) -> list[Span]:
    """Every window of the article, side by side from its beginning."""
    content, _ = content_tokens(tokenizer, tokens_each)
    ids, offsets = encode(tokenizer, article.text)
    slots = []
    for start in range(0, len(ids) - content + 1, content):
        window = slice(start, start + content)
        first, last = offsets[start][0], offsets[start + content - 1][1]
        slots.append(_span(article, first, last, start_token=start, tokens_sha256=hash_ids(ids[window])))
    return slots


def _span(article: Article, start: int, end: int, **tokens) -> Span:
    return Span(article.title, start, end, hash_text(article.text[start:end]), **tokens)
