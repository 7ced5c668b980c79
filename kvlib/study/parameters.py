"""The parameters of a notebook script, and whether given values fit: papermill itself only warns."""

import ast
import json
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
import yaml
from papermill import inspect_notebook

from kvlib.errors import KvlibError, suggestion
from kvlib.study.yaml_files import PlainLoader

SCALARS = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True)
class Parameter:
    """A line of a parameters cell: `name = default  # type: int meaning`; type "any" if none can be told."""

    name: str
    type: str
    default: object
    meaning: str


def read_script(script: Path) -> nbformat.NotebookNode:
    """A py:percent script as a notebook for this Python's kernel."""
    try:
        notebook = jupytext.read(script)
    except FileNotFoundError as error:
        raise KvlibError(f"notebook script {script} is missing: restore it from the repository") from error
    except Exception as error:  # jupytext raises many kinds
        raise KvlibError(
            f"notebook script {script} cannot be read by jupytext ({error}): correct it"
        ) from error
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return notebook


def script_parameters(script: Path) -> dict[str, Parameter]:
    """Name -> parameter, in the order of the script, as papermill sees them."""
    found = inspect_notebook(read_script(script))
    return {name: _parameter(entry) for name, entry in found.items()}


def profile_keys(script: Path) -> dict[str, str]:
    """Parameter -> the dotted profile key that the script gives it to, in a dictionary or to `open_run` by name."""
    known, keys = set(script_parameters(script)), {}
    for node in ast.walk(_syntax(script)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Name) and value.id in known:
                    keys[value.id] = key.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "open_run":
            for word in node.keywords:
                if word.arg and word.arg != "results" and isinstance(word.value, ast.Name):
                    keys[word.value.id] = word.arg
    return keys


def _syntax(script: Path) -> ast.Module:
    """What a script's code says: its text cells are comments, and so are its magics."""
    try:
        return ast.parse(script.read_text("utf-8"))
    except (ValueError, SyntaxError, RecursionError, OSError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise KvlibError(
            f"notebook script {script}{where} is no Python ({getattr(error, 'msg', error)}), expected a script that runs: correct it, "
            "or restore it from the repository"
        ) from error


def _parameter(entry: dict) -> Parameter:
    default = _literal(entry["default"])
    kind = (entry["inferred_type_name"] or "None").replace(" ", "")
    if kind in ("None", ""):
        kind = _type_of(default)
    return Parameter(entry["name"], kind, default, entry["help"].lstrip("# ").strip())


def _literal(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _type_of(value) -> str:
    if value is None:
        return "any"
    if isinstance(value, list):
        inner = {_type_of(each) for each in value}
        return f"list[{inner.pop()}]" if len(inner) == 1 else "list"
    return type(value).__name__


def parse_value(text: str, kind: str = "any", name: str = ""):
    """A value from a command line, JSON or YAML: 40, 1e-3, true, null, [4, 8]; text where that is wanted.

    name: of the parameter, for the sentence. Raises: KvlibError for what is neither, and for nothing at all, which would
    be read as null.
    """
    if kind == "str" and not text.startswith(('"', "'")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = yaml.load(text, Loader=PlainLoader)
        if value is None and not yaml.compose(text, Loader=PlainLoader):
            raise ValueError("nothing in it")
        return value
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        given = f"parameter {name} is {reprlib.repr(text)}" if name else f"value {reprlib.repr(text)} given"
        raise KvlibError(
            f"{given}, expected {_wanted(kind)}: correct the value, or leave the parameter out"
        ) from error


def _wanted(kind: str) -> str:
    if kind in ("any", "str"):
        return "a number, text, true, false, null or a list like '[4, 8]'"
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    return f"{_describe(kind)} such as {_example(kind)}"


def check_parameters(script: Path, given: dict, known: dict[str, Parameter]) -> dict:
    """The values, as papermill may inject them. Raises KvlibError for an unknown name or a wrong type."""
    values = {}
    for name, value in given.items():
        if name not in known:
            raise KvlibError(
                f"{script.stem} has no parameter {name!r}, expected one of {', '.join(known) or 'none'}"
                f"{suggestion(name, list(known))}; `python -m kvlib params {script.stem}` explains them"
            )
        values[name] = _checked(script.stem, known[name], value)
    return values


def values_by_script(scripts: list[Path], texts: dict[str, str]) -> dict[Path, dict]:
    """What the command line gave, for every script that has a parameter of that name.

    Everything is checked before the first script runs. Raises KvlibError for a name that none of them has.
    """
    known = {script: script_parameters(script) for script in scripts}
    anywhere = {name for each in known.values() for name in each}
    values: dict[Path, dict] = {}
    for script, mine in known.items():
        unknown = [name for name in texts if name not in anywhere]
        if unknown and len(scripts) > 1:
            raise KvlibError(
                f"no notebook has a parameter {unknown[0]!r}{suggestion(unknown[0], sorted(anywhere))}; "
                "`python -m kvlib params 01_screening` explains those of one notebook"
            )
        given = {
            name: parse_value(text, mine[name].type if name in mine else "any", name)
            for name, text in texts.items()
            if name in mine or unknown
        }
        values[script] = check_parameters(script, given, mine)
    return values


def _checked(notebook: str, parameter: Parameter, value):
    kind = parameter.type
    if value is None and (parameter.default is None or kind.startswith("Optional")):
        return value
    if kind.startswith("Optional[") and kind.endswith("]"):
        kind = kind[len("Optional[") : -1]
    if not _fits(kind, value):
        raise KvlibError(
            f"parameter {parameter.name} of {notebook} is {reprlib.repr(value)}, expected {_describe(kind)} such as "
            f"{_example(kind) if parameter.default is None else json.dumps(parameter.default)}: correct the value"
        )
    return float(value) if kind == "float" else value


def _fits(kind: str, value) -> bool:
    if kind in SCALARS:
        if kind != "bool" and isinstance(value, bool):
            return False
        return isinstance(value, SCALARS[kind]) and (kind != "float" or math.isfinite(value))
    if kind == "list" or kind.startswith(("list[", "List[")):
        inner = kind.partition("[")[2][:-1]
        return isinstance(value, list) and (not inner or all(_fits(inner, each) for each in value))
    if kind == "dict" or kind.startswith(("dict[", "Dict[")):
        return isinstance(value, dict)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(_fits("any", each) for each in value)
    return value is None or isinstance(value, (int, str, bool, dict))


def _describe(kind: str) -> str:
    names = {
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "bool": "true or false",
        "dict": "keys and values",
    }
    if kind.startswith(("list", "List")):
        inner = kind.partition("[")[2][:-1]
        return {"int": "a list of whole numbers", "float": "a list of numbers", "str": "a list of texts"}.get(
            inner, "a list"
        )
    return names.get(kind.partition("[")[0], "a JSON value")


def _example(kind: str) -> str:
    examples = {
        "int": "40",
        "float": "0.003",
        "str": "laptop",
        "bool": "true",
        "list[int]": "[4, 8]",
        "list[float]": "[0.5, 1.0]",
        "list[str]": "[first, second]",
    }
    return examples.get(
        kind.replace("List", "list"), "[4, 8]" if kind.startswith(("list", "List")) else "null"
    )
