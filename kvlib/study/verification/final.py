"""Checks of the final evaluation: tables from their batches, every figure from the tables, the decision from the figures."""

import pandas as pd
import torch

from kvlib.maps import CacheMap, DirectMap, load_map
from kvlib.study.decision import decide
from kvlib.study.evaluation import batch_file, measured, modes, work_folder
from kvlib.study.final_tables import PATHS, checked_steps, main_forcing, prompt_table, summarise_final
from kvlib.study.gate import GATE_PROMPTS
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import LOWEST_KL, Records

STAGE = "frozen_evaluation"
MEASURED = ("gates", "agreement", "commit")  # of the summary: the first two have checks of their own


def check_final(records: Records, check: Check) -> None:
    """`frozen_evaluation/`: steps, controls and prompts, and everything in the summary but the decision."""
    run, manifest = records.run, records.json("confirmation", "manifest.json")
    settings, count = run.profile.evaluation, run.profile.partitions.final.items
    work = work_folder(run, manifest["hash"])
    pair_dtype = getattr(torch, run.profile.pair.dtype)
    for name, paths in measured(manifest["weights"], pair_dtype, records.training_dtype).items():
        with check.reading(f"{STAGE}/{name}.parquet"):
            batches = [
                checked_steps(
                    work / batch_file(name, start),
                    settings.forcings,
                    paths,
                    range(start, min(start + settings.batch_prompts, count)),
                    run.profile.prompt.forced_steps,
                )
                for start in range(0, count, settings.batch_prompts)
            ]
            table = records.table(STAGE, f"{name}.parquet")
            check.table(f"{STAGE}/{name}.parquet", table, pd.concat(batches, ignore_index=True))
            _possible(f"{STAGE}/{name}.parquet", table, check)
    steps = records.table(STAGE, "steps.parquet")
    with check.reading(f"{STAGE}/prompts.parquet"):
        partitions, tokenizer = records.partitions, records.tokenizer
        prefixes = partitions.tokens("final", tokenizer)[:, : run.profile.prompt.prefix_tokens]
        again = prompt_table(steps, partitions.items("final"), prefixes, tokenizer)
        check.table(f"{STAGE}/prompts.parquet", records.table(STAGE, "prompts.parquet"), again)
    maps = {
        name: load_map(run.stage("confirmation") / f"{name}.safetensors", pair=records.pair)
        for name in manifest["weights"]
    }
    tables = [records.table(STAGE, f"{name}.parquet") for name in ("steps", "prompts", "controls")]
    expected = summarise_final(*tables, settings.forcings, run.profile.seed) | {
        "articles": len(set(records.articles("final"))),
        "frozen": manifest["hash"],
        "modes": modes(maps | {"direct": DirectMap()}),
        "decision": records.summary(STAGE)["decision"],  # by the check of its own
    }
    records.same_summary(check, STAGE, expected, MEASURED)
    with check.reading(f"{STAGE}/summary.json, agreement"):
        _agreement(records, maps, check)


def _agreement(records: Records, maps: dict[str, CacheMap], check: Check) -> None:
    """The frozen maps' ways of being applied: every one that a map allows, over all it should compare, and passed."""
    profile, vocabulary = records.run.profile, records.summary("pair")["target"]["vocabulary"]
    found, where = records.summary(STAGE)["agreement"], f"{STAGE}/summary.json, agreement"
    settings, names = profile.evaluation, [name for name in PATHS if name in maps]
    check.same(f"{where}, maps", [entry["map"] for entry in found], names)
    prompts = min(GATE_PROMPTS, settings.batch_prompts, profile.partitions.final.items)
    for entry in found:
        place, cache_map = f"{where}, {entry['map']}", maps[entry["map"]]
        modes = ["in_place", *([] if cache_map.why_not_affine else ["absorbed"])]
        compared = len(modes) * prompts * profile.prompt.forced_steps * vocabulary
        check.same(f"{place}, modes", sorted(entry["max_abs_difference"]), sorted(modes))
        check.same(f"{place}, prompts", entry["prompts"], prompts)
        check.same(f"{place}, comparisons", entry["comparisons"], compared)
        check.same(f"{place}, tolerance", entry["tolerance"], settings.gate_tolerance)
        check.same(f"{place}, passed", entry["passed"], True)
        largest = max(entry["max_abs_difference"].values())
        check.holds(
            0 <= largest <= min(settings.gate_tolerance, entry["moved"]),
            f"{place}: found {largest!r} between two ways, expected at most the tolerance, and less than the map moves",
        )


def check_decision(records: Records, check: Check) -> None:
    """The rule, applied again to the summary's figures, says what the summary says."""
    summary, main = records.summary(STAGE), main_forcing(records.run.profile.evaluation.forcings)
    expected = {"forcing": main, **decide(summary["forcing"][main])}
    check.same(f"{STAGE}/summary.json, decision", summary["decision"], expected)


def _possible(where: str, table: pd.DataFrame, check: Check) -> None:
    """What holds of any divergence and of any probability, whatever the models."""
    low = table["kl"].min()
    check.holds(bool(low >= LOWEST_KL), f"{where}, kl: found {low}, expected no less than {LOWEST_KL}")
    finite = table["kl"].abs() < float("inf")
    check.holds(bool(finite.all()), f"{where}, kl: found a value that is not finite")
    if "native_token" in table:
        same = table["native_token"] == table["path_token"]
        check.holds(bool(same[table["agree"]].all()), f"{where}, agree: found true for two different tokens")
        for column in ("native_probability", "path_probability"):
            inside = table[column].between(0, 1 - LOWEST_KL)
            check.holds(bool(inside.all()), f"{where}, {column}: found a value that is no probability")
        forced = table.groupby(["forcing", "prompt", "step"])["forced_token"].nunique()
        check.holds(
            bool((forced == 1).all()), f"{where}, forced_token: found paths forced along different tokens"
        )
        own = table[table["path"] == "native"]
        itself = (own["native_probability"] == own["path_probability"]) & own["agree"]
        check.holds(bool(itself.all()), f"{where}, native: found it different from itself")
