"""Hub ids and local folders: revisions resolved to commits, snapshots whole on the disk before a model is read."""

import json
import shutil
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HFValidationError

from kvlib.errors import KvlibError
from kvlib.load_errors import load_error

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What a run reads of a model's repository: not the copies of its weights in other formats.
WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
UNWANTED = ["original/*", "*.gguf", "onnx/*"]
SPARE_BYTES = 1 << 30  # left on the disk for records

Kind = Literal["model", "dataset"]


def local_folder(place: str, home: Path) -> Path | None:
    """The folder that `place` names, relative ones from `home`; None for a hub id.

    Raises: KvlibError where it is written as a path and there is no such folder.
    """
    folder = home / Path(place).expanduser()
    if folder.is_dir():
        return folder
    if place.startswith(("/", ".", "~")) or place.count("/") > 1:
        raise KvlibError(
            f"{place} given, expected a folder that is there or a hub id such as meta-llama/Llama-3.1-8B: correct the path"
        )
    return None


def commit_of(place: str, revision: str | None, kind: Kind = "model") -> str:
    """The commit hash that a revision of a hub id stands for now; from the hub's cache where there is no network.

    Raises: KvlibError: no access, no token, no such id or revision, no network and nothing cached.
    """
    try:
        found = HfApi().repo_info(place, revision=revision, repo_type=kind)
        return found.sha
    except Exception as error:  # the client raises its own kinds, those of its HTTP library and OSError
        cached = _cached_commit(place, revision, kind)
        if cached is not None:
            return cached
        expected = f"a hub id of a {kind} or a local folder"
        raise load_error(error, place, expected, "correct the id") from error


def _cached_commit(place: str, revision: str | None, kind: Kind) -> str | None:
    """The commit that a branch had when it was last fetched into the cache, or the only one that is there."""
    folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{place.replace('/', '--')}"
    name = revision or "main"
    reference = folder / "refs" / name
    if reference.is_file():
        name = reference.read_text("utf-8").strip()
    there = [path.name for path in (folder / "snapshots").glob("*")]
    if (
        revision is None and name not in there and len(there) == 1
    ):  # fetched by its commit, which moves no branch
        return there[0]
    return name if name in there else None


def snapshot(place: str, commit: str) -> Path:
    """The folder in the hub's cache with this commit's model, downloaded when it is not there, and whole.

    Raises: KvlibError: as `commit_of`, too little disk, or files that are missing or cut short.
    """
    selection = {"revision": commit, "allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    try:
        folder = Path(huggingface_hub.snapshot_download(place, local_files_only=True, **selection))
        if not lacking(folder):
            return folder
    except (OSError, HFValidationError):
        pass  # not in the cache, or not all of it
    try:
        require_space(place, commit)
        folder = Path(huggingface_hub.snapshot_download(place, **selection))
    except KvlibError:
        raise
    except Exception as error:
        raise load_error(error, place, "a hub id of a causal language model", "run again") from error
    return check_files(folder, place)


def require_space(place: str, commit: str) -> None:
    """Raises KvlibError where the cache's disk has less room than the files that are still to come need."""
    wanted = HfApi().repo_info(place, revision=commit, files_metadata=True).siblings or []
    sizes = {each.rfilename: each.size or 0 for each in wanted}
    names = huggingface_hub.utils.filter_repo_objects(sizes, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    there = Path(constants.HF_HUB_CACHE) / f"models--{place.replace('/', '--')}" / "snapshots" / commit
    needed = sum(sizes[name] for name in names if not (there / name).exists())
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise KvlibError(
            f"no room for {place}: {folder} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are still to be downloaded, with "
            f"{SPARE_BYTES / 1e9:.0f} GB to spare: free some space, or set HF_HOME to a folder on a larger disk"
        )


def check_files(folder: Path, place: str | None = None) -> Path:
    """The folder, if its weight files are all there and none is cut short. Raises KvlibError naming the first that is."""
    problem = lacking(folder)
    if problem:
        raise KvlibError(
            f"{place or folder}: {problem}, expected the whole model in safetensors: download it again (`hf download` resumes what "
            "broke off)"
        )
    return folder


def lacking(folder: Path) -> str:
    """What keeps a folder from being a whole model in safetensors; empty where nothing does."""
    if not (folder / "config.json").is_file():
        return "config.json is missing"
    index = folder / INDEX
    try:
        names = shards(index) if index.is_file() else [SINGLE]
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{INDEX} cannot be read ({type(error).__name__})"
    for number, name in enumerate(names, 1):
        path, which = folder / name, f" (file {number} of {len(names)})" if len(names) > 1 else ""
        if not path.is_file():
            return f"{name}{which} is missing"
        if not tensors_of(path):
            return f"{name}{which} is cut short or no safetensors file"
    return ""


def shards(index: Path) -> list[str]:
    """The weight files that a model's index names, in order."""
    return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))


def tensors_of(path: Path) -> dict[str, dict]:
    """Name -> {"dtype", "shape", "data_offsets"} from a safetensors file's header; empty unless the file is whole."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            header = json.loads(file.read(length)) if 8 + length <= size else {}
        header.pop("__metadata__", None)
        ends = [entry["data_offsets"][1] for entry in header.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return {}
    return header if ends and 8 + length + max(ends) == size else {}
