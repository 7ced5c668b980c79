"""The names and meanings of a script's parameters, read at once: papermill, which decides, takes seconds to import.

`kvlib.study.parameters` reads the same lines with papermill; a test holds the two against each other.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

CELL = re.compile(r"^# %%", re.MULTILINE)
TYPE = re.compile(r"^type:\s*\S+\s*")


def parameter_meanings(script: Path) -> dict[str, str]:
    """Name -> meaning of every parameter of a py:percent script, in its order; nothing for a script that is broken."""
    try:
        cells = CELL.split(Path(script).read_text("utf-8"))
        text = next((cell for cell in cells if '"parameters"' in cell.partition("\n")[0]), "").partition(
            "\n"
        )[2]
        lines = ast.parse(text).body
        words = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (OSError, ValueError, SyntaxError, tokenize.TokenError):
        return {}
    notes = {word.start[0]: word.string.lstrip("# ") for word in words if word.type == tokenize.COMMENT}
    found = {}
    for line in lines:
        target = (
            line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        )  # with an annotation or without
        if isinstance(target, ast.Name):
            found[target.id] = TYPE.sub("", notes.get(line.end_lineno or 0, "")).strip()
    return found
