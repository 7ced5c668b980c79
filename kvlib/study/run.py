"""A run: its folder, its effective profile, and which stages in it are finished."""

import datetime
import hashlib
import os
import time
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.device import device_name, device_of
from kvlib.study.folders import changed_file
from kvlib.study.lowering import LOWERED, read_lowered
from kvlib.study.names import (  # noqa: F401 (other files know them from here as well)
    EXTRA,
    HOME_VARIABLE,
    NOTEBOOKS,
    ROOT,
    STAGES,
    check_run_name,
    home,
    sequence,
)
from kvlib.study.profile import Profile, load_profile
from kvlib.study.records import hash_json, read_record, sha256_file, write_json
from kvlib.study.shares import SHARES, read_shares

SOURCES = (".py", ".c", ".h")  # what kvlib's code is written in
FORMAT = 2  # of the run folder; raised when an older folder can no longer be read

# The parts of a profile that each stage depends on; a stage also depends on everything before it.
DEPENDS = {
    "pair": (
        "seed",
        "pair",
        "corpus",
        "partitions",
        "prompt",
        "evaluation.gate_tolerance",
        "evaluation.gate_prefix_tokens",
    ),
    "screening": ("training", "screening"),
    "confirmation": ("confirmation",),
    "frozen_evaluation": ("evaluation",),
    "latency": ("latency",),
    "evidence": ("evidence",),
}

# What a stage leaves beside its summary; without one of these it is not finished.
OUTPUTS = {
    "pair": ("partitions.json",),
    "screening": ("curves.parquet", "validation.parquet", "grid.parquet"),
    "confirmation": ("manifest.json", "learned.safetensors", "ridge.safetensors", "validation.parquet"),
    "frozen_evaluation": ("prompts.parquet", "steps.parquet", "controls.parquet", "ledger.jsonl"),
    "latency": ("raw.parquet", "memory.parquet", "breakdown.parquet", "pipeline.parquet"),
    "evidence": (
        "lengths.parquet",
        "learning.parquet",
        "ablation.parquet",
        "singular_values.parquet",
        "size.parquet",
        "ridge.parquet",
    ),
}

MADE = "made.json"  # beside a summary: when, how long, with what it was made


class Run:
    """`results/<name>` with its profile. Parameters given once stay with the run until `reset`."""

    def __init__(self, profile: Profile, name: str, folder: Path, overrides: dict, source: str):
        self.profile, self.name, self.folder, self.overrides, self.source = (
            profile,
            name,
            folder,
            overrides,
            source,
        )

    @classmethod
    def open(
        cls,
        profile: str,
        name: str | None = None,
        *,
        results: str | Path = "results",
        overrides: dict | None = None,
    ) -> "Run":
        """Open or begin a run.

        Args:
            profile: a profile's name or path. name: the folder under `results`; the profile's name when None.
            overrides: dotted keys to values; None values are ignored, others are remembered in the run.

        Raises: KvlibError for bad values, and for a folder of another profile or format.
        """
        base = load_profile(profile)
        by_path = profile.endswith((".yaml", ".yml"))
        source = os.path.relpath(profile, home()) if by_path else profile  # how later commands find it again
        name = base.name if name is None else name
        folder = (
            home() / results / check_run_name(name, home() / results)
        )  # an absolute `results` stays as it is
        record_path = folder / "run.json"
        remembered: dict = {}
        if record_path.exists():
            record = read_record(record_path, "format", "profile", "overrides")
            if record["format"] != FORMAT:
                raise KvlibError(
                    f"{folder} has format {record['format']}, this kvlib writes {FORMAT}: choose another run name"
                )
            if record["profile"] != base.name:
                raise KvlibError(
                    f"{folder} is a run of profile {record['profile']!r}, profile {base.name!r} was given: choose another run name"
                )
            remembered = record["overrides"] if isinstance(record["overrides"], dict) else {}
        given = {key: value for key, value in (overrides or {}).items() if value is not None}
        merged = {**remembered, **given}
        effective = load_profile(profile, merged)
        if not record_path.exists() or merged != remembered or record.get("source") != source:
            fresh = {
                "format": FORMAT,
                "profile": base.name,
                "source": source,
                "overrides": merged,
                "created": now(),
            }
            write_json(record_path, fresh)
        return cls(effective, name, folder, merged, source)

    def stage(self, stage: str) -> Path:
        return self.folder / stage

    def key(self, stage: str) -> str:
        """Hash of everything in the profile that the stage's records depend on, earlier stages included."""
        return hash_json(self.settings(stage))

    def settings(self, stage: str) -> dict:
        """What `key` is the hash of: the parts of the profile by dotted key."""
        upstream = sequence(stage)[:-1]
        if stage == "latency":  # needs the frozen map, not the final evaluation
            upstream = tuple(s for s in upstream if s != "frozen_evaluation")
        keys = [key for name in (*upstream, stage) for key in DEPENDS[name]]
        values = self.profile.model_dump(mode="json")
        return {key: _dig(values, key) for key in keys}

    def finished(self, stage: str) -> dict | None:
        """The stage's summary if it is there and of the run's present settings. Raises KvlibError where a file was swapped."""
        folder, summary = self.stage(stage), self._summary(stage)
        if summary is not None and (swapped := changed_file(folder, summary["files"])):
            raise KvlibError(
                f"{swapped} is not the file that {folder / 'summary.json'} was written with, expected the same bytes: restore it, or "
                "delete it and run its stage again"
            )
        return summary

    def _summary(self, stage: str) -> dict | None:
        folder = self.stage(stage)
        if not all((folder / name).exists() for name in ("summary.json", MADE, *OUTPUTS[stage])):
            return None  # what is missing is made again from the stage's smaller records
        summary = read_summary(folder)
        return summary if summary["key"] == self.key(stage) else None

    def require(self, stage: str, wanted_by: str) -> dict:
        """The summary of an earlier stage. Raises KvlibError with the command to run when there is none.

        Its files are not compared with it: a stage checks those that it reads, see `check_manifest`.
        """
        summary = self._summary(stage)
        if summary is None:
            present = (self.stage(stage) / "summary.json").exists()
            state = "was made with other settings" if present else "has not been run"
            raise KvlibError(
                f"stage {wanted_by} of run {self.name} needs stage {stage}, which {state}: run "
                f"`python -m kvlib run {NOTEBOOKS[stage]} --profile {self.source} --run {self.name}` first"
            )
        return summary

    def publish(self, stage: str, summary: dict, started: float, made: dict | None = None) -> dict:
        """Write a stage's two records, and return them as one.

        Args:
            summary: what was found: the same bytes whenever the same is run. Written last, so that its presence means
                the stage is whole. made: what differs from one run to the next (times, memory, machine).
        """
        folder = self.stage(stage)
        tables = {name: sha256_file(folder / name) for name in OUTPUTS[stage] if name != "ledger.jsonl"}
        made = {
            "run": self.name,
            "created": now(),
            "duration_s": round(self.spent(stage) + time.time() - started, 1),
            "settings": self.settings(stage),  # so that one who changes them can be told what was changed
            "device": device_name(device_of(self.profile)),
            **({"lowered": lowered} if (lowered := read_lowered(folder)) else {}),
            **({"shares": shares} if (shares := read_shares(folder, self.key(stage))) else {}),
            **(made or {}),
        }
        found = {
            "profile": self.profile.name,
            "label": self.profile.label,
            "key": self.key(stage),
            "files": tables,
            **summary,
        }
        write_json(folder / MADE, made)
        write_json(folder / "summary.json", found)
        (folder / "spent.json").unlink(missing_ok=True)
        for name in (LOWERED, SHARES):
            (folder / name).unlink(missing_ok=True)
        return {**made, **found}

    def add_time(self, stage: str, started: float) -> float:
        """Remember the time spent so far on a stage, so that a killed stage's duration is still whole."""
        present = time.time()
        write_json(
            self.stage(stage) / "spent.json",
            {"key": self.key(stage), "seconds": self.spent(stage) + present - started},
        )
        return present

    def spent(self, stage: str) -> float:
        """Seconds that a stage which is not finished has taken so far, in these settings."""
        path = self.stage(stage) / "spent.json"
        if not path.exists():
            return 0.0
        record = read_record(path, "key", "seconds")
        return record["seconds"] if record["key"] == self.key(stage) else 0.0


def read_summary(folder: Path) -> dict:
    """A stage's summary and how it was made, as one; raises KvlibError where one of them is no record."""
    made = read_record(folder / MADE, "run", "created", "duration_s")
    return {**made, **read_record(folder / "summary.json", "key", "profile", "label", "files")}


def _dig(values: dict, key: str):
    for part in key.split("."):
        values = values[part]
    return values


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def code_files() -> list[Path]:
    """kvlib's source files, in order: Python, and the C that is compiled where it is used."""
    root = Path(__file__).resolve().parents[1]
    return sorted(path for path in root.rglob("*") if path.suffix in SOURCES)


def code_hash() -> str:
    """SHA-256 over kvlib's source files, the report floor left out: a reader may edit charts of a finished run."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in code_files():
        name = path.relative_to(root)
        if name.parts[0] != "report":
            digest.update(f"{name}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
