"""Attacks on a small run: repeated, killed, met by a full disk, started twice; what happened, as records for the book."""

import hashlib
import shutil
import time
import zipfile
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import yaml

from kvlib.errors import KvlibError
from kvlib.maps.base import load_map
from kvlib.study.folders import SEALS, check_folder
from kvlib.study.moments import CROWDED, FULL, KILLED, KILLED_FETCHING
from kvlib.study.records import (
    PARTIAL,
    read_json,
    read_lines,
    read_table,
    read_tensors,
    sha256_file,
)
from kvlib.study.sabotage import Life, Started

QUALITY = ("pair", "screening", "confirmation", "frozen_evaluation")
PROFILE = "smoke"
CONTENT = b"weights, some of them\n" * 1000

# What no two runs share: times, the machine, caches that are only means, and what people look at.
NOT_QUALITY = (
    "run.json", "*/made.json", "*/ledger.jsonl", "*/spent.json", "*/shares.json", "*/windows-*", "*/prompts-*", "*/work-*", "latency/*",
    "notebooks/*", "book/*", "*.lock", "pair/pruning.json", "*/trained.json", "*/ran.json", f"*{PARTIAL}*",
)  # fmt: skip


def quality_records(run_folder: Path) -> dict[str, str]:
    """SHA-256 of every record that two undisturbed runs of one profile on one machine share, by its place in the run."""
    folder, found = Path(run_folder), {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if not any(fnmatch(name, pattern) for pattern in NOT_QUALITY):
            found[name] = sha256_file(path)
    return found


def not_whole(run_folder: Path) -> list[str]:
    """Records under their final names that their own readers refuse: there must be none, whatever a run went through."""
    folder, refused = Path(run_folder), []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if (
            any(part.startswith(PARTIAL) for part in path.relative_to(folder).parts)
            or path.suffix not in READERS
        ):
            continue
        try:
            if (path.parent / SEALS).exists():
                check_folder(path.parent)
            else:
                READERS[path.suffix](path)
        except KvlibError as error:
            refused.append(f"{name}: {error}")
    return refused


def _read_weights(path: Path) -> None:
    if path.name.startswith("prompts-"):
        read_tensors(path)
    else:
        load_map(path, pair=None)


READERS = {".json": read_json, ".jsonl": read_lines, ".parquet": read_table, ".safetensors": _read_weights}


def attack(
    folder: Path, kinds: list[str] | None = None, say: Callable[[str], None] = lambda sentence: None
) -> list[dict]:
    """Attack runs of the smoke profile below `folder` and record what happened.

    Args:
        kinds: some of `KINDS`; None for all. say: told the name of each attack before it begins.

    Returns: one record per attack, {"attack", "moment", "times", "outcome", "held", "seconds"}: what was done, at which
    moments, how often, what came of it in words, whether that is what kvlib promises, and how long it took.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(KINDS) if kinds is None else kinds
    unknown = [kind for kind in wanted if kind not in KINDS]
    if unknown:
        raise KvlibError(
            f"attack {unknown[0]!r} given, expected some of {', '.join(KINDS)}: correct the name"
        )
    reference = _Place(folder / "undisturbed")
    life = reference.live(None, None)
    if life.end != "done":
        raise KvlibError(
            f"the undisturbed run {life.end} ({life.said}), expected it to end: run its stages by hand"
        )
    records = quality_records(reference.run)
    found = []
    for kind in wanted:
        say(kind)
        started = time.monotonic()
        moments, outcome, held = KINDS[kind](_Place(folder / kind.replace(" ", "-")), records)
        found.append(
            {
                "attack": kind, "moment": "; ".join(map(str, moments)) or "none", "times": max(len(moments), 1),
                "outcome": outcome, "held": held, "seconds": round(time.monotonic() - started, 1),
            }
        )  # fmt: skip
    return found


class _Place:
    """A folder for one attack: the run in it, and the log of what was trained."""

    def __init__(self, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.run, self.log = folder, folder / "results" / PROFILE, folder / "trained.log"

    def start(self, act: str | None, moment, stages: tuple | None = None) -> Started:
        job = ("stages", str((self.folder / "results").absolute()), PROFILE, stages or QUALITY)
        return Started(job, act, moment, self.log)

    def live(self, act: str | None, moment, stages: tuple | None = None) -> Life:
        return self.start(act, moment, stages).life()

    def trained_again(self) -> list[str]:
        """Arms that were trained a step more after they had been finished."""
        finished, again = set(), []
        for line in self.log.read_text().splitlines():
            what, arm = line.split()
            if what == "finished":
                finished.add(arm)
            elif arm in finished:
                again.append(arm)
        return again

    def end(self, records: dict[str, str]) -> str | None:
        """Start the run a last time, undisturbed; what is wrong with what it left, or None."""
        life = self.live(None, None)
        if life.end != "done":
            return f"started again, the run {life.end}: {life.said}"
        found = quality_records(self.run)
        other = sorted(name for name in found.keys() | records.keys() if found.get(name) != records.get(name))
        if other:
            return f"other records: {', '.join(other)}"
        if self.trained_again():
            return f"trained twice: {', '.join(sorted(set(self.trained_again())))}"
        broken = not_whole(self.run)
        return f"a partial file in place: {broken[0]}" if broken else None


def _repeated(place: _Place, records: dict) -> tuple[list, str, bool]:
    wrong = place.end(records)
    return [], wrong or "same records", wrong is None


def _killed(moments: list) -> Callable:
    def killed(place: _Place, records: dict) -> tuple[list, str, bool]:
        for moment in moments:
            life = place.live("kill", moment)
            if life.end != "killed":
                return moments, f"the moment {moment} never came: {life.end} {life.said}", False
            if broken := not_whole(place.run):
                return moments, f"killed {moment}, a partial file in place: {broken[0]}", False
        wrong = place.end(records)
        return moments, wrong or "same records", wrong is None

    return killed


def _full(place: _Place, records: dict) -> tuple[list, str, bool]:
    moments = [moment for _, moment in FULL]
    for stages, moment in FULL:
        life = place.live("full", moment, stages)
        if life.end != "refused" or "\n" in life.said:
            return moments, f"{moment}: {life.end} {life.said}", False
        left = [str(path) for path in place.run.rglob(f"{PARTIAL}*")] + not_whole(place.run)
        if left:
            return moments, f"{moment}: left {left[0]}", False
    wrong = place.end(records)
    return moments, wrong or "one sentence each time, then same records", wrong is None


def _twice(place: _Place, records: dict) -> tuple[list, str, bool]:
    moments = [moment for _, moment in CROWDED]
    for stages, moment in CROWDED:
        first = place.start("hold", moment, stages)
        arrived = first.held()
        second = place.live(None, None, stages) if arrived else Life("failed", "the moment never came")
        first.go()
        life = first.life()
        if life.end != "done" or second.end != "refused" or "in use by another process" not in second.said:
            return (
                moments,
                f"{moment}: first {life.end} {life.said}, second {second.end} {second.said}",
                False,
            )
    wrong = place.end(records)
    return moments, wrong or "the second refused, same records", wrong is None


def _fetching(place: _Place, records: dict) -> tuple[list, str, bool]:
    """The download of a file out of a package's wheel, by pip itself, from a folder instead of the network."""
    cache, listing = place.folder / "cache", _shelf(place.folder / "shelf")
    for moment in [*KILLED_FETCHING, None]:
        life = Started(("fetch", str(cache), str(listing)), "kill", moment, place.log).life()
        if life.end != ("killed" if moment else "done"):
            return KILLED_FETCHING, f"{moment}: {life.end} {life.said}", False
        there = (cache / "weights.bin").read_bytes() if (cache / "weights.bin").exists() else None
        if there != CONTENT and (moment is None or there is not None):
            return KILLED_FETCHING, f"{moment}: a partial file in place", False
    return KILLED_FETCHING, "same file", True


def _shelf(folder: Path) -> Path:
    """A wheel that holds `CONTENT`, and a list of assets that has pip take it from there."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/weights.bin", CONTENT)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    asset = {
        "package": "tiny", "version": "1.0", "pip": ["--no-index", "--find-links", str(folder.absolute())],
        "member": "tiny/weights.bin", "file": "weights.bin", "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "bytes": len(CONTENT), "wheel_bytes": len(CONTENT), "licence": "MIT", "homepage": "none", "source": "made up",
    }  # fmt: skip
    listing = folder / "assets.yaml"
    listing.write_text(yaml.safe_dump({"weights": asset}))
    return listing


KINDS = {
    "run a second time": _repeated,
    "killed while downloading": _fetching,
    **{f"killed while {what}": _killed(moments) for what, moments in KILLED.items()},
    "disk full": _full,
    "started twice at once": _twice,
}
