"""tools/install.py: done once, begun again when it was killed, repeated when the requirements change."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def installer(tmp_path, monkeypatch):
    """The script on a folder of its own, with pip and venv replaced by notes of what was asked."""
    (tmp_path / "tools").mkdir()
    copy = shutil.copy(ROOT / "tools" / "install.py", tmp_path / "tools" / "install.py")
    for name in (
        "requirements.txt",
        "requirements-test.txt",
        "requirements-ray.txt",
        "requirements.lock",
        "pyproject.toml",
    ):
        (tmp_path / name).write_text(name)
    spec = importlib.util.spec_from_file_location("install", copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.asked = []

    def make_venv(lock):
        module.asked.append("venv")
        Path(module.PYTHON).parent.mkdir(parents=True)
        Path(module.PYTHON).touch()

    monkeypatch.setattr(module, "make_venv", make_venv)
    monkeypatch.setattr(module, "install", lambda files, lock: module.asked.append(" ".join(files)))
    monkeypatch.setattr(sys, "argv", ["install.py"])
    return module


def test_a_finished_installation_is_not_repeated(installer):
    installer.main()
    installer.main()
    assert installer.asked == ["venv", "requirements.txt"]


def test_the_tests_requirements_are_added_to_a_finished_installation(installer, monkeypatch):
    installer.main()
    monkeypatch.setattr(sys, "argv", ["install.py", "--test"])
    installer.main()
    monkeypatch.setattr(sys, "argv", ["install.py"])
    installer.main()
    assert installer.asked == ["venv", "requirements.txt", "requirements.txt requirements-test.txt"]


def test_an_interrupted_installation_is_begun_again(installer, monkeypatch):
    def die(files, lock):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(installer, "install", die)
        with pytest.raises(KeyboardInterrupt):
            installer.main()
    (Path(installer.VENV) / "half").touch()
    installer.main()
    assert installer.asked == ["venv", "venv", "requirements.txt"]
    assert not (Path(installer.VENV) / "half").exists()


def test_changed_requirements_are_installed_into_the_same_environment(installer):
    installer.main()
    (Path(installer.ROOT) / "requirements.lock").write_text("other")
    installer.main()
    assert installer.asked == ["venv", "requirements.txt", "requirements.txt"]


def test_a_change_of_an_included_file_is_a_change(installer, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["install.py", "--test"])
    installer.main()
    (Path(installer.ROOT) / "requirements-ray.txt").write_text("other")
    installer.main()
    assert len(installer.asked) == 3
    monkeypatch.setattr(sys, "argv", ["install.py"])
    installer.main()
    assert len(installer.asked) == 3  # the book needs none of it


@pytest.mark.parametrize("version", [(3, 10, 0), (3, 14, 0)])
def test_another_python_is_one_sentence(installer, monkeypatch, capsys, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit) as left:
        installer.main()
    assert left.value.code == 2
    assert "expected 3.11, 3.12 or 3.13" in capsys.readouterr().err


def test_make_says_when_there_is_no_python():
    done = subprocess.run(
        ["make", "PYTHON=no-such-python", "setup"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "install python3.11" in done.stderr


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_every_direct_requirement_has_the_pin_of_the_lock(installer):
    pins = set((ROOT / "requirements.lock").read_text().splitlines())
    for name in ("requirements.txt", "requirements-test.txt", "requirements-ray.txt"):
        lines = [line for line in requirements(name) if not line.startswith("-r ")]
        assert lines and set(lines) <= pins


def test_the_stamp_knows_every_file_that_another_includes(installer):
    for what, names in installer.FILES.items():
        included = [
            line.removeprefix("-r ")
            for name in names
            for line in requirements(name)
            if line.startswith("-r ")
        ]
        assert included == installer.INCLUDED[what]
