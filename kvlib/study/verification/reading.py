"""A run's records as they lie in its folder: read, never written, whatever state they are in."""

import datetime
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from kvlib.errors import KvlibError
from kvlib.study.models import load_pair_tokenizer
from kvlib.study.pairing import load_partitions, recorded_fingerprint
from kvlib.study.partitions import Partitions
from kvlib.study.profile import Profile, load_profile
from kvlib.study.records import read_json, read_record, read_table
from kvlib.study.run import FORMAT, Run, home
from kvlib.study.verification.checking import Check

HEAD = ("profile", "label", "key", "files")  # of every summary: compared by the checks "stages" and "files"

LOWEST_KL = -1e-5  # rounding takes a divergence of nothing this far below zero, and nothing takes it further


def recorded_run(folder: Path) -> Run:
    """The run that `run.json` describes. `Run.open` may write that file; this never does. Raises KvlibError."""
    path = folder / "run.json"
    record = read_record(path, "format", "profile", "source", "overrides", "created")
    if record["format"] != FORMAT:
        raise KvlibError(f"{path} has format {record['format']}, this kvlib reads {FORMAT}")
    datetime.datetime.fromisoformat(record["created"])
    source = record["source"]
    by_path = source.endswith((".yaml", ".yml"))
    profile = load_profile(str(home() / source) if by_path else source, record["overrides"])
    if profile.name != record["profile"]:
        raise KvlibError(
            f"{path} is of profile {record['profile']!r}, and {source} is of profile {profile.name!r}"
        )
    return Run(profile, folder.name, folder, record["overrides"], source)


def training_dtype_of(profile: Profile, summary: dict) -> str:
    """What a summary should say of it: `auto` depends on the machine, and either of its choices stands."""
    wanted, recorded = profile.training.dtype, summary["training_dtype"]
    return recorded if wanted == "auto" and recorded in ("float32", "bfloat16") else wanted


@dataclass(frozen=True)
class Records:
    """What the checks read. `stage` is a stage's name, `file` one in its folder."""

    run: Run

    def has(self, stage: str) -> bool:
        return (self.run.stage(stage) / "summary.json").exists()

    def json(self, stage: str, file: str) -> dict:
        return read_record(self.run.stage(stage) / file)

    def summary(self, stage: str) -> dict:
        return self.json(stage, "summary.json")

    def made(self, stage: str) -> dict:
        return self.json(stage, "made.json")

    def table(self, stage: str, file: str) -> pd.DataFrame:
        return read_table(self.run.stage(stage) / file)

    def name(self, path: Path) -> str:
        """A file's place in the run."""
        return str(path.relative_to(self.run.folder))

    def partition(self, name: str) -> dict:
        return read_json(self.run.stage("pair") / "partitions.json")["partitions"][name]

    def articles(self, partition: str) -> list[str]:
        """The article of each of a partition's items."""
        return [item["article"] for item in self.partition(partition)["items"]]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The pair's, from a folder that was hashed once for all checks."""
        return load_pair_tokenizer(self.run)

    @cached_property
    def partitions(self) -> Partitions:
        return load_partitions(self.run)

    @property
    def pair(self) -> str:
        """The pair's fingerprint."""
        return recorded_fingerprint(self.summary("pair"))

    @property
    def training_dtype(self) -> torch.dtype:
        """As recorded: what `auto` meant on the machine that trained."""
        return getattr(torch, self.summary("screening")["training_dtype"])

    def same_summary(self, check: Check, stage: str, expected: dict, recorded: tuple[str, ...] = ()) -> None:
        """Compare a summary with what was recomputed, key by key; one that nothing recomputes is a mismatch.

        recorded: keys whose values are measurements of their own, which no table holds; they have to be there.
        """
        where = f"{stage}/summary.json"
        found = {key: value for key, value in self.summary(stage).items() if key not in HEAD}
        for key in recorded:
            check.holds(key in found, f"{where}, {key}: found nothing, expected what was measured")
        check.same(where, {key: value for key, value in found.items() if key not in recorded}, expected)
