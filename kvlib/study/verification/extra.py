"""Checks of stages outside the sequence: the evidence, its tables from their parts and every figure from the tables."""

from collections.abc import Iterator

import pandas as pd

from kvlib.maps import ResidualMap, load_map
from kvlib.study.evidence import ablation, content, learning, lengths, quality
from kvlib.study.evidence.keeping import read_scores
from kvlib.study.evidence.stage import STAGE, facts, summarise_tables, work_folder
from kvlib.study.records import read_table
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import LOWEST_KL, Records

SAME_SINGULAR_VALUE = 1e-9  # of the largest: a decomposition's last digits are the processor's own


def check_evidence(records: Records, check: Check) -> None:
    """`evidence/summary.json` and its tables; they are of the map that is frozen now."""
    run, confirmation = records.run, records.summary("confirmation")
    path = run.stage("confirmation") / "learned.safetensors"
    with check.reading(f"{STAGE}, of {records.name(path)}"):
        learned = load_map(path, pair=records.pair)
        _same_content(records, learned, check)
        for name, parts in (
            ("lengths", _length_parts(records)),
            ("learning", _learning_parts(records)),
            ("ablation", _ablation_parts(records, learned)),
        ):
            where = f"{STAGE}/{name}.parquet"
            with check.reading(where):
                table = records.table(STAGE, f"{name}.parquet")
                check.table(where, table, pd.concat(parts, ignore_index=True))
                possible = table["kl32"].between(LOWEST_KL, float("inf"), "left") & table["top1"].between(
                    0, 1
                )
                check.holds(bool(possible.all()), f"{where}: found a score that cannot be")
    windows = learning.window_facts(run, records.articles("confirm_train"))
    figures = summarise_tables(run, windows)
    expected = facts(run, confirmation["frozen"], confirmation["manifest_hash"]) | figures
    records.same_summary(check, STAGE, expected)


def _work(records: Records):
    return work_folder(records.run, records.summary("confirmation")["manifest_hash"])


def _length_parts(records: Records) -> Iterator[pd.DataFrame]:
    articles, work = records.partitions.parts["final"].articles, _work(records)
    for part in lengths.length_parts(records.run, articles, records.tokenizer):
        scores = read_scores(work / part.file, part.prompts, lengths.PATHS)
        yield part.described(scores, records.tokenizer)


def _learning_parts(records: Records) -> Iterator[pd.DataFrame]:
    run, work = records.run, _work(records)
    prompts, last = range(run.profile.partitions.confirm_validate.items), run.profile.training.steps
    counts = learning.window_counts(run)
    points = [
        *(("windows", count, learning.point_name(count, last)) for count in counts[:-1]),
        *(("steps", step, learning.point_name(counts[-1], step)) for step in learning.step_counts(run)),
        ("windows", counts[-1], learning.point_name(counts[-1], last)),
    ]
    # A training that diverged has no scores from there on, and the summary says so.
    points = [point for point in points if (work / f"{point[2]}.parquet").exists()]
    for axis, value, name in [("direct", 0, "learning-direct"), ("ridge", 0, "learning-ridge"), *points]:
        scores = read_scores(work / f"{name}.parquet", prompts)
        yield scores.assign(axis=axis, value=value)[learning.COLUMNS]


def _ablation_parts(records: Records, learned: ResidualMap) -> Iterator[pd.DataFrame]:
    prompts, work = range(records.run.profile.partitions.confirm_validate.items), _work(records)
    for which, layer in ablation.variants(learned):
        scores = read_scores(work / ablation.variant_file(which, layer), prompts)
        yield scores.assign(which=which, layer=layer)[ablation.COLUMNS]


def _same_content(records: Records, learned: ResidualMap, check: Check) -> None:
    """What the correction is made of, from the frozen map itself, and what its size and its nearness can be."""
    where = f"{STAGE}/singular_values.parquet"
    with check.reading(where):
        found, again = records.table(STAGE, "singular_values.parquet"), content.singular_values(learned)
        check.table(where, found.drop(columns="value"), again.drop(columns="value"))
        apart = (found["value"] - again["value"]).abs()
        check.checked += len(apart)
        close = bool((apart <= SAME_SINGULAR_VALUE * again["value"].max()).all())
        check.holds(close, f"{where}, value: found other values than those of the frozen map")
    where = f"{STAGE}/size.parquet"
    with check.reading(where):
        size = records.table(STAGE, "size.parquet")
        rows = [[layer, kind] for kind in content.KINDS for layer in range(learned.geometry.layers)]
        check.same(f"{where}, layer and kind", size[["layer", "kind"]].to_numpy().tolist(), rows)
        ratio = size["correction_rms"] / size["cache_rms"].where(size["cache_rms"] > 0)
        check.table(where, size[["ratio"]], ratio.to_frame("ratio"))
    where = f"{STAGE}/ridge.parquet"
    with check.reading(where):
        table = records.table(STAGE, "ridge.parquet")
        check.table(where, table, read_table(_work(records) / "quality.parquet"))
        check.same(f"{where}, columns", list(table.columns), quality.COLUMNS)
        possible = (
            table["r2"].dropna().le(1).all() and table["cosine"].dropna().between(-1 - 1e-6, 1 + 1e-6).all()
        )
        check.holds(bool(possible), f"{where}: found a share or a cosine that cannot be")
