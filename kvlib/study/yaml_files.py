"""YAML that people write: read strictly, and what is wrong with it said in one sentence."""

import re
import reprlib
from pathlib import Path

import yaml
from pydantic import ValidationError

from kvlib.errors import KvlibError

WANTED = re.compile(
    r"^(Input|List|String|Dictionary) should (be|have|match) "
)  # how pydantic says what it expects
WITH_KIND = (("pair", "target"), ("pair", "source"), ("corpus",))


WHOLE = r"[-+]?(0|[1-9][0-9]*)"
REAL = r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
NOT_FINITE = r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"


def _resolver(kind: str, pattern: str) -> tuple[str, re.Pattern]:
    return f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$")


class PlainLoader(yaml.SafeLoader):
    """YAML 1.2's plain values, and a key that is written twice is a mistake, not a choice of the last.

    What only YAML 1.1 takes for a number, a date or a truth value (1:30, 010, 1_000, 2024-01-01, yes) stays text.
    """

    yaml_implicit_resolvers = (  # by the first letter of a value
        dict.fromkeys("tTfF", [_resolver("bool", r"true|True|TRUE|false|False|FALSE")])
        | dict.fromkeys(("~", "n", "N", ""), [_resolver("null", r"~|null|Null|NULL|")])
        | dict.fromkeys(
            "-+.0123456789", [_resolver("int", WHOLE), _resolver("float", f"{REAL}|{NOT_FINITE}")]
        )
        | {"<": [_resolver("merge", "<<")]}
    )

    def construct_mapping(self, node, deep=False):
        self.flatten_mapping(node)
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if isinstance(key, str) and keys.count(key) > 1:
                raise ValueError(f"key {key!r} is written twice")
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict:
    """The keys and values of a file. Raises FileNotFoundError, or KvlibError for anything but keys and values."""
    try:
        values = yaml.load(Path(path).read_text("utf-8"), Loader=PlainLoader)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise KvlibError(
            f"profile {path} is no readable YAML ({reason}), expected keys and values: compare it with data/profiles"
        ) from error
    if not isinstance(values, dict):
        raise KvlibError(
            f"profile {path} holds {type(values).__name__}, expected keys and values: compare it with data/profiles"
        )
    return values


def override(values: dict, key: str, value) -> None:
    """Set `value` at a dotted key, in place. Raises KvlibError where a part of the key holds no keys."""
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise KvlibError(
                f"key {key!r} given, but {parent!r} holds no keys of its own: correct or remove it"
            )
    values[last] = value


def flat(values: dict, prefix: str = "") -> dict:
    """Nested settings by dotted key."""
    found = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def merge(base: dict, changes: dict) -> dict:
    """`base` with `changes`, section by section; a section of another `kind` replaces the whole of the base's."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        sections = isinstance(below, dict) and isinstance(value, dict)
        same_kind = sections and value.get("kind", below.get("kind")) == below.get("kind")
        merged[key] = merge(below, value) if same_kind else value
    return merged


def describe_error(error: ValidationError) -> str:
    """The first finding of a validation, as one sentence."""
    # A misspelt key is both unknown and missing: the unknown one is what was written.
    found = min(error.errors(), key=lambda entry: entry["type"] != "extra_forbidden")
    loc = list(found["loc"])
    for place in WITH_KIND:  # pydantic names the kind after the place of what has one
        if tuple(loc[: len(place)]) == place:
            del loc[len(place) : len(place) + 1]
    key = ".".join(str(part) for part in loc)
    if found["type"] == "extra_forbidden":
        return f"unknown key {key!r} given, expected only the keys of the files in data/profiles: correct or remove it"
    if found["type"] == "missing":
        return f"key {key!r} is missing: add it, as in the files in data/profiles"
    message = " ".join(found["msg"].removeprefix("Value error, ").split())
    if not key:
        return message if ": " in message else f"{message}: correct the value"
    given = f"{key} is {reprlib.repr(found['input'])}"
    if wanted := WANTED.match(message):
        more = "a value " if message[wanted.end() :].startswith(("greater", "less")) else ""
        expected = message[wanted.end() :].replace(" after validation", "")
        return f"{given}, expected {more}{expected}: correct the value"
    return f"{given}, but {message[0].lower()}{message[1:]}: correct the value"
