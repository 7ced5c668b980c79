"""The one exception for mistakes that a user can put right, and the nearest name to one that is misspelt."""

import difflib
from collections.abc import Iterable


class KvlibError(ValueError):
    """Bad input, in one sentence: what was given, what was expected, what to do.

    The command line prints the sentence alone and exits with status 2.
    """


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
