"""Folders that a library writes (models, data sets): whole or not at all, and sealed like any other record."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from kvlib.errors import KvlibError
from kvlib.study.records import PARTIAL, not_written, read_record, remove, sha256_file, write_json

SEALS = "kvlib.json"  # the SHA-256 of every other file of the folder


def write_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Call `write` on an empty folder beside, then put it in place of whatever is there."""
    folder, scratch = Path(folder), None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=PARTIAL))
        whole = scratch / folder.name  # the seals hold the folder's own name
        whole.mkdir()
        write(whole)
        write_json(whole / SEALS, {"files": _hashes(whole)})
        if folder.exists():
            os.replace(folder, scratch / "former")
        os.replace(whole, folder)
    except (OSError, SafetensorError) as error:
        raise not_written(folder, error) from error
    finally:
        if scratch is not None:
            remove(scratch)
    return folder


def check_folder(folder: Path) -> Path:
    """Raises KvlibError unless the folder holds exactly the files that `write_folder` left, byte for byte."""
    folder, again = Path(folder), "restore it, or delete the folder and run its stage again"
    if not folder.is_dir():
        raise KvlibError(f"{folder} is no folder, expected one that kvlib wrote: {again}")
    wanted = read_record(folder / SEALS, "files")["files"]
    try:
        found = _hashes(folder)
    except OSError as error:
        raise KvlibError(f"{folder} cannot be read ({error.strerror or error}): {again}") from error
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            what = (
                "is missing" if name not in found else "is too many" if name not in wanted else "was changed"
            )
            raise KvlibError(f"{folder / name} {what}, expected the folder as kvlib wrote it: {again}")
    return folder


def changed_file(folder: Path, hashes: dict[str, str]) -> Path | None:
    """The first file, if any, that is there and has no longer the SHA-256 that was noted of it; hashes: by name."""
    for name, stated in hashes.items():
        if (folder / name).exists() and sha256_file(folder / name) != stated:
            return folder / name
    return None


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEALS)
    return {str(path.relative_to(folder)): sha256_file(path) for path in files}
