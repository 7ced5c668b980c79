"""Records: files that are written whole or not at all, and read only as they were written, where they were written.

Every record carries a seal, a hash of its content and of its place (folder and name). A record that was cut, edited,
swapped with another or brought from elsewhere does not match its seal and is refused, whatever kind of record it is.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvlib.errors import KvlibError
from kvlib.maps.base import hash_tensors
from kvlib.study.names import STAGES

PARTIAL = ".partial-"  # prefix of temporary files; a killed run may leave some, and nothing ever reads them
SEAL = "seal"
RUN_RECORD = "run.json"


def not_written(path: Path, error: Exception) -> KvlibError:
    """What is said of a file or folder that could not be written."""
    return KvlibError(
        f"{path} could not be written ({getattr(error, 'strerror', None) or error}), expected a writable folder with room: free some "
        "space or fix the permissions, then run the same command again; finished work is kept"
    )


def write_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Call `write` on a temporary file in the same folder, then rename it into place; a link stays one, its file is replaced.

    Raises: KvlibError where the file cannot be written, and for a path at which something is that is no file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a rename would put a file in the place of a device
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise KvlibError(f"{path} is {what}, expected a file or a name that is free: name another")
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
        raise not_written(path, error) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return path


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there; of a link the link alone, what it leads to stays."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        Path(path).unlink(missing_ok=True)


def canonical_json(value) -> str:
    """One spelling for equal values: sorted keys, no spaces, NaN refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def hash_json(value) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def place_of(path: Path) -> str:
    """Where in its run a record belongs: the path from its stage's folder on, or its folder and name where there is none.

    A run's own record may be renamed together with its run, so it belongs to its name alone.
    """
    path = Path(path).absolute()
    if path.name == RUN_RECORD:
        return path.name
    parts = [
        part for part in path.parts if not part.startswith(PARTIAL)
    ]  # it will go from there to its place
    stages = [number for number, part in enumerate(parts[:-1]) if part in STAGES]
    return "/".join(parts[stages[-1] if stages else -2 :])


def seal_of(path: Path, content) -> str:
    return hash_json([place_of(path), content])


def _check_seal(path: Path, stated, found: str) -> None:
    if stated is None:
        raise KvlibError(
            f"{path} carries no seal, expected a record that this kvlib wrote: {_again(path)}, or choose another run name"
        )
    if stated != found:
        raise KvlibError(
            f"{path} does not match its seal, expected the record that kvlib wrote in this place: restore it, or "
            f"{_again(path).removeprefix('restore it, or ')}"
        )


def _unreadable(path: Path, what: str, error: Exception) -> KvlibError:
    if isinstance(error, FileNotFoundError):
        return KvlibError(f"{path} is missing, expected the {what} of an earlier stage: run that stage first")
    reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return KvlibError(
        f"{path} is no readable {what} ({reason}), expected the one that kvlib wrote: {_again(path)}"
    )


def _again(path: Path) -> str:
    """What to do about a record that cannot be used: a stage makes its own again, a run's settings it cannot know."""
    if Path(path).name == RUN_RECORD:
        return "restore it, or delete it and give the run's profile and parameters again"
    return "delete it and run its stage again"


def write_json(path: Path, record: dict) -> Path:
    whole = json.loads(json.dumps(record, allow_nan=False))  # as it will be read: keys are text, tuples lists
    text = json.dumps({**whole, SEAL: seal_of(path, whole)}, indent=1, sort_keys=True) + "\n"
    return write_atomically(path, lambda file: file.write_text(text))


def read_json(path: Path) -> dict:
    """What `write_json` wrote to this place. Raises KvlibError for anything else."""
    record = parse_json(path)
    if not isinstance(record, dict):
        raise KvlibError(
            f"{path} holds a {type(record).__name__}, expected a record of this kvlib: {_again(path)}"
        )
    stated = record.pop(SEAL, None)
    try:
        found = seal_of(path, record)
    except ValueError:  # NaN, which no record holds
        found = ""
    _check_seal(path, stated, found)
    return record


def parse_json(path: Path):
    """Any JSON file, whoever wrote it. Raises KvlibError when it is missing or none."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, "JSON record", error) from error


def read_record(path: Path, *keys: str) -> dict:
    """A record that has these keys. Raises KvlibError for anything else."""
    record = read_json(path)
    for key in keys:
        if key not in record:
            raise KvlibError(f"{path} lacks {key!r}, expected a record of this kvlib: {_again(path)}")
    return record


def write_table(path: Path, table: pd.DataFrame) -> Path:
    whole = pyarrow.Table.from_pandas(table, preserve_index=False)
    seal = seal_of(path, _hash_table(whole.to_pandas()))
    whole = whole.replace_schema_metadata({**(whole.schema.metadata or {}), SEAL: seal})
    return write_atomically(path, lambda file: pyarrow.parquet.write_table(whole, file))


def read_table(path: Path) -> pd.DataFrame:
    try:
        with open(path, "rb") as file:
            whole = pyarrow.parquet.read_table(file)
        stated = (whole.schema.metadata or {}).get(SEAL.encode(), b"").decode() or None
        table = whole.to_pandas()
        found = seal_of(path, _hash_table(table))
    except Exception as error:  # pyarrow raises many kinds
        raise _unreadable(path, "parquet table", error) from error
    _check_seal(path, stated, found)
    return table


def _hash_table(table: pd.DataFrame) -> str:
    """Of columns, their types and every value in its order."""
    digest = hashlib.sha256(canonical_json([[str(c), str(table[c].dtype)] for c in table]).encode())
    digest.update(pd.util.hash_pandas_object(table, index=False).to_numpy().tobytes())
    return digest.hexdigest()


def write_tensors(path: Path, tensors: dict, metadata: dict[str, str] | None = None) -> Path:
    tensors, metadata = (
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        metadata or {},
    )
    seal = seal_of(path, [metadata, hash_tensors(tensors)])
    # One key: safetensors writes several in an order that changes from run to run.
    described = {"kvlib": canonical_json({"metadata": metadata, SEAL: seal})}
    return write_atomically(path, lambda file: save_file(tensors, file, described))


def read_tensors(path: Path) -> tuple[dict, dict[str, str]]:
    """(tensors, metadata) that `write_tensors` wrote to this place."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            described = json.loads((file.metadata() or {}).get("kvlib", "{}"))
        metadata, stated = described.get("metadata"), described.get(SEAL)
    except (SafetensorError, OSError, ValueError, AttributeError) as error:
        raise _unreadable(path, "safetensors file", error) from error
    _check_seal(path, stated, seal_of(path, [metadata, hash_tensors(tensors)]))
    return tensors, metadata


def append_line(path: Path, value: dict) -> None:
    """Append one JSON line, flushed to disk before returning; a line that a killed process left half is dropped."""
    values = read_lines(path)
    lines = [
        canonical_json(line) + "\n" for line in _chained(path, [*values, json.loads(canonical_json(value))])
    ]
    write_atomically(path, lambda file: file.write_text("".join(lines)))


def read_lines(path: Path) -> list[dict]:
    """The values of a file of JSON lines; a last line without its end was never wholly written and does not count."""
    if not Path(path).exists():
        return []
    try:
        lines = [line for line in Path(path).read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        found = [json.loads(line) for line in lines]
        values = [{key: value for key, value in line.items() if key != SEAL} for line in found]
        whole = _chained(path, values) == found
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KvlibError(
            f"{path} holds a line that is no JSON record ({reason}), expected the lines that kvlib appended: restore it from a copy"
        ) from error
    if not whole:
        raise KvlibError(
            f"{path} does not match its seals, expected the lines that kvlib appended, all of them: restore it from a copy"
        )
    return values


def _chained(path: Path, values: list[dict]) -> list[dict]:
    """Each line sealed together with the seal of the line before, so that none can go or change unseen."""
    seal, lines = place_of(path), []
    for value in values:
        seal = hash_json([seal, value])
        lines.append({**value, SEAL: seal})
    return lines


@contextlib.contextmanager
def run_lock(folder: Path, name: str = ".lock") -> Iterator[None]:
    """One writer per run folder; the operating system frees the lock when a process dies."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / name)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise KvlibError(
            f"run folder {folder} is in use by another process: wait for it to end, or choose another run name"
        ) from error
    except OSError as error:
        raise KvlibError(
            f"run folder {folder} cannot be used ({error.strerror or error}), expected a folder that can be written: choose another, "
            "or fix its permissions"
        ) from error
    try:
        yield
    finally:
        lock.release()


def stage_lock(folder: Path):
    """One stage at a time in a run folder, whether a command's kernel runs it or a notebook opened by hand.

    Another file than `run_lock`'s: a command holds that one while the kernel that it started holds this one.
    """
    return run_lock(folder, ".stage.lock")
