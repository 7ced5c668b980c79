"""What a plain forger does: files changed as an editor changes them, their seals left as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
from safetensors.torch import save_file
from tampering import LEDGER, SUMMARY, append_byte, nudge, read_safetensors, set_at, swap

from kvlib.study.records import parse_json

FINAL, SCREEN, CONFIRM = "frozen_evaluation", "screening", "confirmation"
ARM = "screening/arms/direct-linear-own-r8-lr0.003-w4-*"
UNSEALED = "does not match its seal"


def edit_plainly(path: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change a JSON file in an editor: its seal, where it has one, stays as it was."""

    def tamper(folder: Path) -> None:
        place = next(folder.glob(path))
        value = parse_json(place)
        change(value)
        place.write_text(json.dumps(value))

    return tamper


def edit_table_plainly(path: str, column: str, value) -> Callable[[Path], None]:
    """Change the first cell of a column with pandas and pyarrow; the metadata, the seal in it, stays as it was."""

    def tamper(folder: Path) -> None:
        place = next(folder.glob(path))
        whole = pyarrow.parquet.read_table(place)
        table = whole.to_pandas()
        table.loc[0, column] = value
        changed = pyarrow.Table.from_pandas(table, schema=whole.schema, preserve_index=False)
        pyarrow.parquet.write_table(changed, place)

    return tamper


def edit_map_plainly(path: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def tamper(folder: Path) -> None:
        place = next(folder.glob(path))
        tensors, described = read_safetensors(place)
        change(tensors)
        save_file(tensors, place, {"kvlib": json.dumps(described, sort_keys=True)})

    return tamper


def reword_line(folder: Path) -> None:
    """The first opening's commit, in an editor."""
    lines = (folder / LEDGER).read_text().splitlines()
    first = json.dumps({**json.loads(lines[0]), "commit": "unknown"})
    (folder / LEDGER).write_text("".join(f"{line}\n" for line in [first, *lines[1:]]))


def drop_first_line(folder: Path) -> None:
    (folder / LEDGER).write_text("".join((folder / LEDGER).read_text().splitlines(keepends=True)[1:]))


# what it is -> (the tampering, the checks that must name it: all that read the file; what one of them must say)
EDITED: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    "a digit of a summary": (
        edit_plainly(f"latency/{SUMMARY}", set_at("rows", 4, "p50_ms", nudge)),
        {"stages", "files", "gates", "manifest", "latency"},
        UNSEALED,
    ),
    "a seal": (
        edit_plainly("latency/made.json", lambda m: m.pop("seal")),
        {"stages"},
        "carries no seal",
    ),
    "the settings": (
        edit_plainly("run.json", lambda r: r["overrides"].update(seed=8)),
        {"settings"},
        UNSEALED,
    ),
    "the decision": (
        edit_plainly(f"{FINAL}/{SUMMARY}", set_at("decision", "verdict", "triumphs")),
        {"stages", "files", "gates", "manifest", "final evaluation", "decision"},
        UNSEALED,
    ),
    "the manifest": (
        edit_plainly(f"{CONFIRM}/manifest.json", set_at("rule", "the luckiest seed")),
        {"files", "confirmation", "frozen maps", "manifest", "ledger", "final evaluation", "latency"},
        UNSEALED,
    ),
    "a cell of a table": (
        edit_table_plainly(f"{SCREEN}/grid.parquet", "kl32", 0.0),
        {"files", "screening"},
        UNSEALED,
    ),
    "a cell of a batch": (
        edit_table_plainly(f"{FINAL}/work-*/steps-0000.parquet", "kl", 0.5),
        {"final evaluation"},
        UNSEALED,
    ),
    "a batch copied": (
        swap(f"{FINAL}/work-*/steps-0000.parquet", f"{FINAL}/work-*/steps-0004.parquet"),
        {"final evaluation"},
        UNSEALED,
    ),
    "an arm's scores": (
        edit_plainly(f"{ARM}/scored-00012-1.0.json", set_at("kl32", 0, 0.0)),
        {"screening"},
        UNSEALED,
    ),
    "a count of windows": (
        edit_plainly(f"{SCREEN}/windows-*/windows.json", lambda w: w["checksums"].pop()),
        {"screening"},
        UNSEALED,
    ),
    "a checkpoint": (
        edit_map_plainly(f"{ARM}/step-00012.safetensors", lambda t: t["key_right"].mul_(1.01)),
        {"screening"},
        "was changed after kvlib wrote it",
    ),
    "a frozen map": (
        edit_map_plainly(f"{CONFIRM}/ridge.safetensors", lambda t: next(iter(t.values())).mul_(1.01)),
        {"files", "manifest", "frozen maps", "final evaluation"},
        "was changed after kvlib wrote it",
    ),
    "a line of the ledger": (reword_line, {"ledger"}, "does not match its seals"),
    "a line of the ledger taken out": (drop_first_line, {"ledger"}, "does not match its seals"),
    "a model's configuration": (
        edit_plainly("pair/source/config.json", set_at("rms_norm_eps", 0.1)),
        {"models"},
        "config.json was changed",
    ),
    "the tokenizer": (
        edit_plainly("pair/target/tokenizer.json", lambda t: t.update(version="2.0")),
        {"partitions", "models", "final evaluation", "latency", "evidence"},
        "tokenizer.json was changed",
    ),
    "the articles": (
        lambda folder: append_byte(next(folder.glob("pair/articles/*.arrow"))),
        {"partitions", "pair", "final evaluation", "evidence"},
        ".arrow was changed",
    ),
    "a figure of the evidence": (
        edit_plainly(f"evidence/{SUMMARY}", set_at("power", "needed_80", 2)),
        {"stages", "files", "evidence"},
        UNSEALED,
    ),
    "a score of the evidence": (
        edit_table_plainly("evidence/lengths.parquet", "kl32", 0.0),
        {"files", "evidence"},
        UNSEALED,
    ),
}
