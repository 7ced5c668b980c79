"""Documents of data sets: put together at the right headings, no more read than is kept, none in two texts, errors in a sentence."""

import datasets
import pytest

from kvlib.study.documents import documents_of, read_texts, wikitext_documents
from kvlib.study.inputs import DatasetCorpus, DatasetText
from tests.standins import save_fineweb, save_wikitext
from tests.tiny import refused

NAMED = {"min_characters": 1, "keep": 100, "read_at_most": 100, "licence": "none"}
LINES = [
    "", " = First = \n", "", " One . \n", " Two . \n", "", " = = Part = = \n", "", " = = = Smaller = = = \n", "", " Three . \n",
    "", " = E = mc² = \n", "", " A formula : \n", " = 3 = \n", " and on . \n", "", "",
]  # fmt: skip


def text(place, **changes) -> DatasetText:
    return DatasetText(**{"id": str(place), "split": "train", **NAMED, **changes})


def wikitext(place, split="train", **changes) -> DatasetText:
    return text(place, config="wikitext-103-raw-v1", split=split, layout="wikitext", **changes)


def fineweb(place, **changes) -> DatasetText:
    return text(place, config="sample-10BT", title="url", **changes)


def corpus(**texts) -> DatasetCorpus:
    return DatasetCorpus(kind="datasets", texts=texts)


def test_articles_begin_at_top_headings_between_blank_lines_only():
    found = dict(wikitext_documents(LINES))
    assert list(found) == ["First", "E = mc²"]
    assert found["First"].split("\n\n") == [
        "= First =", "One .", "Two .", "= = Part = =", "= = = Smaller = = =", "Three .",
    ]  # fmt: skip
    assert "= 3 =" in found["E = mc²"]


def test_lines_before_the_first_heading_are_a_document_of_their_own_and_no_lines_are_none():
    assert list(wikitext_documents(["words", *LINES]))[0] == ("", "words")
    assert list(wikitext_documents([])) == []


def test_what_was_written_is_read_again(tmp_path):
    place = save_wikitext(tmp_path, {"train": 5, "test": 2})
    for streaming in (True, False):
        found = list(documents_of(wikitext(place, "test", streaming=streaming), None, tmp_path))
        assert [title for title, _ in found] == ["Test 0", "Test 1"]
        assert all("= = History = =" in body for _, body in found)


def test_reading_stops_at_what_is_kept_and_at_what_may_be_read(tmp_path):
    place = save_fineweb(tmp_path, 12)  # every other page is short
    long = {"min_characters": 1000}
    kept, read = read_texts(corpus(web=fineweb(place, keep=2, **long)), {"web": None}, tmp_path)
    assert [a.title for a in kept] == ["https://example.org/1", "https://example.org/3"]
    assert read["web"]["documents"] == 4 and read["web"]["articles"] == 2
    few, read = read_texts(corpus(web=fineweb(place, read_at_most=5, **long)), {"web": None}, tmp_path)
    assert len(few) == 2 and read["web"]["documents"] == 5


def test_a_document_of_an_earlier_text_is_left_out_of_a_later_one(tmp_path):
    same = ["the same words"]
    for name, titles, bodies in (
        ("one", ["a", "b"], [*same, "words of one"]),
        ("two", ["c", "b", "d", "d"], [*same, "other words under b", "words of two", "more words"]),
    ):
        datasets.Dataset.from_dict({"name": titles, "text": bodies}).to_parquet(
            tmp_path / name / "train.parquet"
        )
    texts = {name: text(tmp_path / name, title="name") for name in ("one", "two")}
    found, read = read_texts(corpus(**texts), dict.fromkeys(texts), tmp_path)
    assert [(a.origin, a.title) for a in found] == [
        ("one", "a"),
        ("one", "b"),
        ("two", "d"),
        ("two", "d (2)"),
    ]
    assert read["two"] == {
        "documents": 4,
        "articles": 2,
        "characters": len("words of two") + len("more words"),
    }


def test_a_relative_folder_lies_in_the_home_folder(tmp_path):
    save_fineweb(tmp_path / "texts" / "web", 2)
    assert len(list(documents_of(fineweb("texts/web"), None, tmp_path))) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": "sample-11BT"}, "sample-11BT"),
        ({"split": "test"}, "split test"),
        ({"column": "words"}, "no column 'words', expected one of"),
        ({"title": "name"}, "no column 'name'"),
        ({"column": "token_count"}, "int in column 'token_count', expected text"),
    ],
)
def test_what_a_data_set_does_not_have_is_said_in_one_sentence(tmp_path, changes, said):
    place = save_fineweb(tmp_path, 2)
    found = fineweb(place).model_copy(update=changes)
    refused(lambda: list(documents_of(found, None, tmp_path)), match=said)


def test_a_folder_that_is_not_there_and_one_with_a_damaged_file_are_named(tmp_path):
    refused(
        lambda: list(documents_of(fineweb("./nowhere"), None, tmp_path)),
        match="./nowhere given, expected a folder",
    )
    place = save_fineweb(tmp_path, 2)
    file = next(place.rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-100])
    refused(lambda: list(documents_of(fineweb(place), None, tmp_path)), match=str(tmp_path))


def test_a_data_set_of_the_hub_without_a_network_is_no_puzzle(tmp_path):
    refused(
        lambda: list(documents_of(fineweb("HuggingFaceFW/fineweb"), "0" * 40, tmp_path)),
        match="no network: HuggingFaceFW/fineweb is not on this disk",
    )
