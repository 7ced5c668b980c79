"""`kvlib verify`: a run as it was made verifies clean, and whatever one changes in it is found by the check it belongs to."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tampered_evidence import EVIDENCE
from tampered_files import EDITED, edit_plainly
from tampering import (
    SUMMARY,
    append_byte,
    backdate,
    better_everywhere,
    both,
    drop_lines,
    drop_row,
    edit,
    edit_lines,
    edit_map,
    edit_table,
    flip,
    freeze_maps_again,
    move_item,
    nudge,
    nudge_weights,
    refreeze,
    rehash,
    reword_article,
    set_at,
    swap,
    swap_tables,
    swap_values,
    tell_again,
)  # fmt: skip

from kvlib import KvlibError
from kvlib.cli import app
from kvlib.study import execution
from kvlib.study.evidence import run_evidence
from kvlib.study.records import read_table, write_json, write_table
from kvlib.study.run import EXTRA, HOME_VARIABLE, NOTEBOOKS, STAGES
from kvlib.study.stages import (
    open_run,
    run_confirmation,
    run_frozen_evaluation,
    run_latency,
    run_pair,
    run_screening,
)
from kvlib.study.verification import summary, verify
from kvlib.study.verification.reading import recorded_run
from kvlib.study.verification.verify import EXTRA_CHECKS
from kvlib.terminal import FAILURE, MISTAKE, run_app


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a smoke run, every stage of it, the evidence too, with a notebook for each as papermill leaves them."""
    home, threads = tmp_path_factory.mktemp("verified"), torch.get_num_threads()
    torch.set_num_threads(1)
    run = open_run("smoke", results=home / "results", **{"latency.memory": False})
    for stage in (
        run_pair,
        run_screening,
        run_confirmation,
        run_frozen_evaluation,
        run_latency,
        run_evidence,
    ):
        stage(run)
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(home))
        for name in (
            *(NOTEBOOKS[stage] for stage in (*STAGES, *EXTRA)),
            "10_study_and_run",
        ):  # one of no stage
            notebook = {
                "cells": [{"cell_type": "code", "outputs": [{"output_type": "stream", "text": "fine"}]}],
                "metadata": {"kvlib": {"inputs": "-", "records": execution.records_key(name, "smoke")}},
            }
            path = run.folder / "notebooks" / f"{name}.ipynb"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(notebook))
    return run.folder


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "results" / "smoke"))


def found(folder: Path) -> dict[str, list[str]]:
    return {check.name: check.mismatches for check in verify(folder) if check.mismatches}


def test_a_run_as_it_was_made_verifies_clean(made):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    checks = verify(made)
    assert {check.name: check.mismatches for check in checks} == {check.name: [] for check in checks}
    assert all(check.checked > 0 for check in checks) and len(checks) >= 15
    assert before == {path: path.stat().st_mtime_ns for path in made.rglob("*")}  # only read


def test_an_opened_run_is_taken_as_well_as_its_folder(made):
    assert summary(verify(recorded_run(made))) == summary(verify(made))


ARM = "screening/arms/direct-linear-own-r8-lr0.003-w4-*"
# What ran under the frozen manifest is of no use to another one.
UNDER = {"ledger", "final evaluation", "latency", "evidence"}
FINAL, SCREEN, CONFIRM = "frozen_evaluation", "screening", "confirmation"
ORACLE = ("forcing", "oracle")

# what it is -> (the tampering, the checks that must name it, what one of their sentences must say)
TAMPERINGS: dict[str, tuple[Callable[[Path], object], set[str], str]] = {
    # settings and stages
    "a parameter that the run was not made with": (
        edit("run.json", lambda r: r["overrides"].update({"latency.repetitions": [20, 5, 5]})),
        {"stages", "latency"},
        "latency/summary.json, key",
    ),
    "a run.json of another type": (
        lambda folder: (folder / "run.json").write_text("[1, 2]"),
        {"settings"},
        "holds a list",
    ),
    "an unknown parameter": (
        edit("run.json", lambda r: r["overrides"].update({"latency.nonsense": 3})),
        {"settings"},
        "unknown key",
    ),
    "another key": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("key", "0" * 64)),
        {"stages"},
        f"{SCREEN}/{SUMMARY}, key",
    ),
    "another label": (edit(f"latency/{SUMMARY}", set_at("label", "the real thing")), {"stages"}, "label"),
    "no made.json": (
        lambda folder: (folder / "latency" / "made.json").unlink(),
        {"stages"},
        "latency/made.json is missing",
    ),
    "a negative duration": (edit("latency/made.json", set_at("duration_s", -3)), {"stages"}, "duration_s"),
    "an earlier stage taken away": (
        lambda folder: (folder / "screening" / SUMMARY).unlink(),
        {"stages", "confirmation", "frozen maps", "final evaluation"},
        "expected screening/summary.json before it",
    ),
    # files
    "a byte more": (
        lambda folder: append_byte(folder / CONFIRM / "learned.safetensors"),
        {"files", "manifest", "confirmation", "frozen maps", "final evaluation", "latency", "evidence"},
        "learned.safetensors",
    ),
    "a hash": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("files", "grid.parquet", "f" * 64)),
        {"files"},
        "screening/grid.parquet",
    ),
    "a file left out of the hashes": (
        edit(f"{SCREEN}/{SUMMARY}", lambda s: s["files"].pop("grid.parquet")),
        {"files"},
        "screening/summary.json, files",
    ),
    "a table taken away": (
        lambda folder: (folder / FINAL / "controls.parquet").unlink(),
        {"files", "final evaluation"},
        "frozen_evaluation/controls.parquet",
    ),
    # gates
    "a gate that did not pass": (
        edit(f"pair/{SUMMARY}", set_at("gates", 0, "passed", False)),
        {"gates", "pair"},
        "gates[0].passed: found false, expected true",
    ),
    "a gate over its tolerance": (
        edit(f"{FINAL}/{SUMMARY}", set_at("gates", 0, "max_abs_difference", "absorbed", 0.02)),
        {"gates"},
        "absorbed: found 0.02",
    ),
    "a wider tolerance": (
        edit(f"latency/{SUMMARY}", set_at("gates", 1, "tolerance", 0.5)),
        {"gates"},
        "gates[1].tolerance: found 0.5, expected 0.005",
    ),
    "two ways that differ": (
        edit(f"{FINAL}/{SUMMARY}", set_at("agreement", 0, "max_abs_difference", "in_place", 0.02)),
        {"final evaluation"},
        "expected at most the tolerance",
    ),
    "a way that was left out": (
        edit(f"{FINAL}/{SUMMARY}", lambda s: s["agreement"][1]["max_abs_difference"].pop("in_place")),
        {"final evaluation"},
        "modes",
    ),
    "a gate left out": (
        edit(f"{SCREEN}/{SUMMARY}", lambda s: s["gates"].pop()),
        {"gates"},
        "screening/summary.json, gates, prefix_tokens",
    ),
    "fewer logits compared": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("gates", 0, "comparisons", lambda n: n - 1)),
        {"gates"},
        "comparisons",
    ),
    # partitions
    "an item changed": (
        edit("pair/partitions.json", set_at("partitions", "final", "items", 0, "start_character", 1)),
        {"files", "partitions", "final evaluation", "evidence"},
        "partition final",
    ),
    "an item moved, every hash made anew": (
        move_item,
        {"partitions", *UNDER},
        "partitions.final.items[0].start_character",
    ),
    "an article reworded": (
        reword_article,
        {"partitions", "pair", "final evaluation", "evidence"},
        "has hash",
    ),
    "an article in two partitions": (
        edit(
            "pair/partitions.json",
            lambda p: p["partitions"]["final"]["articles"].append(p["partitions"]["build"]["articles"][0]),
        ),
        {"files", "partitions", "final evaluation", "evidence"},
        "expected it in one of them",
    ),
    # the pair
    "other weights, their hash in the manifest": (
        nudge_weights,
        {"models", *UNDER},
        "source.fingerprint",
    ),
    "more parameters": (
        edit(f"pair/{SUMMARY}", set_at("target", "parameters", 7)),
        {"models"},
        "target.parameters: found 7",
    ),
    "a better pruning": (
        edit(f"pair/{SUMMARY}", set_at("pruning", "energy_kept", nudge)),
        {"pair"},
        "pruning.energy_kept",
    ),
    "more text": (edit(f"pair/{SUMMARY}", set_at("corpus", "characters", 9)), {"pair"}, "corpus.characters"),
    # screening
    "a digit of an arm": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("arms", 3, "kl32", nudge)),
        {"screening"},
        "arms[3].kl32",
    ),
    "the order of two arms": (
        edit(f"{SCREEN}/{SUMMARY}", swap_values("arms", 0, 1, "order")),
        {"screening"},
        "arms[0].order",
    ),
    "a p-value": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("arms", 5, "against_direct", "wilcoxon_p_holm", 0.001)),
        {"screening"},
        "wilcoxon_p_holm: found 0.001",
    ),
    "the selection": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("selected", 0, "ridge-linear-own-r16-lr0.003-w4")),
        {"screening"},
        "selected[0]",
    ),
    "a finalist": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("finalists", 0, "direct-linear-own-r8-lr0.003-w4")),
        {"screening", "confirmation"},
        "finalists[0]",
    ),
    "why a finalist has its place": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("places", 1, "lowest", "direct-linear-own-r8-lr0.003-w4")),
        {"screening"},
        "places[1].lowest",
    ),
    "a chosen scale": (
        edit(f"{SCREEN}/{SUMMARY}", set_at("chosen", 2, "scale", 0.25)),
        {"screening"},
        "chosen[2].scale",
    ),
    "a cell of the validation": (
        edit_table(f"{SCREEN}/validation.parquet", "kl32", nudge, row=30),
        {"files", "screening"},
        "column kl32",
    ),
    "a cell of the validation, hashed anew": (
        both(edit_table(f"{SCREEN}/validation.parquet", "kl32", 0.1, row=30), rehash(SCREEN)),
        {"screening"},
        "screening/validation.parquet",
    ),
    "an article of the validation, hashed anew": (
        both(edit_table(f"{SCREEN}/validation.parquet", "article", "another"), rehash(SCREEN)),
        {"screening"},
        "direct, article",
    ),
    "a cell of the grid, hashed anew": (
        both(edit_table(f"{SCREEN}/grid.parquet", "top1", 1.0, row=3), rehash(SCREEN)),
        {"screening"},
        "grid",
    ),
    "a step of a curve, hashed anew": (
        both(edit_table(f"{SCREEN}/curves.parquet", "loss", 0.0, row=7), rehash(SCREEN)),
        {"screening"},
        "screening/curves.parquet, column loss",
    ),
    "a row less, hashed anew": (
        both(drop_row(f"{SCREEN}/grid.parquet"), rehash(SCREEN)),
        {"screening"},
        "grid.parquet",
    ),
    "a phase of an arm's curve": (
        edit_table(f"{ARM}/curve.parquet", "phase", "kl"),
        {"screening"},
        'phase[0]: found "kl", expected "warmup"',
    ),
    "an arm's own scores": (
        edit(f"{ARM}/scored-00012-1.0.json", set_at("kl32", 0, 0.0)),
        {"screening"},
        "validation.parquet",
    ),
    "an arm's status": (
        edit(f"{ARM}/trained.json", set_at("status", "not_finite")),
        {"screening"},
        "trained.json",
    ),
    "an arm's parameters": (
        edit(f"{ARM}/trained.json", set_at("parameters", 5)),
        {"screening"},
        "expected 5",
    ),
    "an arm's time": (
        edit(f"{SCREEN}/made.json", set_at("seconds", "ridge-linear-own-r4-lr0.003-w4", 99.0)),
        {"screening"},
        "seconds.ridge-linear-own-r4",
    ),
    "an arm's checkpoint of another": (
        swap(f"{ARM}/step-00012.safetensors", f"{ARM}/step-00008.safetensors"),
        {"screening"},
        "provenance",
    ),
    "an arm's folder taken away": (
        lambda folder: shutil.rmtree(next(folder.glob(ARM))),
        {"screening"},
        "direct-linear-own-r8-lr0.003-w4",
    ),
    "a window that was not cached": (
        edit(f"{SCREEN}/windows-*/windows.json", lambda w: w["checksums"].pop()),
        {"screening"},
        "checksums: found 11, expected 12",
    ),
    "windows of other text": (
        edit(f"{CONFIRM}/windows-*/windows.json", set_at("windows", "5" * 64)),
        {"confirmation"},
        "windows.json, windows",
    ),
    "the caches of the windows taken away": (
        lambda folder: next(folder.glob(f"{CONFIRM}/windows-*/target.bin")).unlink(),
        {"confirmation"},
        "target.bin: found no file",
    ),
    # confirmation
    "a seed's KL": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("arms", 0, "runs", 1, "kl32", nudge)),
        {"confirmation"},
        "arms[0].runs[1].kl32",
    ),
    "a mean over seeds": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("arms", 1, "mean_kl32", nudge)),
        {"confirmation"},
        "arms[1].mean_kl32",
    ),
    "the median seed": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("arms", 0, "median_seed", 99)),
        {"confirmation"},
        "median_seed: found 99",
    ),
    "the frozen seed": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("frozen", "seed", 99)),
        {"confirmation", "frozen maps", "manifest"},
        "frozen.seed: found 99",
    ),
    "the checkpoint's size": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("frozen", "checkpoint_bytes", 12)),
        {"confirmation", "manifest"},
        "frozen.checkpoint_bytes: found 12",
    ),
    "a cell of the confirmation, hashed anew": (
        both(edit_table(f"{CONFIRM}/validation.parquet", "kl32", 0.1, row=20), rehash(CONFIRM)),
        {"confirmation"},
        "confirmation/validation.parquet",
    ),
    "a map in another's place, hashed anew": (
        both(
            swap(f"{CONFIRM}/learned.safetensors", f"{CONFIRM}/wrong_trained.safetensors"), freeze_maps_again
        ),
        {"frozen maps", *UNDER},
        "learned.safetensors, provenance",
    ),
    "a map's weight, hashed anew": (
        both(
            edit_map(f"{CONFIRM}/learned.safetensors", lambda t, _: t["key_right"].mul_(1.01)),
            freeze_maps_again,
        ),
        {"frozen maps", *UNDER},
        "key_right: found other numbers",
    ),
    "a map's scale, hashed anew": (
        both(
            edit_map(f"{CONFIRM}/learned.safetensors", lambda _, d: d["settings"].update(scale=0.9)),
            freeze_maps_again,
        ),
        {"frozen maps", *UNDER},
        "settings.scale",
    ),
    "a map of another pair": (
        edit_map(f"{CONFIRM}/ridge.safetensors", lambda _, d: d.update(pair="0" * 64)),
        {"files", "frozen maps", "manifest", "final evaluation"},
        "was made for the pair",
    ),
    # manifest
    "the manifest": (
        edit(f"{CONFIRM}/manifest.json", set_at("rule", "the luckiest seed")),
        {"files", "manifest"},
        "manifest.json, hash",
    ),
    "the manifest's rule, hashed anew everywhere": (
        both(edit(f"{CONFIRM}/manifest.json", set_at("rule", "the luckiest seed")), refreeze),
        {"manifest", *UNDER},
        "the decision rule",
    ),
    "the manifest's code, hashed anew everywhere": (
        both(edit(f"{CONFIRM}/manifest.json", set_at("kvlib", "1" * 64)), refreeze),
        {"manifest", *UNDER},
        "kvlib's code",
    ),
    "the manifest's hash in the summary": (
        edit(f"{CONFIRM}/{SUMMARY}", set_at("manifest_hash", "2" * 64)),
        {"manifest", "confirmation", "evidence"},
        "manifest_hash",
    ),
    "what the latency ran under": (
        edit(f"latency/{SUMMARY}", set_at("frozen", "3" * 64)),
        {"manifest", "latency"},
        "latency/summary.json, frozen",
    ),
    # ledger
    "the lines of the ledger": (drop_lines, {"ledger"}, "found no line"),
    "the line of the evaluation": (
        edit_lines(lambda lines: lines.pop(0)),
        {"ledger"},
        "found no line of the opening",
    ),
    "the line of the evidence": (
        edit_lines(lambda lines: lines.pop(1)),
        {"ledger"},
        "found no line of the opening",
    ),
    "an opening under another manifest": (
        edit_lines(set_at(0, "manifest", "0" * 64)),
        {"ledger"},
        f'manifest: found "{"0" * 64}"',
    ),
    "an opening by other code": (edit_lines(set_at(0, "kvlib", "0" * 64)), {"ledger"}, "kvlib: found"),
    "an opening told twice": (tell_again, {"ledger"}, "openings told twice: found 1"),
    "an opening in the past": (backdate, {"ledger"}, "do not follow one another"),
    "another opening's work": (
        edit(f"{FINAL}/work-*/opening.json", set_at("opening", "e" * 32)),
        {"ledger"},
        "found no line of the opening",
    ),
    "the count of openings": (edit(f"{FINAL}/made.json", set_at("opened", 5)), {"ledger"}, "opened: found 5"),
    # final evaluation
    "a final mean": (
        edit(f"{FINAL}/{SUMMARY}", set_at(*ORACLE, "paths", "learned", "kl32", "mean", nudge)),
        {"final evaluation", "decision"},
        "forcing.oracle.paths.learned.kl32.mean",
    ),
    "a bootstrap interval": (
        edit(f"{FINAL}/{SUMMARY}", set_at("forcing", "text", "paired", "learned-direct", "bca95", 0, nudge)),
        {"final evaluation"},
        "bca95[0]",
    ),
    "a win": (
        edit(
            f"{FINAL}/{SUMMARY}", set_at("forcing", "text", "paired", "ridge-direct", "wins", lambda n: n + 1)
        ),
        {"final evaluation"},
        "ridge-direct.wins",
    ),
    "a control": (
        edit(f"{FINAL}/{SUMMARY}", set_at("controls", "zeros", "kl32", "mean", 9.0)),
        {"final evaluation"},
        "controls.zeros.kl32.mean: found 9.0",
    ),
    "the verdict": (
        edit(f"{FINAL}/{SUMMARY}", set_at("decision", "verdict", "triumphs")),
        {"decision"},
        'decision.verdict: found "triumphs"',
    ),
    "a criterion": (
        edit(f"{FINAL}/{SUMMARY}", set_at("decision", "criteria", "bootstrap interval", flip)),
        {"decision"},
        "criteria.bootstrap interval",
    ),
    "a figure that nobody measured": (
        edit(f"{FINAL}/{SUMMARY}", lambda s: s.update(accuracy=1.0)),
        {"final evaluation"},
        "accuracy: found 1.0, expected no such key",
    ),
    "how the map was applied": (
        edit(f"{FINAL}/{SUMMARY}", set_at("modes", "ridge", "in_place")),
        {"final evaluation"},
        "modes.ridge",
    ),
    "a step, hashed anew": (
        both(edit_table(f"{FINAL}/steps.parquet", "kl", nudge, row=200), rehash(FINAL)),
        {"final evaluation"},
        "steps.parquet, column kl",
    ),
    "a token, hashed anew": (
        both(edit_table(f"{FINAL}/steps.parquet", "path_token", "?", row=200), rehash(FINAL)),
        {"final evaluation"},
        "steps.parquet, column path_token",
    ),
    "a prompt's mean, hashed anew": (
        both(edit_table(f"{FINAL}/prompts.parquet", "kl32", nudge, row=30), rehash(FINAL)),
        {"final evaluation"},
        "prompts.parquet, column kl32",
    ),
    "a prompt's text, hashed anew": (
        both(edit_table(f"{FINAL}/prompts.parquet", "text", "nice words"), rehash(FINAL)),
        {"final evaluation"},
        "prompts.parquet, column text",
    ),
    "a step of a control, hashed anew": (
        both(edit_table(f"{FINAL}/controls.parquet", "agree", flip, row=9), rehash(FINAL)),
        {"final evaluation"},
        "controls.parquet, column agree",
    ),
    "a step of a batch": (
        edit_table(f"{FINAL}/work-*/steps-0000.parquet", "kl", 0.0, row=40),
        {"final evaluation"},
        "steps.parquet, column kl",
    ),
    "a batch in another's place": (
        swap_tables(f"{FINAL}/work-*/steps-0000.parquet", f"{FINAL}/work-*/steps-0004.parquet"),
        {"final evaluation"},
        "does not hold every step of prompts 0 to 3",
    ),
    "divergences below zero, in every record alike": (
        better_everywhere,
        {"final evaluation", "evidence"},
        "expected no less than",
    ),
    # latency
    "a median time": (
        edit(f"latency/{SUMMARY}", set_at("rows", 4, "p50_ms", nudge)),
        {"latency"},
        "rows[4].p50_ms",
    ),
    "a crossover": (
        edit(f"latency/{SUMMARY}", set_at("crossover", "resident", "below", flip)),
        {"latency"},
        "crossover.resident.below",
    ),
    "a time, hashed anew": (
        both(edit_table("latency/raw.parquet", "ms", nudge, row=12), rehash("latency")),
        {"latency"},
        "raw.parquet, column ms",
    ),
    "a repetition less, hashed anew": (
        both(drop_row("latency/raw.parquet"), rehash("latency")),
        {"latency"},
        "latency/raw.parquet",
    ),
    "a peak of memory": (
        edit(f"latency/{SUMMARY}", set_at("rows", 0, "peak_extra_bytes", 1)),
        {"latency"},
        "peak_extra_bytes: found 1, expected null",
    ),
    "the time of another way": (
        edit(f"latency/{SUMMARY}", set_at("modes", 1, "p50_ms", nudge)),
        {"latency"},
        "modes[1].p50_ms",
    ),
    "a way said to be left out": (
        edit(
            f"latency/{SUMMARY}", set_at("left_out", [{"path": "learned", "mode": "absorbed", "reason": "-"}])
        ),
        {"latency"},
        "left_out",
    ),
    "a floor": (
        edit(f"latency/{SUMMARY}", set_at("floor", 2, "weight_bytes", 1)),
        {"latency"},
        "floor[2].weight_bytes",
    ),
    "another bandwidth under the same floor": (
        edit(f"latency/{SUMMARY}", set_at("memory_bandwidth_gb_s", nudge)),
        {"latency"},
        "floor[0].floor_ms",
    ),
    "a part of a step": (
        edit(f"latency/{SUMMARY}", set_at("breakdown", 3, "ms", nudge)),
        {"latency"},
        "breakdown[3].ms",
    ),
    "a part of a step, hashed anew": (
        both(edit_table("latency/breakdown.parquet", "ms", nudge, row=5), rehash("latency")),
        {"latency"},
        "breakdown.parquet, column ms",
    ),
    "a pipeline that was not measured": (
        edit(
            f"latency/{SUMMARY}",
            set_at("pipeline", [{"prefix_tokens": 32, "path": "direct", "pipelined_p50_ms": 1.0}]),
        ),
        {"latency"},
        "latency/summary.json, pipeline",
    ),
    # notebooks
    "a notebook with an error": (
        edit_plainly(
            "notebooks/02_confirmation.ipynb",
            set_at("cells", 0, "outputs", [{"output_type": "error", "ename": "ValueError"}]),
        ),
        {"notebooks"},
        "02_confirmation.ipynb, errors",
    ),
    "a notebook of other records": (
        edit_plainly(
            "notebooks/03_frozen_evaluation.ipynb",
            set_at("metadata", "kvlib", "records", "run.json", "4" * 64),
        ),
        {"notebooks"},
        "the run.json that it was made from",
    ),
    "a notebook that does not say what it read": (
        edit_plainly("notebooks/04_latency.ipynb", set_at("metadata", {})),
        {"notebooks"},
        "KeyError: 'kvlib'",
    ),
}


# A change of evidence concerns evidence alone.
TAMPERINGS |= {
    f"{name}, in evidence": (tamper, {"evidence"}, said) for name, (tamper, said) in EVIDENCE.items()
}
TAMPERINGS |= {f"{name}, in an editor": tampering for name, tampering in EDITED.items()}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_what_was_changed_is_named_by_the_checks_it_belongs_to(copy, name):
    tamper, checks, said = TAMPERINGS[name]
    tamper(copy)
    named = found(copy)
    # A notebook stands for the summaries that it was made from, and so for every change of one.
    assert {*named} - {"notebooks"} == checks - {"notebooks"}
    sentences = [sentence for check in checks for sentence in named[check]]
    assert any(said in sentence for sentence in sentences), sentences


def spoilt(path: Path, number: int) -> Callable[[], object]:
    """What happens to a file on a bad disk, or in a careless editor."""
    if path.suffix == ".parquet" and number % 2:
        return lambda: write_table(path, read_table(path).iloc[:, 1:])
    if path.suffix in (".json", ".ipynb") and number % 3:
        return lambda: path.write_text(json.dumps([[], {"a": {"b": 1}}][number % 3 - 1]))
    return lambda: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_damaged_record_is_a_mismatch_and_never_a_trace(copy):
    kinds = ("*.json", "*.jsonl", "*.parquet", "*.safetensors", "*/*.ipynb")
    files = [path for kind in kinds for path in sorted(copy.glob(f"{kind}")) + sorted(copy.glob(f"*/{kind}"))]
    files += [
        next(copy.glob(f"screening/arms/*/{kind}"))
        for kind in ("trained.json", "curve.parquet", "*.safetensors")
    ]
    files += [
        copy / "pair" / name
        for name in ("source/config.json", "source/model.safetensors", "target/tokenizer.json")
    ]
    files += [
        next(copy.glob("frozen_evaluation/work-*/controls-*.parquet")),
        *copy.glob("latency/parts/*32-*"),
        next(copy.glob("evidence/work-*/ablation-off-*.parquet")),
        next(copy.glob("evidence/work-*/quality.parquet")),
    ]
    assert len(files) > 40
    for number, path in enumerate(files):
        before = path.read_bytes()
        spoilt(path, number)()
        assert found(copy), path
        path.write_bytes(before)
    assert not found(copy)


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ("pair", "target"),
        ("pair", "partitions"),
        (SCREEN, "files"),
        (SCREEN, "chosen"),
        (CONFIRM, "frozen"),
        (FINAL, "forcing"),
        ("latency", "gates"),
        ("latency", "rows"),
        ("evidence", "lengths"),
    ],
)
def test_a_number_where_a_record_belongs_is_a_mismatch(copy, stage, key):
    edit(f"{stage}/{SUMMARY}", set_at(key, 3))(copy)
    assert any(stage in sentence for sentences in found(copy).values() for sentence in sentences)


def test_what_has_not_been_run_is_no_mismatch(copy):
    for stage in ("evidence", "latency", "frozen_evaluation"):
        shutil.rmtree(copy / stage)
        (copy / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb").unlink()
        (copy / "notebooks" / "10_study_and_run.ipynb").unlink(missing_ok=True)
        results = {check.name: check.result for check in verify(copy)}
        assert results["evidence"] == "not run yet" and {*results.values()} == {"matches", "not run yet"}
    assert (
        results["latency"]
        == results["final evaluation"]
        == results["decision"]
        == results["ledger"]
        == "not run yet"
    )


def test_a_run_that_has_only_begun_has_nothing_to_compare(tmp_path):
    folder = open_run("smoke", results=tmp_path).folder
    assert [check.name for check in verify(folder) if check.checked] == ["settings"]


def test_a_stage_outside_the_sequence_is_checked_where_it_was_run(copy, monkeypatch):
    monkeypatch.setitem(EXTRA_CHECKS, "further", lambda records, check: check.same("further", 1, 2))
    assert "further" not in found(copy)
    write_json(copy / "further" / SUMMARY, {})
    assert found(copy) == {"further": ["further: found 1, expected 2"]}


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path):
    with pytest.raises(KvlibError, match="expected the folder of a run"):
        verify(tmp_path)


def test_the_summary_is_of_json_types(copy):
    edit(f"latency/{SUMMARY}", set_at("label", "other"))(copy)
    entry = next(entry for entry in json.loads(json.dumps(summary(verify(copy)))) if entry["mismatches"])
    assert entry["check"] == "stages" and entry["checked"] > 1 and len(entry["mismatches"]) == 1


# The command


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs `kvlib verify` in this process, on a run's folder; gives (status, standard output, standard error)."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(folder: Path) -> tuple[int, str, str]:
        monkeypatch.setenv(HOME_VARIABLE, str(folder.parent.parent))
        with pytest.raises(SystemExit) as left:
            run_app(app, ["verify", folder.name])
        said = capsys.readouterr()
        return left.value.code or 0, said.out, said.err

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_says_that_everything_matches(made, command):
    status, out, err = command(made)
    checks = verify(made)
    compared = sum(check.checked for check in checks)
    assert status == 0 and err == ""
    assert out.splitlines()[0].split() == ["check", "compared", "result"]
    assert (
        out.splitlines()[-1] == f"everything matches: {compared:,} numbers and hashes in {len(checks)} checks"
    )


def test_the_command_names_what_does_not_match(copy, command):
    edit(f"{FINAL}/{SUMMARY}", set_at("decision", "verdict", "triumphs"))(copy)
    status, out, _ = command(copy)
    assert status == FAILURE
    assert 'frozen_evaluation/summary.json, decision.verdict: found "triumphs", expected ' in out
    count = sum(len(check.mismatches) for check in verify(copy))
    assert out.splitlines()[-1].startswith(f"{count} of ") and out.endswith(" do not match\n")


def test_the_command_refuses_a_run_that_is_not_there(made, command):
    status, out, err = command(made.with_name("smoek"))
    assert status == MISTAKE and out == "" and "did you mean 'smoke'?" in err


def test_a_run_of_the_command_line_verifies(smoke_run):
    """Memory probes and real notebooks included."""
    checks = verify(smoke_run.folder)
    assert [sentence for check in checks for sentence in check.mismatches] == []
    assert all(check.checked > 0 for check in checks)
