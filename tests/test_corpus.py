"""The corpus: clean text from a dump, no text twice, made-up text, and a folder that is whole or refused."""

import bz2

import pytest

from kvlib.errors import KvlibError
from kvlib.study import wikitext
from kvlib.study.corpus import (
    Article,
    articles_from_documents,
    build_word_tokenizer,
    generated_articles,
    load_articles,
    read_wikipedia_dump,
    save_articles,
)

PAGE = """'''Example''' is a [[town|small town]]{{citation needed}} in [[Angola]].<ref name="a">Source.</ref>
It covers {{convert|5|km2|sqmi}} ({{IPA|x}}).

{| class="wikitable"
| a table {| class="nested" | inside |}
|}
[[File:Map.png|thumb|A map of [[Angola]]]]
== History ==
* First ''item''
* Second &ndash; item<br />broken

<math>x^2</math>

== References ==
{{reflist}}
[[Category:Towns]]
"""


@pytest.fixture(scope="module")
def articles():
    return generated_articles(21, 40, seed=1)


@pytest.fixture(scope="module")
def tokenizer(articles):
    return build_word_tokenizer(articles)


def write_dump(path, pages):
    entries = "".join(
        f"<page><title>{title}</title><ns>{ns}</ns>{'<redirect/>' if redirect else ''}"
        f"<revision><text>{text.replace('&', '&amp;').replace('<', '&lt;')}</text></revision></page>"
        for title, ns, redirect, text in pages
    )
    path.write_bytes(bz2.compress(f'<mediawiki xmlns="http://example.org/">{entries}</mediawiki>'.encode()))
    return path


def test_wikitext_becomes_prose():
    assert wikitext.clean(PAGE) == (
        "Example is a small town in Angola.\nIt covers 5 km2.\n\nHistory\n\nFirst item\nSecond – item\nbroken"
    )


def test_markup_that_is_not_well_formed_leaves_no_markup():
    text = wikitext.clean(
        "A '''bold [[link and {{a|b}} <ref>half {{cite|x</ref> text.\n\n[[File:a.png|thumb|b [[c]] d]] e"
    )
    assert not any(mark in text for mark in ("[[", "]]", "{{", "'''", "<ref"))


def test_a_dump_gives_articles_only(tmp_path):
    long = "Words of an article. " * 10
    pages = [
        ("Kept", 0, False, long),
        ("Moved", 0, True, long),
        ("Talk:Kept", 1, False, long + "x"),
        ("Kept (disambiguation)", 0, False, long),
        ("Many", 0, False, "{{disambig}}" + long + "y"),
        ("Short", 0, False, "Few."),
    ]
    found = read_wikipedia_dump(write_dump(tmp_path / "dump.bz2", pages), min_characters=100)
    assert found == [Article("Kept", long.strip())]


def test_a_cut_off_dump_is_one_sentence(tmp_path):
    path = write_dump(tmp_path / "dump.bz2", [("A", 0, False, "text")])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(KvlibError, match="cannot read .*dump.bz2 as a bz2 MediaWiki dump"):
        read_wikipedia_dump(path, 1)


def test_documents_are_read_lazily_and_repeats_left_out():
    def documents():
        yield from [
            ("a", "first text"),
            ("b", "first text"),
            ("a", "second text"),
            ("c", "x"),
            ("d", "third text"),
        ]
        raise AssertionError("read on after enough")

    found = articles_from_documents(documents(), min_characters=5, max_articles=3)
    assert [article.title for article in found] == ["a", "a (2)", "d"]


def test_generated_text_repeats_with_its_seed_and_round_trips(articles, tokenizer):
    assert articles == generated_articles(21, 40, seed=1) != generated_articles(21, 40, seed=2)
    text = articles[0].text
    assert text.isascii() and "\n\n" in text
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == " ".join(text.split()) and tokenizer.unk_token_id not in ids


def test_the_word_tokenizer_knows_a_bos_and_adds_none(tokenizer):
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert tokenizer("unheard")["input_ids"] == [tokenizer.unk_token_id]


def test_articles_survive_the_disk(tmp_path, articles):
    save_articles(articles, tmp_path / "held")
    save_articles(articles[:5], tmp_path / "held")
    assert load_articles(tmp_path / "held") == articles[:5]
    assert [entry.name for entry in tmp_path.iterdir()] == ["held"]


def test_a_folder_of_articles_that_is_not_whole_is_refused(tmp_path, articles):
    save_articles(articles, tmp_path / "held")
    data = next((tmp_path / "held").glob("*.arrow"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(KvlibError, match="arrow was changed.*delete the folder"):
        load_articles(tmp_path / "held")
    with pytest.raises(KvlibError, match="is no folder"):
        load_articles(tmp_path / "absent")


def test_a_changed_text_on_disk_is_noticed(tmp_path, articles):
    save_articles(articles, tmp_path / "held")
    data = next((tmp_path / "held").glob("*.arrow"))
    word = articles[3].text.split()[1].encode()
    where = data.read_bytes().index(articles[3].text.encode()) + 4
    changed = bytearray(data.read_bytes())
    changed[where : where + len(word)] = b"x" * len(word)
    data.write_bytes(changed)
    with pytest.raises(KvlibError, match="arrow was changed"):
        load_articles(tmp_path / "held")
