"""Wikipedia's own formats to plain text: a MediaWiki XML dump to pages, a page's wikitext to prose."""

import bz2
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.wikicode import Wikicode

from kvlib.errors import KvlibError

DROPPED_TAGS = frozenset(
    [
        "ref",
        "references",
        "table",
        "gallery",
        "math",
        "chem",
        "timeline",
        "score",
        "imagemap",
        "hiero",
        "syntaxhighlight",
        "source",
        "style",
        "templatestyles",
        "graph",
        "mapframe",
        "section",
        "tr",
        "td",
        "th",
    ]
)
DROPPED_LINKS = re.compile(r"^\s*:?\s*(file|image|media|category|[a-z]{2,3}(-[a-z]+)*)\s*:", re.IGNORECASE)
# References go before parsing: one that is not well formed makes the parser leave all around it as text.
REFERENCES = re.compile(r"<ref\b[^<>]*/>|<ref\b[^<>]*>.*?</ref\s*>", re.IGNORECASE | re.DOTALL)
LEFTOVERS = re.compile(
    r"\[\[(?:file|image):[^\n]*?\]\]|\{\{[^{}]*\}\}|\[\[|\]\]|</?[a-z][^<>\n]{0,80}>", re.IGNORECASE
)
DISAMBIGUATION = re.compile(
    r"\{\{\s*(disambig\w*|disamb|dab|hndis|geodis|numberdis|letter[ -]disambig\w*|surname|given name|"
    r"[\w ]+ disambiguation)\s*(\||\}\})",
    re.IGNORECASE,
)
# What stands at an article's end is lists of links and sources: nothing a language model can predict.
CLOSING_SECTIONS = frozenset(
    [
        "see also",
        "references",
        "notes",
        "notes and references",
        "references and notes",
        "footnotes",
        "citations",
        "sources",
        "further reading",
        "external links",
        "bibliography",
        "works cited",
        "gallery",
        "notelist",
    ]
)
RANGE_WORDS = {"to": "to", "-": "–", "–": "–", "and": "and", "or": "or", "by": "by", "x": "×", "to(-)": "to"}


def pages(path: Path) -> Iterator[tuple[str, str]]:
    """(title, wikitext) of every article of a bz2 MediaWiki dump: no redirect, no disambiguation page."""
    try:
        with bz2.open(path) as stream:
            for _, element in ElementTree.iterparse(stream):
                space, _, tag = element.tag.rpartition("}")
                if tag != "page":
                    continue
                space = f"{space}}}" if space else ""
                title = element.findtext(f"{space}title") or ""
                wikitext = element.findtext(f"{space}revision/{space}text") or ""
                is_article = (
                    element.findtext(f"{space}ns") == "0" and element.find(f"{space}redirect") is None
                )
                element.clear()
                if (
                    is_article
                    and not title.endswith("(disambiguation)")
                    and not DISAMBIGUATION.search(wikitext)
                ):
                    yield title, wikitext
    except (OSError, EOFError, ElementTree.ParseError, ValueError, LookupError) as error:
        raise KvlibError(
            f"cannot read {path} as a bz2 MediaWiki dump ({error}); delete the file so that it is fetched "
            "again"
        ) from error


def clean(wikitext: str) -> str:
    """Plain prose of a page: paragraphs and headings, one blank line between blocks."""
    return _tidy(_render(mwparserfromhell.parse(_without_tables(REFERENCES.sub("", wikitext)))))


def _without_tables(wikitext: str) -> str:
    """Cut `{| … |}` out, nested or not: the parser leaves a table that is not well formed as text."""
    kept, depth, position = [], 0, 0
    for match in re.finditer(r"^[ :*]*\{\||^[ ]*\|\}(?!\})", wikitext, re.MULTILINE):
        opens = "{|" in match.group()
        if opens and depth == 0:
            kept.append(wikitext[position : match.start()])
        if opens or depth:
            depth += 1 if opens else -1
            position = match.end()
    kept.append(wikitext[position:])
    return "".join(kept)


def _render(code: Wikicode | None) -> str:
    if code is None:
        return ""
    pieces: list[str] = []
    for node in code.nodes:
        if isinstance(node, nodes.Text):
            pieces.append(node.value)
        elif isinstance(node, nodes.Heading):
            title = _render(node.title).strip()
            if title.lower() in CLOSING_SECTIONS and node.level == 2:
                break
            pieces.append(f"\n\n{title}\n\n")
        elif isinstance(node, nodes.Wikilink):
            if not DROPPED_LINKS.match(str(node.title)):
                pieces.append(_render(node.text if node.text is not None else node.title))
        elif isinstance(node, nodes.Template):
            pieces.append(_template(node))
        elif isinstance(node, nodes.Tag):
            pieces.append(_tag(node))
        elif isinstance(node, nodes.ExternalLink):
            pieces.append(_render(node.title))
        elif isinstance(node, nodes.HTMLEntity):
            pieces.append(node.normalize())
    return "".join(pieces)


def _tag(node: nodes.Tag) -> str:
    name = str(node.tag).strip().lower()
    if name in DROPPED_TAGS:
        return ""
    if name in ("br", "hr"):
        return "\n"
    return _render(node.contents)


def _template(node: nodes.Template) -> str:
    """The few templates that stand for words inside a sentence; every other one is dropped."""
    name = str(node.name).strip().lower()
    values = [_render(p.value).strip() for p in node.params if not p.showkey]
    if name in ("convert", "cvt") and len(values) >= 2:
        if values[1] in RANGE_WORDS and len(values) >= 4:
            return f"{values[0]} {RANGE_WORDS[values[1]]} {values[2]} {values[3]}"
        return f"{values[0]} {values[1]}"
    if name in ("lang", "transl", "transliteration") and values:
        return values[-1]
    if name.startswith("lang-") and values:
        return values[0]
    if (
        name in ("nowrap", "nobr", "quote", "blockquote", "em", "strong", "smallcaps", "angbr", "val", "num")
        and values
    ):
        return values[0]
    if name in ("snd", "spnd", "spaced ndash", "ndash", "dash"):
        return " – "
    if name in ("nbsp", "space"):
        return " "
    return ""


def _tidy(text: str) -> str:
    text = text.replace("\u00a0", " ").replace("\u200b", "").replace("\ufeff", "")
    text = re.sub(r"'{2,}", "", LEFTOVERS.sub("", text))
    text = re.sub(r"__[A-Z]+__", "", text)
    text = re.sub(r"^[ \t*#:;|!]+", "", text, flags=re.MULTILINE)
    text = re.sub(r"[ \t]+", " ", text)
    # What a dropped template leaves behind: empty brackets and punctuation with a hole before it.
    for _ in range(2):
        text = re.sub(r"\(\s*(?:[,;:–]\s*)*\)", "", text)
        text = re.sub(r"\(\s*(?:[,;:]\s*)*", "(", text)
        text = re.sub(r"(?:\s*[,;:])+\s*\)", ")", text)
    text = re.sub(r" +([,.;:)])", r"\1", text)
    text = re.sub(r"[ \t]+", " ", text)
    lines = [line.strip().lstrip(",;: ") for line in text.split("\n")]
    return "\n\n".join(_blocks(lines))


def _blocks(lines: list[str]) -> Iterator[str]:
    """Lines that hold a letter or digit, joined where no blank line parts them (lists stay line by line)."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line:
            block.append(line)
        elif block:
            if any(character.isalnum() for text in block for character in text):
                yield "\n".join(block)
            block = []
