"""What a careful forger does to the records of evidence, and what the check of evidence must say of it."""

from collections.abc import Callable
from pathlib import Path

from tampering import SUMMARY, both, drop_row, edit, edit_table, nudge, rehash, set_at, swap_tables

from kvlib.study.evidence.stage import summarise_tables
from kvlib.study.records import read_json, read_table, write_table
from kvlib.study.verification.reading import recorded_run


def lower_everywhere(folder: Path) -> None:
    """The KL of the first prompt under the whole correction, in its part, its table, the figures and the hashes."""
    stage = folder / "evidence"
    part = next(stage.glob("work-*/ablation-full.parquet"))
    for path in (part, stage / "ablation.parquet"):  # whose first row is the part's
        table = read_table(path)
        table.loc[0, "kl32"] = -0.25
        write_table(path, table)
    run = recorded_run(folder)
    windows = read_json(stage / SUMMARY)["learning"]["windows"]
    figures = summarise_tables(run, windows)
    edit(f"evidence/{SUMMARY}", lambda s: s.update(figures))(folder)
    rehash("evidence")(folder)


# what it is -> (the tampering, what one of the check's sentences must say)
EVIDENCE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a length's mean": (
        edit(f"evidence/{SUMMARY}", set_at("lengths", 1, "paths", "learned", "kl32", "mean", nudge)),
        "lengths[1].paths.learned.kl32.mean",
    ),
    "a length's interval": (
        edit(f"evidence/{SUMMARY}", set_at("lengths", 0, "paired", "learned-direct", "bca95", 1, nudge)),
        "bca95[1]",
    ),
    "a point of a learning curve": (
        edit(f"evidence/{SUMMARY}", set_at("learning", "windows", 0, "kl32", nudge)),
        "learning.windows[0].kl32",
    ),
    "the articles of a training": (
        edit(f"evidence/{SUMMARY}", set_at("learning", "windows", 0, "articles", 40)),
        "learning.windows[0].articles: found 40",
    ),
    "a layer's share": (
        edit(f"evidence/{SUMMARY}", set_at("ablation", "only", 2, "share", 0.99)),
        "ablation.only[2].share: found 0.99",
    ),
    "the prompts that are needed": (
        edit(f"evidence/{SUMMARY}", set_at("power", "needed_80", 2)),
        "power.needed_80: found 2",
    ),
    "a power": (
        edit(f"evidence/{SUMMARY}", set_at("power", "curve", 3, "power", nudge)),
        "power.curve[3].power",
    ),
    "another arm": (edit(f"evidence/{SUMMARY}", set_at("arm", "another")), 'arm: found "another"'),
    "what it was measured under": (
        edit(f"evidence/{SUMMARY}", set_at("frozen", "6" * 64)),
        "evidence/summary.json, frozen",
    ),
    "a figure that nobody measured": (
        edit(f"evidence/{SUMMARY}", lambda s: s.update(speed=1.0)),
        "speed: found 1.0, expected no such key",
    ),
    "a score at a length, hashed anew": (
        both(edit_table("evidence/lengths.parquet", "kl32", nudge, row=7), rehash("evidence")),
        "lengths.parquet, column kl32",
    ),
    "a prompt's text at a length, hashed anew": (
        both(edit_table("evidence/lengths.parquet", "text", "nice words"), rehash("evidence")),
        "lengths.parquet, column text",
    ),
    "a score of a length's part": (
        edit_table("evidence/work-*/length-00008-0000-*.parquet", "top1", 1.5),
        "lengths.parquet, column top1",
    ),
    "a part of a length taken away": (
        lambda folder: next(folder.glob("evidence/work-*/length-00048-*.parquet")).unlink(),
        "length-00048",
    ),
    "a score of a learning curve, hashed anew": (
        both(edit_table("evidence/learning.parquet", "kl32", 0.1, row=20), rehash("evidence")),
        "learning.parquet, column kl32",
    ),
    "a point's own scores": (
        edit_table("evidence/work-*/learning-00003-windows-step-00012.parquet", "kl32", 0.1),
        "learning.parquet, column kl32",
    ),
    "a row of the ablation less, hashed anew": (
        both(drop_row("evidence/ablation.parquet"), rehash("evidence")),
        "evidence/ablation.parquet: found",
    ),
    "one variant's scores as another's": (
        swap_tables("evidence/work-*/ablation-keys_only.parquet", "evidence/work-*/ablation-full.parquet"),
        "ablation.parquet, column kl32",
    ),
    "a divergence below zero, in every record alike": (
        lower_everywhere,
        "ablation.parquet: found a score that cannot be",
    ),
    "a singular value, hashed anew": (
        both(
            edit_table("evidence/singular_values.parquet", "value", lambda v: v * 1.001), rehash("evidence")
        ),
        "other values than those of the frozen map",
    ),
    "a correction's size, hashed anew": (
        both(edit_table("evidence/size.parquet", "correction_rms", 9.0), rehash("evidence")),
        "size.parquet, column ratio",
    ),
    "a layer's R², hashed anew": (
        both(edit_table("evidence/ridge.parquet", "r2", 0.99, row=4), rehash("evidence")),
        "ridge.parquet, column r2",
    ),
}
