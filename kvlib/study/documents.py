"""Articles out of data sets: lines put together at their headings, and no more read than is kept."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.load_errors import load_error
from kvlib.study.corpus import Article, articles_from_documents
from kvlib.study.hub import local_folder
from kvlib.study.inputs import DatasetCorpus, DatasetText

# " = Title = " begins an article, " = = Section = = " a part of one.
HEADING = re.compile(r"^ = (?!= )(?P<title>.+?)(?<! =) = $")


def read_texts(
    corpus: DatasetCorpus, commits: dict[str, str | None], home: Path
) -> tuple[list[Article], dict[str, dict]]:
    """(the articles of every text, what was read of each), in the profile's order.

    A document whose title or words an earlier text holds is left out, so that no text can leak into another split.

    Args:
        commits: of each text's data set; None for a local folder. home: where relative folders begin.

    Raises: KvlibError, one sentence, for a data set that cannot be read or has no such column.
    """
    articles: list[Article] = []
    read: dict[str, dict] = {}
    for name, text in corpus.texts.items():
        counter = _Counted(itertools.islice(documents_of(text, commits[name], home), text.read_at_most))
        found = articles_from_documents(
            counter, text.min_characters, text.keep, origin=name, without=articles
        )
        articles += found
        read[name] = {
            "documents": counter.count,
            "articles": len(found),
            "characters": sum(len(article.text) for article in found),
        }
    return articles, read


def documents_of(text: DatasetText, commit: str | None, home: Path) -> Iterator[tuple[str, str]]:
    """(title, text) of each document, read as they are asked for."""
    rows = _rows(text, commit, home)
    if text.layout == "wikitext":
        return wikitext_documents(row[text.column] for row in rows)
    return (
        (str(row[text.title]) if text.title else f"document {n}", row[text.column])
        for n, row in enumerate(rows)
    )


def wikitext_documents(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(title, text) of each article from WikiText's lines, one per row; a title stands between blank lines.

    Paragraphs and headings are kept as they are, apart from the spaces around them, a blank line between any two.
    """
    title, kept, before = "", [], ""
    padded = itertools.chain(lines, [""])
    current = next(padded)
    for following in padded:
        line = current.rstrip("\n")
        heading = HEADING.match(line)
        if heading and not before.strip() and not following.strip():
            if kept:
                yield title, "\n\n".join(kept)
            title, kept = heading["title"], []
        if line.strip():
            kept.append(line.strip())
        before, current = line, following
    if kept:
        yield title, "\n\n".join(kept)


def _rows(text: DatasetText, commit: str | None, home: Path) -> Iterator[dict]:
    """The split's rows. Whatever the library raises, while opening or later, becomes one sentence."""
    import datasets  # takes a second to import: only runs that touch the corpus pay for it

    folder = local_folder(text.id, home)
    columns = [column for column in (text.column, text.title) if column]
    what = " ".join(
        [
            "a data set",
            *([f"with configuration {text.config}"] if text.config else []),
            f"and split {text.split}",
        ]
    )
    try:
        found = datasets.load_dataset(
            str(folder or text.id), text.config, split=text.split, revision=commit, streaming=text.streaming
        )
        lacking = [column for column in columns if column not in (found.column_names or columns)]
        if lacking:
            raise KvlibError(
                f"{text.id} has no column {lacking[0]!r}, expected one of {', '.join(found.column_names)}: correct the text's column "
                "or title"
            )
        for row in found.select_columns(columns):
            if not isinstance(row[text.column], str):
                raise KvlibError(
                    f"{text.id} holds {type(row[text.column]).__name__} in column {text.column!r}, expected text: choose another column"
                )
            yield row
    except KvlibError:
        raise
    except Exception as error:  # datasets, pyarrow, fsspec and the hub's client raise many kinds
        raise load_error(error, text.id, what, "correct the text's id, config or split") from error


class _Counted:
    """Iterates once and knows how many came."""

    def __init__(self, items: Iterable):
        self.items, self.count = items, 0

    def __iter__(self):
        for item in self.items:
            self.count += 1
            yield item
