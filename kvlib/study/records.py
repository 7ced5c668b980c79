"""Files that are written whole or not at all, their hashes, and the lock on a run."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvlib.errors import KvlibError

PARTIAL = ".partial-"  # prefix of temporary files; a killed run may leave some, and nothing ever reads them


def write_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Call `write` on a temporary file in the same folder, then rename it into place."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL, suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise KvlibError(
            f"{path} could not be written ({getattr(error, 'strerror', None) or error}), expected a writable folder with room: free some space "
            "or fix the permissions, then run the same command again; finished work is kept"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


def canonical_json(value) -> str:
    """One spelling for equal values: sorted keys, no spaces, NaN refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_json(value) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value) -> Path:
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n"
    return write_atomically(path, lambda file: file.write_text(text))


def read_json(path: Path):
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError as error:
        raise KvlibError(
            f"{path} is missing, expected a record of an earlier stage: run that stage first"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KvlibError(f"{path} is no valid JSON ({error}): delete it and run its stage again") from error


def read_record(path: Path, *keys: str) -> dict:
    """A JSON object that has these keys. Raises KvlibError for anything else."""
    record = read_json(path)
    missing = [key for key in keys if not isinstance(record, dict) or key not in record]
    if not isinstance(record, dict) or missing:
        what = f"lacks {missing[0]!r}" if isinstance(record, dict) else f"holds a {type(record).__name__}"
        raise KvlibError(f"{path} {what}, expected a record of this kvlib: delete it and run its stage again")
    return record


def write_table(path: Path, table: pd.DataFrame) -> Path:
    return write_atomically(path, lambda file: table.to_parquet(file, index=False))


def read_table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except FileNotFoundError as error:
        raise KvlibError(
            f"{path} is missing, expected a table of an earlier stage: run that stage first"
        ) from error
    except Exception as error:  # pyarrow raises many kinds
        raise KvlibError(
            f"{path} is no valid parquet table ({error}): delete it and run its stage again"
        ) from error


def write_tensors(path: Path, tensors: dict, metadata: dict[str, str] | None = None) -> Path:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return write_atomically(path, lambda file: save_file(tensors, file, metadata))


def read_tensors(path: Path) -> tuple[dict, dict[str, str]]:
    """(tensors, metadata) of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except FileNotFoundError as error:
        raise KvlibError(
            f"{path} is missing, expected tensors of an earlier stage: run that stage first"
        ) from error
    except (SafetensorError, OSError) as error:
        raise KvlibError(
            f"{path} is no valid safetensors file ({error}): delete it and run its stage again"
        ) from error


def append_line(path: Path, value) -> None:
    """Append one JSON line, flushed to disk before returning; a line that a killed process left half is dropped."""
    whole = b"".join(line for line in _lines(path) if line.endswith(b"\n"))
    line = canonical_json(value) + "\n"
    write_atomically(path, lambda file: file.write_bytes(whole + line.encode()))


def _lines(path: Path) -> list[bytes]:
    return Path(path).read_bytes().splitlines(keepends=True) if Path(path).exists() else []


def read_lines(path: Path) -> list:
    """The values of a file of JSON lines; a last line without its end was never wholly written and does not count."""
    try:
        return [json.loads(line) for line in _lines(path) if line.endswith(b"\n")]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise KvlibError(f"{path} holds a line that is no JSON ({error}): restore it from a copy") from error


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """One writer per run folder; the operating system frees the lock when a process dies."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise KvlibError(
            f"run folder {folder} is in use by another process: wait for it to end, or choose another run name"
        ) from error
    except OSError as error:
        raise KvlibError(
            f"run folder {folder} cannot be used ({error.strerror or error}): choose a writable folder"
        ) from error
    try:
        yield
    finally:
        lock.release()
