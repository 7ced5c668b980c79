"""The page of the library: every public name is on it, with its types, whatever characters its docstring holds."""

import inspect
import re
from importlib.resources import files
from pathlib import Path

import pytest

import kvlib
from kvlib.report.docstrings import plain

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "book" / "api.md").read_text()


def test_every_public_name_has_its_entry():
    asked = re.findall(r"auto(?:class|function|exception):: kvlib\.(\w+)", PAGE)
    assert sorted(asked) == sorted(kvlib.__all__)


def test_every_public_name_says_what_it_is():
    assert not [name for name in kvlib.__all__ if not inspect.getdoc(getattr(kvlib, name))]


def test_public_functions_say_what_they_return_and_the_package_is_marked_as_typed():
    functions = [entry for name in kvlib.__all__ if inspect.isfunction(entry := getattr(kvlib, name))]
    functions += [
        method for owner in (kvlib.ModelPair, kvlib.Handoff, kvlib.PrefixCache)
        for name, method in inspect.getmembers(owner, inspect.isfunction) if not name.startswith("_")
    ]  # fmt: skip
    assert len(functions) > 15
    assert not [
        f.__qualname__ for f in functions if inspect.signature(f).return_annotation is inspect.Signature.empty
    ]
    assert (files("kvlib") / "py.typed").is_file()
    assert 'kvlib = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("line", "marked_up"),
    [
        ("`A` (F, r)", "``A`` (F, r)"),
        ("|x| and a*b*c", r"\|x\| and a\*b\*c"),
        ("calls apply_ and `apply_`", r"calls apply\_ and ``apply_``"),
        ("snake_case stays", "snake_case stays"),
        ("a `code that goes", "a 'code that goes"),
        ("x' = x M + c", "x' = x M + c"),
    ],
)
def test_a_docstring_is_plain_text_with_code_between_backticks(line, marked_up):
    assert plain(line) == marked_up


def test_the_built_page_shows_signatures_and_docstrings(smoke_run):
    text = (smoke_run.book / "api.html").read_text()
    assert not [name for name in kvlib.__all__ if not re.search(rf'id="kvlib(\.[a-z_.]+)?\.{name}"', text)]
    assert "chunk_tokens" in text and "PreTrainedModel" in text
