"""Partitions of a corpus, by article: what stands in each, as text, tokens and a manifest with hashes."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from kvlib.errors import KvlibError
from kvlib.study.corpus import Article
from kvlib.study.records import hash_json

Kind = Literal["windows", "prompts", "prefixes"]


@dataclass(frozen=True)
class Span:
    """One item: characters [start_character, end_character) of an article, `sha256` of that text.

    Windows and prefixes also hold where they start among the article's tokens, and the hash of their ids.
    """

    article: str
    start_character: int
    end_character: int
    sha256: str
    start_token: int | None = None
    tokens_sha256: str | None = None


@dataclass(frozen=True)
class Item:
    """A span with its text, for people to read."""

    article: str
    text: str


@dataclass(frozen=True)
class Partition:
    kind: Kind
    tokens_each: int
    articles: tuple[Article, ...]
    spans: tuple[Span, ...]

    def record(self) -> dict:
        """What the manifest says of it; `hash` covers all the rest."""
        articles = [{"title": a.title, "sha256": a.sha256, "characters": len(a.text)} for a in self.articles]
        items = [
            {key: value for key, value in asdict(span).items() if value is not None} for span in self.spans
        ]
        body = {"kind": self.kind, "tokens_each": self.tokens_each, "articles": articles, "items": items}
        return body | {"hash": hash_json(body)}


@dataclass(frozen=True)
class Partitions:
    """The partitions of one run, by name."""

    seed: int
    parts: dict[str, Partition]

    def manifest(self) -> dict:
        return {"seed": self.seed, "partitions": {name: part.record() for name, part in self.parts.items()}}

    def summary(self) -> dict:
        """Counts and hash of each partition, without its articles and items."""
        return {
            name: {"articles": len(part.articles), "items": len(part.spans), "tokens_each": part.tokens_each,
                   "hash": part.record()["hash"], "kind": part.kind, "text": next((article.origin for article in part.articles), None)}
            for name, part in self.parts.items()
        }  # fmt: skip

    @classmethod
    def from_manifest(cls, manifest: dict, articles: Iterable[Article]) -> "Partitions":
        """Partitions as listed, with every hash checked. Raises KvlibError naming the first that differs."""
        try:
            return cls._from_manifest(manifest, {article.title: article for article in articles})
        except (KeyError, TypeError, AttributeError) as error:
            raise KvlibError(
                f"the manifest of the partitions lacks a field or has one of another type ({error!r}); "
                "make the partitions again"
            ) from error

    @classmethod
    def _from_manifest(cls, manifest: dict, by_title: dict[str, Article]) -> "Partitions":
        parts, owner = {}, {}
        for name, record in manifest["partitions"].items():
            texts = [_checked_article(name, entry, by_title) for entry in record["articles"]]
            own = {article.title: article for article in texts}
            spans = tuple(_checked_span(name, index, item, own) for index, item in enumerate(record["items"]))
            parts[name] = Partition(record["kind"], record["tokens_each"], tuple(texts), spans)
            found = parts[name].record()["hash"]
            if found != record["hash"]:
                raise KvlibError(
                    f"partition {name} has hash {found} where its manifest says {record['hash']}: "
                    "the manifest was edited; restore it or make the partitions again"
                )
            for article in texts:
                if owner.setdefault(article.title, name) != name:
                    raise KvlibError(
                        f"article {article.title!r} stands in partitions {owner[article.title]} and {name}; "
                        "an article may stand in one: make the partitions again"
                    )
        return cls(manifest["seed"], parts)

    def items(self, name: str) -> list[Item]:
        part = self._part(name)
        texts = {article.title: article.text for article in part.articles}
        return [
            Item(span.article, texts[span.article][span.start_character : span.end_character])
            for span in part.spans
        ]

    def tokens(self, name: str, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
        """Token ids (items, tokens_each) int64. Windows are checked against the hash of their ids."""
        part = self._part(name)
        content, bos = content_tokens(tokenizer, part.tokens_each)
        texts = {article.title: article.text for article in part.articles}
        # Windows of one article are cut from one encoding of it; a prompt is encoded by itself.
        encoded = {}
        if part.kind != "prompts":
            encoded = {title: encode(tokenizer, text)[0] for title, text in texts.items()}
        rows = []
        for index, (span, item) in enumerate(zip(part.spans, self.items(name), strict=True)):
            start = span.start_token or 0
            ids = encoded[span.article] if encoded else encode(tokenizer, item.text)[0]
            ids = ids[start : start + content]
            where = f"item {index} of partition {name} (article {span.article!r})"
            if len(ids) < content:
                raise KvlibError(
                    f"{where} has {len(ids)} tokens where {content} are needed: its text has longer tokens "
                    "than were planned for; make the partitions again with more characters_per_token"
                )
            if span.tokens_sha256 is not None and hash_ids(ids) != span.tokens_sha256:
                raise KvlibError(
                    f"{where} has other tokens than its manifest says: the partitions were made with another "
                    "tokenizer; use that one or make the partitions again"
                )
            rows.append(bos + ids)
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), part.tokens_each)

    def _part(self, name: str) -> Partition:
        if name not in self.parts:
            raise KvlibError(f"there is no partition {name!r}; this run has {', '.join(self.parts)}")
        return self.parts[name]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids and character offsets, nothing added; `verbose` would warn of an article longer than the model."""
    if not tokenizer.is_fast:
        raise KvlibError(
            f"{type(tokenizer).__name__} gives no character offsets; load the tokenizer in its fast form"
        )
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return encoding["input_ids"], encoding["offset_mapping"]


def content_tokens(tokenizer: PreTrainedTokenizerBase, tokens_each: int) -> tuple[int, list[int]]:
    """How many of `tokens_each` are text, and the BOS that stands before them where one is added."""
    first = tokenizer("x")["input_ids"][:1]
    bos = first if first and first[0] == tokenizer.bos_token_id else []
    return tokens_each - len(bos), bos


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def hash_ids(ids: list[int]) -> str:
    return hash_json(list(ids))


def _checked_article(name: str, entry: dict, by_title: dict[str, Article]) -> Article:
    title = entry["title"]
    if title not in by_title:
        raise KvlibError(
            f"article {title!r} of partition {name} is not in the corpus; use the corpus that the run was "
            "made with"
        )
    found = by_title[title].sha256
    if found != entry["sha256"]:
        raise KvlibError(
            f"article {title!r} of partition {name} has hash {found} where the manifest says "
            f"{entry['sha256']}; use the corpus that the run was made with, or make the partitions again"
        )
    return by_title[title]


def _checked_span(name: str, index: int, item: dict, own: dict[str, Article]) -> Span:
    span = Span(**item)
    text = own[span.article].text if span.article in own else ""
    found = hash_text(text[span.start_character : span.end_character])
    if found != span.sha256:
        raise KvlibError(
            f"item {index} of partition {name} (article {span.article!r}) has hash {found} where the "
            f"manifest says {span.sha256}; use the corpus that the run was made with, or make them again"
        )
    return span
