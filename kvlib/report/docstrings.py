"""A Sphinx extension: docstrings are plain text with code between backticks, and Sphinx takes them for its own markup."""

import re

AMBIGUOUS = re.compile(r"[\\*|]|_(?=\W|$)")


def plain(line: str) -> str:
    """A line of a docstring as reStructuredText: code stays code, and no other character means anything."""
    parts = line.split("`")
    if len(parts) % 2 == 0:  # code that runs over the line's end
        return AMBIGUOUS.sub(r"\\\g<0>", line.replace("`", "'"))
    return "``".join(
        part if number % 2 else AMBIGUOUS.sub(r"\\\g<0>", part) for number, part in enumerate(parts)
    )


def process(app, what, name, obj, options, lines: list[str]) -> None:
    """The listener that autodoc calls for every docstring."""
    lines[:] = [plain(line) for line in lines]


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", process, priority=400)  # before napoleon reads its sections
    return {"parallel_read_safe": True}
