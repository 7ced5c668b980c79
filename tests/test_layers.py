"""Imports only go down: report -> study -> the library, and the library needs four packages only."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "kvlib"
ALLOWED = {"torch", "transformers", "numpy", "safetensors", "kvlib", *sys.stdlib_module_names}
SHELL = {"cli.py", "looking.py", "options.py", "planned.py", "__main__.py", "terminal.py", "usage.py"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
    return found


def files(floor: str) -> list[Path]:
    if floor == "library":
        return [p for p in (*ROOT.glob("*.py"), *(ROOT / "maps").glob("*.py")) if p.name not in SHELL]
    return list((ROOT / floor).rglob("*.py"))


def test_the_library_needs_four_packages_and_nothing_above_it():
    for path in files("library"):
        for name in imports(path):
            assert name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"
            assert not name.startswith(("kvlib.study", "kvlib.report")), f"{path.name} imports {name}"


def test_the_study_does_not_know_the_report():
    for path in files("study"):
        upward = [name for name in imports(path) if name.startswith("kvlib.report")]
        assert not upward, f"{path.name} imports {upward}"


def test_only_one_file_touches_transformers_caches():
    named = [
        p.name
        for p in files("library") + files("study")
        if "DynamicCache" in p.read_text() and p.name != "cache.py"
    ]
    tolerated = {
        "divergence.py",
        "latency.py",
    }  # an empty cache for native prefill is made there, none is opened
    assert set(named) <= tolerated
    for name in named:
        assert ".layers" not in (ROOT / name).read_text()


def test_nothing_is_pickled():
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in text and "torch.load(" not in text and "torch.save(" not in text, path.name
