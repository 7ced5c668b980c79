"""The Dockerfile, as far as it can be tested without an engine: its rules, and that all it names is there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text()
COMMANDS = re.sub(r"\\\n\s*", " ", TEXT).splitlines()


def test_hadolint_finds_nothing_to_say():
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), "--no-color", ROOT / "Dockerfile"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_everything_that_is_copied_is_in_the_repository_and_let_through():
    ignored = {line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"}
    copied = [line.split()[1:-1] for line in COMMANDS if line.startswith("COPY ")]
    assert copied
    for name in [name for names in copied for name in names]:
        assert (ROOT / name).exists() and name not in ignored, name


def test_its_set_up_is_that_of_the_makefile_and_its_python_a_supported_one():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    made = [name for line in COMMANDS for name in re.findall(r"^RUN make ([a-z-]+)", line)]
    assert made and set(made) <= set(targets)
    assert re.search(r"^FROM python:3\.1[123]-", TEXT, re.M)


def test_what_the_set_up_reads_is_there_before_it_runs():
    """Another file among the requirements, and the layer would fail where nobody can see it."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import install
    finally:
        sys.path.pop(0)
    before = TEXT[: TEXT.index("RUN make setup")]
    for name in [*install.FILES["book"], "requirements.lock", "pyproject.toml"]:
        assert name in before
