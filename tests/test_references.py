"""The references say what each is cited for, and the glossary has every term once, in order."""

import re
from pathlib import Path

import pytest
from pybtex.database import parse_file

BOOK = Path(__file__).resolve().parents[1] / "book"
CITED = re.compile(r"\{cite(?::\w+)?\}`([^`]+)`")
SOFTWARE = {"papermill", "jupyterbook"}


@pytest.fixture(scope="module")
def entries():
    return parse_file(str(BOOK / "references.bib")).entries


def terms() -> list[str]:
    body = (BOOK / "glossary.md").read_text(encoding="utf-8").split("```{glossary}\n")[1].split("```")[0]
    return [line for line in body.splitlines() if line and not line.startswith(" ")]


def test_every_entry_is_cited_where_the_page_says_what_for(entries):
    page = (BOOK / "references.md").read_text(encoding="utf-8")
    cited = {key for keys in CITED.findall(page) for key in keys.split(",")}
    assert cited == set(entries)


def test_every_entry_can_be_found_by_a_reader(entries):
    places = {"eprint", "doi", "pages", "booktitle"}
    lost = [key for key, entry in entries.items() if key not in SOFTWARE and not places & set(entry.fields)]
    undated = [key for key, entry in entries.items() if key not in SOFTWARE and "year" not in entry.fields]
    assert (lost, undated) == ([], [])


def test_an_arxiv_number_is_no_older_than_its_year_says(entries):
    # a paper may be published years after its preprint, never before
    early = [
        key
        for key, entry in entries.items()
        if "eprint" in entry.fields and 2000 + int(entry.fields["eprint"][:2]) > int(entry.fields["year"])
    ]
    assert early == []


def test_the_glossary_has_every_term_once():
    assert len(terms()) == len({term.lower() for term in terms()}) > 50


def test_the_glossary_is_in_order_but_for_abbreviations():
    full = [term.lower() for term in terms() if term not in {"GQA", "RoPE", "TTFT"}]
    assert full == sorted(full)
