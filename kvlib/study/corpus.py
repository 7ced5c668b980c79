"""The text of a run: articles from a Wikipedia dump, from documents or generated; kept as a folder."""

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from kvlib.errors import KvlibError
from kvlib.study import wikitext
from kvlib.study.folders import check_folder, write_folder

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
NOUNS = [
    "river",
    "stone",
    "harbour",
    "garden",
    "tower",
    "market",
    "bridge",
    "forest",
    "engine",
    "letter",
    "island",
    "window",
    "captain",
    "painter",
]
VERBS = [
    "carries",
    "follows",
    "finds",
    "keeps",
    "leaves",
    "builds",
    "crosses",
    "watches",
    "paints",
    "sells",
    "repairs",
    "remembers",
]
ADJECTIVES = ["old", "quiet", "small", "bright", "narrow", "distant", "heavy", "young", "broken", "silver"]
PLACES = ["valley", "coast", "capital", "village", "border", "station", "castle", "field"]
FAVOURITES = 5  # nouns that an article speaks about: what came before helps to say what comes next
SENTENCES_PER_PARAGRAPH = 4


@dataclass(frozen=True)
class Article:
    """One document; its title is unique in its corpus. origin: which of the corpus's texts it is of, where it has several."""

    title: str
    text: str
    origin: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


def read_wikipedia_dump(path: Path, min_characters: int) -> list[Article]:
    """Articles of a bz2 MediaWiki dump in its order, cleaned, those below `min_characters` left out.

    Redirects, disambiguation pages and other namespaces are skipped. A few seconds for 100 articles.
    """
    cleaned = ((title, wikitext.clean(source)) for title, source in wikitext.pages(Path(path)))
    return articles_from_documents(cleaned, min_characters)


def articles_from_documents(
    documents: Iterable[tuple[str, str]],
    min_characters: int,
    max_articles: int | None = None,
    *,
    origin: str | None = None,
    without: Iterable[Article] = (),
) -> list[Article]:
    """(title, text) pairs to articles, in order: the seam for any data set, read lazily up to `max_articles`.

    A text seen before is left out, so that no text can stand in two partitions; a title seen before gets a
    number. A document with a title or a text of an article in `without` is left out too.
    """
    others = list(without)
    taken = {article.title for article in others}
    texts = {article.sha256 for article in others}
    articles: list[Article] = []
    titles: dict[str, int] = {}
    for title, text in documents:
        article = Article(title, text.strip(), origin)
        if len(article.text) < min_characters or title in taken or article.sha256 in texts:
            continue
        texts.add(article.sha256)
        while article.title in titles or article.title in taken:
            titles[title] = titles.get(title, 1) + 1
            article = Article(f"{title} ({titles[title]})", article.text, origin)
        titles[article.title] = 1
        articles.append(article)
        if len(articles) == max_articles:
            break
    return articles


def generated_articles(count: int, sentences_each: int, seed: int) -> list[Article]:
    """Made-up text that can be learnt: a small grammar, few nouns per article, verbs that go with nouns."""
    articles = []
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        nouns = rng.sample(NOUNS, FAVOURITES)
        sentences = [_sentence(rng, nouns) for _ in range(sentences_each)]
        starts = range(0, sentences_each, SENTENCES_PER_PARAGRAPH)
        paragraphs = [" ".join(sentences[start : start + SENTENCES_PER_PARAGRAPH]) for start in starts]
        articles.append(Article(f"generated {index:03d}", "\n\n".join(paragraphs)))
    return articles


def _sentence(rng: random.Random, nouns: list[str]) -> str:
    subject, thing = rng.sample(nouns, 2)
    # Three verbs belong to every noun, wherever it stands: the part of the text that can be predicted.
    verb = VERBS[(3 * NOUNS.index(subject) + rng.randrange(3)) % len(VERBS)]
    sentence = f"the {rng.choice(ADJECTIVES)} {subject} {verb} the {thing}"
    if rng.random() < 0.5:
        sentence += f" near the {rng.choice(ADJECTIVES)} {rng.choice(PLACES)}"
    return f"{sentence} ."


def build_word_tokenizer(articles: Iterable[Article]) -> PreTrainedTokenizerFast:
    """One token per word of the articles, in alphabetical order; knows a BOS and adds none."""
    words = sorted({word for article in articles for word in article.text.split()})
    vocabulary = {token: index for index, token in enumerate([UNKNOWN, BOS, EOS, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def save_articles(articles: list[Article], folder: Path) -> None:
    """Write the articles as a `datasets` folder, whole or not at all; a folder already there is replaced."""
    import datasets  # takes a second to import: only runs that touch the corpus pay for it

    columns = {
        "title": [article.title for article in articles],
        "text": [article.text for article in articles],
        "sha256": [article.sha256 for article in articles],
        "origin": [article.origin for article in articles],
    }

    def write(place: Path) -> None:
        with _quiet(datasets):
            datasets.Dataset.from_dict(columns).save_to_disk(place)

    write_folder(folder, write)


def load_articles(folder: Path) -> list[Article]:
    """The articles of a folder that `save_articles` wrote. Raises KvlibError when a byte of it has changed."""
    import datasets

    check_folder(folder)
    try:
        rows = datasets.load_from_disk(str(folder))
        return [Article(row["title"], row["text"], row["origin"]) for row in rows]
    except Exception as error:  # datasets and pyarrow raise many kinds for a folder of something else
        reason = " ".join(str(error).split())
        raise KvlibError(
            f"{folder} is not a whole folder of articles ({reason}); delete the folder and run again, it is made anew"
        ) from error


class _quiet:
    """Context: `datasets` draws no bar of its own; what the caller had set comes back."""

    def __init__(self, datasets):
        self.datasets = datasets

    def __enter__(self) -> None:
        self.were_shown = not self.datasets.are_progress_bars_disabled()
        self.datasets.disable_progress_bars()

    def __exit__(self, *_) -> None:
        if self.were_shown:
            self.datasets.enable_progress_bars()
