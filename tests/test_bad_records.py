"""Whatever was done to a file of a run, no stage uses it: it is refused in one sentence, or made again as it was."""

import fnmatch
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvlib import KvlibError
from kvlib.maps.base import hash_map
from kvlib.study.folders import SEALS, check_folder
from kvlib.study.records import (
    parse_json,
    read_json,
    read_lines,
    read_table,
    read_tensors,
    seal_of,
    write_json,
    write_table,
    write_tensors,
)
from kvlib.study.resilience import QUALITY, READERS, quality_records
from kvlib.study.stages import (
    STAGES,
    open_run,
    run_confirmation,
    run_frozen_evaluation,
    run_latency,
    run_pair,
    run_screening,
)

RUN = dict(zip(STAGES, (run_pair, run_screening, run_confirmation, run_frozen_evaluation, run_latency)))
# Every file that a run leaves is of one of these kinds; a test below holds the list against the folder.
FILES = [
    "run.json", "pair/key.json", "pair/revisions.json", "pair/partitions.json", "pair/layers.parquet", "pair/pruning.json",
    *(f"pair/{folder}" for folder in ("articles/*.arrow", "articles/state.json", "articles/dataset_info.json")),
    *(f"pair/{role}/{file}" for role in ("target", "source")
      for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")),
    *(f"pair/{folder}/{SEALS}" for folder in ("articles", "target", "source")),
    *(f"{stage}/{file}" for stage in STAGES for file in ("summary.json", "made.json")),
    *(f"{stage}/{file}" for stage in ("screening", "confirmation")
      for file in ("windows-*/windows.json", "windows-*/source.bin", "windows-*/target.bin", "windows-*/hidden.bin",
                   "windows-*/scale.json", "prompts-*/prompts-*-source.safetensors", "prompts-*/prompts-*-native.safetensors",
                   "ridge-*.safetensors", "validation.parquet", "arms/*/trained.json", "arms/*/ran.json",
                   "arms/*/curve.parquet", "arms/*/scored-*.json", "arms/*/step-*.safetensors")),
    "screening/curves.parquet", "screening/grid.parquet", "confirmation/manifest.json",
    *(f"confirmation/{name}.safetensors" for name in ("learned", "ridge", "wrong_trained")),
    *(f"frozen_evaluation/{file}"
      for file in ("work-*/opening.json", "work-*/prompts-*-source.safetensors", "work-*/prompts-*-native.safetensors",
                   "work-*/steps-*.parquet", "work-*/controls-*.parquet",
                   "prompts.parquet", "steps.parquet", "controls.parquet", "ledger.jsonl")),
    *(f"latency/{file}"
      for file in ("parts/[0-9]*.parquet", "parts/breakdown-*.parquet", "parts/pipeline-*.parquet", "raw.parquet",
                   "memory.parquet", "breakdown.parquet", "pipeline.parquet")),
]  # fmt: skip
MAKESHIFT = [".stage.lock"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run, all five stages; memory is not probed, since that takes seconds and no record of interest."""
    folder = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    run = open_run("smoke", results=folder, **{"latency.memory": False})
    for stage in RUN.values():
        stage(run)
    return folder, quality_records(run.folder)


@pytest.fixture
def run(whole, tmp_path):
    shutil.copytree(whole[0] / "smoke", tmp_path / "smoke")
    return open_run("smoke", results=tmp_path)


def files_of(folder: Path, kind: str) -> list[Path]:
    names = [p for p in sorted(folder.rglob("*")) if fnmatch.fnmatch(str(p.relative_to(folder)), kind)]
    return [path for path in names if path.is_file()]


def chosen_file(whole, kind: str) -> str:
    """One file of a kind, by its place in the run: of arms the one that is frozen, so that all the rest depends on it."""
    folder = whole[0] / "smoke"
    found = files_of(folder, kind)
    if "/arms/" in kind:
        best = read_json(folder / "confirmation" / "summary.json")["frozen"]
        seed = best["seed"] if kind.startswith("confirmation") else 0
        step = f"{best['checkpoint_step']:05d}"
        found = [p for p in found if p.parent.name.startswith(f"{best['arm']}-seed{seed}-")]
        found = [p for p in found if step in p.name] or found
    return str(found[0].relative_to(folder))


def test_the_kinds_are_all_that_a_run_leaves(whole):
    folder = whole[0] / "smoke"
    unknown = [
        name
        for name in (str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        if not any(fnmatch.fnmatch(name, kind) for kind in (*FILES, *MAKESHIFT))
    ]
    assert unknown == [] and all(files_of(folder, kind) for kind in FILES)


def flip(share: float):
    def flipped(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(len(content) * share), len(content) - 1)] ^= 0x04
        path.write_bytes(content)

    return flipped


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def another(path: Path) -> None:
    """Another valid file of the same format, from elsewhere in the run, as like this one as there is."""
    run = next(parent for parent in path.parents if (parent / "run.json").exists())
    others = [p for p in sorted(run.rglob(f"*{path.suffix}")) if p.read_bytes() != path.read_bytes()]
    same = [p for p in others if p.name == path.name]
    path.write_bytes((same or others or [run / "run.json"])[0].read_bytes())


def text(content: str):
    return lambda path: path.write_text(content)


ANY = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "a byte changed early": flip(0.1),
    "a byte changed in the middle": flip(0.5),
    "a byte changed late": flip(0.9),
    "a directory": directory,
    "another of its format": another,
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(2000)),
}
JSON = {f"JSON {c[:4]}": text(f"{c}\n") for c in ("[]", '"x"', "{}", "null", "3", "NaN", "[" * 20000)}


def spoilers(kind: str) -> dict:
    return ANY | (JSON if kind.endswith((".json", ".jsonl")) else {})


def refused(path: Path) -> bool:
    """Whether what reads files of this kind refuses this one, by a sentence; any other exception goes through."""
    try:
        if path.parent.name in ("articles", "target", "source") and path.parent.parent.name == "pair":
            check_folder(path.parent)
        else:
            READERS[path.suffix](path)
    except KvlibError as refusal:
        assert "\n" not in str(refusal)
        return True
    return False


@pytest.mark.parametrize("kind", [kind for kind in FILES if not kind.endswith(".bin")])
def test_every_reader_refuses_every_kind_of_damage(whole, run, kind):
    path = run.folder / chosen_file(whole, kind)
    assert not refused(path)
    for name, spoil in spoilers(kind).items():
        if kind.endswith(".jsonl") and name in ("one byte long", "one byte short", "half", "empty"):
            continue  # a last line that was not wholly written does not count: see below
        if is_map(path) and name == "another of its format":
            continue  # a map may be loaded from anywhere; the stage that does looks for whose it is
        content = path.read_bytes()
        spoil(path)
        assert reads_the_same(path, content) or refused(path), name
        if path.is_dir():
            path.rmdir()
        path.write_bytes(content)
        assert not refused(path)


def is_map(path: Path) -> bool:
    return path.suffix == ".safetensors" and not path.name.startswith(("prompts-", "model"))


def reads_the_same(path: Path, content: bytes) -> bool:
    """Whether a damaged JSON or parquet file still says the same: white space, or statistics that nobody reads."""
    if path.suffix not in (".json", ".parquet") or not path.is_file():
        return False
    whole = path.with_name(f"whole{path.suffix}")
    whole.write_bytes(content)
    try:
        if path.suffix == ".json":
            return parse_json(path) == parse_json(whole)
        return pd.read_parquet(path).equals(pd.read_parquet(whole))
    except Exception:  # whatever pyarrow raises: then it does not
        return False
    finally:
        whole.unlink()


def after_damage(run, name: str, spoil, *, own_stage_again: bool = True) -> str:
    """Spoil a file, then run the stages that may read it; the refusal, or "" when all went through."""
    path, owner = run.folder / name, name.split("/")[0] if "/" in name else "pair"
    first = STAGES.index(owner)
    spoil(path)
    for number, stage in enumerate(STAGES[:4]):
        summary = run.stage(stage) / "summary.json"
        if (number > first or (number == first and own_stage_again)) and summary != path:
            summary.unlink(missing_ok=True)
    try:
        again = open_run("smoke", results=run.folder.parent)
        for stage in STAGES[first : 5 if owner == "latency" else 4]:
            RUN[stage](again)
    except KvlibError as refusal:
        assert "\n" not in str(refusal)
        return str(refusal)
    return ""


def check(whole, run, name: str, said: str) -> None:
    """Refused, or all records are as they were; the spoilt file itself may stay spoilt where no stage reads it."""
    if said:
        return
    found, path = quality_records(run.folder), run.folder / name
    allowed = {name}
    assert [key for key in whole[1] if key not in allowed and found.get(key) != whole[1][key]] == []
    if found.get(name) != whole[1].get(name):  # then whoever comes to read it is told
        content = (whole[0] / "smoke" / name).read_bytes()
        assert path.is_dir() or is_map(path) or reads_the_same(path, content) or refused(path)


# Three of the ways for each kind of file, others for the next: every way meets every format.
WAYS = [
    (kind, name, again)
    for number, kind in enumerate(FILES)
    for turn, again in enumerate((True, False, True))
    for name in [sorted(spoilers(kind))[(3 * number + turn * 2) % len(spoilers(kind))]]
]


@pytest.mark.parametrize(("kind", "way", "again"), WAYS)
def test_no_stage_uses_a_damaged_file(whole, run, kind, way, again):
    name = chosen_file(whole, kind)
    check(whole, run, name, after_damage(run, name, spoilers(kind)[way], own_stage_again=again))


@pytest.mark.parametrize("name", ["source", "target", "hidden"])
@pytest.mark.parametrize("stage", ["screening", "confirmation"])
def test_a_window_in_which_a_byte_changed_is_filled_anew(whole, run, stage, name):
    file = chosen_file(whole, f"{stage}/windows-*/{name}.bin")
    shutil.rmtree(run.stage(stage) / "arms")  # what is trained from now on is trained on the windows
    before = (run.folder / file).read_bytes()
    assert after_damage(run, file, flip(0.7)) == ""
    assert (run.folder / file).read_bytes() == before
    check(whole, run, file, "")


@pytest.mark.parametrize("kind", [kind for kind in FILES if "/ridge-" in kind or "/step-" in kind])
def test_another_map_of_the_run_is_not_used(whole, run, kind):
    for path in run.folder.glob("*/arms/*/scored-*.json"):
        path.unlink()
    name = chosen_file(whole, kind)
    said = after_damage(run, name, another)
    assert "was not fitted on this stage's windows" in said or "is not the checkpoint of" in said


def test_windows_of_another_stage_are_filled_anew(whole, run):
    shutil.rmtree(run.stage("confirmation") / "arms")
    for path in run.stage("screening").glob("windows-*/*"):
        shutil.copy(path, next(run.stage("confirmation").glob("windows-*")) / path.name)
    for name in ("windows.json", "scale.json"):  # sealed for this place: what is within them must tell
        path = next(run.stage("confirmation").glob(f"windows-*/{name}"))
        write_json(path, {k: v for k, v in parse_json(path).items() if k != "seal"})
    (run.stage("confirmation") / "summary.json").unlink()
    for stage in STAGES[:4]:
        RUN[stage](run)
    check(whole, run, "run.json", "")


def resealed(change):
    """A record changed by someone who knows how to seal it."""

    def spoil(path: Path) -> None:
        value = read_json(path)
        change(value)
        write_json(path, value)

    return spoil


def retabled(change):
    return lambda path: write_table(path, change(read_table(path)))


def retensored(change):
    def spoil(path: Path) -> None:
        tensors, metadata = read_tensors(path)
        change(tensors)
        write_tensors(path, tensors, metadata)

    return spoil


def remapped(change):
    def spoil(path: Path) -> None:
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            described = json.loads(file.metadata()["kvlib"])
        change(tensors)
        described["sha256"] = hash_map(described, tensors)
        save_file(tensors, path, {"kvlib": json.dumps(described, sort_keys=True)})

    return spoil


def not_a_number(table: pd.DataFrame, column: str) -> pd.DataFrame:
    return table.assign(**{column: [math.nan, *table[column][1:]]})


TABLES = {
    "a column short": lambda t: t.iloc[:, :-1],
    "a column more": lambda t: t.assign(more=1),
    "a row short": lambda t: t.iloc[:-1],
    "a row twice": lambda t: pd.concat([t, t.iloc[-1:]], ignore_index=True),
    "no row": lambda t: t.iloc[:0],
}
TENSORS = {
    "one short": lambda t: t.pop(sorted(t)[0]),
    "one more": lambda t: t.update(more=torch.zeros(2)),
    "one renamed": lambda t: t.update(renamed=t.pop(sorted(t)[0])),
    "another shape": lambda t: t.update({sorted(t)[-1]: t[sorted(t)[-1]][..., :-1].contiguous()}),
    "NaN": lambda t: t.update({sorted(t)[-1]: t[sorted(t)[-1]].float() * math.nan}),
}
FORGED = [
    *(("screening/arms/*/curve.parquet", retabled(change), name) for name, change in TABLES.items()),
    ("screening/arms/*/curve.parquet", retabled(lambda t: not_a_number(t, "loss")), "NaN"),
    *(("frozen_evaluation/work-*/steps-*.parquet", retabled(change), name) for name, change in TABLES.items()),
    ("frozen_evaluation/work-*/steps-*.parquet", retabled(lambda t: not_a_number(t, "kl")), "NaN"),
    *((f"{place}-*/prompts-*-{role}.safetensors", retensored(change), name)
      for place in ("screening/prompts", "frozen_evaluation/work") for role in ("source", "native")
      for name, change in TENSORS.items()),
    ("screening/windows-*/scale.json", resealed(lambda r: r.update(scale=7)), "a number for a list"),
    ("screening/windows-*/scale.json", resealed(lambda r: r["scale"].pop()), "values short"),
    *(("screening/arms/*/step-*.safetensors", remapped(change), name) for name, change in TENSORS.items()),
    *(("confirmation/ridge-*.safetensors", remapped(change), name) for name, change in TENSORS.items()),
    ("screening/arms/*/scored-*.json", resealed(lambda r: r["kl32"].pop()), "a prompt short"),
    ("screening/arms/*/scored-*.json", resealed(lambda r: r["prompt"].append(8)), "a prompt more"),
    ("screening/arms/*/scored-*.json", resealed(lambda r: r.update(kl32="x")), "text for numbers"),
    ("screening/arms/*/scored-*.json", resealed(lambda r: r["kl32"].__setitem__(0, None)), "no number"),
    ("screening/arms/*/trained.json", resealed(lambda r: r.pop("status")), "no status"),
    ("screening/arms/*/trained.json", resealed(lambda r: r.update(status="fine")), "another status"),
    ("screening/arms/*/trained.json", resealed(lambda r: r.update(parameters="many")), "text for a number"),
    ("screening/windows-*/windows.json", resealed(lambda r: r.update(checksums=7)), "a number for a list"),
    ("pair/partitions.json", resealed(lambda r: r["partitions"]["final"]["items"].pop()), "a prompt short"),
    ("pair/partitions.json", resealed(lambda r: r["partitions"].pop("final")), "a partition short"),
    ("pair/partitions.json", resealed(lambda r: r.update(partitions=[])), "a list for keys"),
    ("confirmation/manifest.json", resealed(lambda r: r.update(weights=None)), "nothing for keys"),
    ("run.json", resealed(lambda r: r.update(overrides={"seed.x": 1})), "a key below a number"),
    ("run.json", resealed(lambda r: r.update(overrides="x")), "text for keys"),
    ("run.json", resealed(lambda r: r.update(format=99)), "another format"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "spoil"), [f[:2] for f in FORGED], ids=[f"{f[0]}: {f[2]}" for f in FORGED])
def test_a_sealed_record_that_is_not_what_the_stage_needs_is_refused(whole, run, kind, spoil):
    name = chosen_file(whole, kind)
    if "scored" not in kind:  # what it was scored from is looked at only where the score is missing
        for path in run.folder.glob(f"{name.split('/')[0]}/arms/*/scored-*.json"):
            path.unlink()
    check(whole, run, name, after_damage(run, name, spoil))


def test_the_ledger_loses_nothing_but_a_torn_last_line(run):
    path = run.stage("frozen_evaluation") / "ledger.jsonl"
    lines = read_lines(path)
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_lines(path) == []
    path.write_bytes(whole + whole[:30])
    assert read_lines(path) == lines
    path.write_bytes(whole + whole)
    with pytest.raises(KvlibError, match="does not match its seals"):
        read_lines(path)


def test_a_record_stays_valid_where_its_run_is_renamed(run):
    renamed = run.folder.rename(run.folder.with_name("renamed"))
    again = open_run("smoke", "renamed", results=renamed.parent)
    assert again.profile == run.profile and again.finished("pair")
    assert read_json(renamed / "run.json")["profile"] == "smoke" and STAGES[:4] == QUALITY


def test_a_seal_holds_place_and_content(tmp_path):
    (tmp_path / "a").mkdir()
    path = write_json(tmp_path / "a" / "r.json", {"n": 1})
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "a")
    assert read_json(tmp_path / "elsewhere" / "a" / "r.json") == {"n": 1}  # a whole folder may move
    assert seal_of(path, {"n": 1}) != seal_of(path.with_name("s.json"), {"n": 1}) != seal_of(path, {"n": 2})
