"""Assets: read from a wheel, checked, cached; each failure is one sentence that says what to do."""

import hashlib
import shutil
import sys
import zipfile
from collections import namedtuple

import pytest
import yaml

from kvlib.errors import KvlibError
from kvlib.study import assets

CONTENT = b"weights, some of them\n" * 1000
MEMBER = "tiny/data/weights.bin"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A list of one asset, its wheel on a shelf, and a pip that copies from the shelf."""
    wheel = tmp_path / "shelf" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    asset = {
        "package": "tiny", "version": "1.0", "pip": [], "member": MEMBER, "file": "weights.bin",
        "sha256": hashlib.sha256(CONTENT).hexdigest(), "bytes": len(CONTENT), "wheel_bytes": 1000,
        "licence": "MIT", "homepage": "https://example.org", "source": "Made for this test.",
    }  # fmt: skip
    calls = []

    def copy_command(asset, folder):
        calls.append(asset.package)
        return [sys.executable, "-c", f"import shutil; shutil.copy({str(wheel)!r}, {str(folder)!r})"]

    monkeypatch.setattr(assets, "pip_command", copy_command)
    Project = namedtuple("Project", "asset wheel calls cache fetch write")
    listing = tmp_path / "assets.yaml"

    def write(**changes):
        listing.write_text(yaml.safe_dump({"weights": asset | changes}))

    def fetch(name="weights", **options):
        return assets.fetch(name, tmp_path / "cache", assets_file=listing, **options)

    write()
    return Project(asset, wheel, calls, tmp_path / "cache", fetch, write)


def fail_with(monkeypatch, message, status=1):
    program = f"import sys; print({message!r}); sys.exit({status})"
    monkeypatch.setattr(assets, "pip_command", lambda asset, folder: [sys.executable, "-c", program])


def test_the_member_is_cached_and_nothing_else_is_left(project):
    seen = []
    path = project.fetch(progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in project.cache.iterdir()] == ["weights.bin"]
    assert seen[-1] == (1000, 1000) and all(done <= total for done, total in seen)


def test_a_cached_file_needs_no_pip(project):
    project.fetch()
    project.fetch()
    assert project.calls == ["tiny"]


def test_a_file_put_there_by_hand_needs_no_pip(project):
    project.cache.mkdir()
    (project.cache / "weights.bin").write_bytes(CONTENT)
    assert project.fetch().read_bytes() == CONTENT
    assert project.calls == []


def test_a_cut_off_file_is_fetched_again(project):
    project.cache.mkdir()
    (project.cache / "weights.bin").write_bytes(CONTENT[:100])
    assert project.fetch().read_bytes() == CONTENT


def test_what_a_killed_fetch_left_is_swept(project, monkeypatch):
    (project.cache / ".fetch-killed" / "wheels").mkdir(parents=True)
    monkeypatch.setattr(assets, "SCRATCH_LIFETIME_S", -1)
    project.fetch()
    assert not (project.cache / ".fetch-killed").exists()


def test_a_wrong_hash_is_refused_with_both_hashes_and_leaves_no_file(project):
    project.write(sha256="0" * 64)
    with pytest.raises(KvlibError, match=f"{project.asset['sha256']}.*expects {'0' * 64}.*by hand"):
        project.fetch()
    assert list(project.cache.iterdir()) == []


def test_a_missing_member_is_named(project):
    project.write(member="tiny/data/other.bin")
    with pytest.raises(KvlibError, match="tiny-1.0.*has no member tiny/data/other.bin"):
        project.fetch()


def test_a_cut_off_wheel_is_refused(project):
    project.wheel.write_bytes(project.wheel.read_bytes()[:-50])
    with pytest.raises(KvlibError, match="not a whole wheel"):
        project.fetch()


def test_no_network_says_so_and_where_the_file_may_be_put(project, monkeypatch):
    fail_with(monkeypatch, "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution")
    with pytest.raises(KvlibError, match="no network.*tiny 1.0.*weights.bin by hand"):
        project.fetch()


def test_a_failing_pip_is_quoted(project, monkeypatch):
    fail_with(monkeypatch, "ERROR: No matching distribution found for tiny==1.0\nmore", status=3)
    with pytest.raises(
        KvlibError, match="exit status 3: ERROR: No matching distribution found for tiny==1.0"
    ):
        project.fetch()


def test_pip_running_out_of_space_says_how_much_is_needed(project, monkeypatch):
    fail_with(monkeypatch, "ERROR: [Errno 28] No space left on device")
    with pytest.raises(KvlibError, match="no room for weights.bin.*MB are needed"):
        project.fetch()


def test_a_full_disk_is_seen_before_the_download(project, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 9, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(KvlibError, match="no room"):
        project.fetch()
    assert project.calls == []


def test_a_cache_that_cannot_be_written_is_named(project):
    project.cache.write_text("a file, not a folder")
    with pytest.raises(KvlibError, match="cannot write weights.bin"):
        project.fetch()


def test_an_unknown_asset_lists_the_known_ones(project):
    with pytest.raises(KvlibError, match="no asset named 'wieghts'.*weights"):
        project.fetch("wieghts")


def test_a_list_with_an_unknown_key_is_refused(project):
    project.write(sha265="0")
    with pytest.raises(KvlibError, match="not a list of assets.*sha265"):
        project.fetch()


def test_the_shipped_list_pins_exact_versions_and_hashes():
    shipped = assets.load_assets()
    assert set(shipped) == {"smollm2", "enwiki"}
    command = assets.pip_command(shipped["enwiki"], "folder")
    assert "gensim==4.4.0" in command and "manylinux_2_28_x86_64" in command and "--no-deps" in command
    assert shipped["smollm2"].sha256.startswith("b179c952")
