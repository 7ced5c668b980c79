"""Checks that concern every stage: its settings, its files' hashes, its gates; and the executed notebooks."""

import datetime
import math

from kvlib.cache import Geometry
from kvlib.study.gate import GATE_PROMPTS, MODES, identity_maps
from kvlib.study.records import hash_json, parse_json
from kvlib.study.run import EXTRA, MADE, NOTEBOOKS, OUTPUTS, STAGES, sequence
from kvlib.study.screening import GATE_WINDOWS
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records

ALL = (*STAGES, *EXTRA)
LEDGER = "ledger.jsonl"  # grows after its stage is whole, so that no summary holds its hash
FAILED = ".failed.ipynb"


def check_stages(records: Records, check: Check) -> None:
    """Each stage's records are there, belong to the run's present settings and come after those they need."""
    run = records.run
    for stage in ALL:
        if not records.has(stage):
            continue
        where = f"{stage}/summary.json"
        for earlier in sequence(stage)[:-1]:
            if not (stage == "latency" and earlier == "frozen_evaluation"):
                check.holds(
                    records.has(earlier), f"{where}: found, expected {earlier}/summary.json before it"
                )
        with check.reading(where):
            summary = records.summary(stage)
            check.same(f"{where}, key", summary.get("key"), run.key(stage))
            check.same(f"{where}, profile", summary.get("profile"), run.profile.name)
            check.same(f"{where}, label", summary.get("label"), run.profile.label)
        with check.reading(f"{stage}/{MADE}"):
            made = records.made(stage)
            check.holds(isinstance(made["run"], str), f"{stage}/{MADE}, run: found no name")
            datetime.datetime.fromisoformat(made["created"])
            if "settings" in made:  # records of earlier versions hold their hash alone
                check.same(f"{stage}/{MADE}, settings", hash_json(made["settings"]), run.key(stage))
            took = made["duration_s"]
            check.holds(_is_number(took) and took >= 0, f"{stage}/{MADE}, duration_s: found {took!r}")
    if records.has("pair"):
        with check.reading("pair/key.json"):
            check.same("pair/key.json, key", records.json("pair", "key.json")["key"], run.key("pair"))


def check_files(records: Records, check: Check) -> None:
    """Every file that a summary names has the SHA-256 that stands there."""
    for stage in ALL:
        if records.has(stage):
            with check.reading(f"{stage}/summary.json, files"):
                files = records.summary(stage)["files"]
                check.same(
                    f"{stage}/summary.json, files", sorted(files), sorted({*OUTPUTS[stage]} - {LEDGER})
                )
                for name, expected in files.items():
                    check.hash(f"{stage}/{name}, SHA-256", records.run.stage(stage) / name, expected)


def check_gates(records: Records, check: Check) -> None:
    """Every gate of every stage: at the lengths that the profile asks for, over all it should compare, and passed."""
    for stage in STAGES:
        if records.has(stage):
            with check.reading(f"{stage}/summary.json, gates"):
                _gates_of(records, stage, check)


def _gates_of(records: Records, stage: str, check: Check) -> None:
    profile = records.run.profile
    target, gates = records.summary("pair")["target"], records.summary(stage)["gates"]
    prompts, tokens, lengths, steps = _planned(records, stage)
    where = f"{stage}/summary.json, gates"
    check.same(f"{where}, prefix_tokens", [gate["prefix_tokens"] for gate in gates], lengths)
    maps = identity_maps(Geometry(target["layers"], target["kv_heads"], target["head_dim"]))
    ways = sum(mode != "absorbed" or not m.why_not_affine for m in maps.values() for mode in MODES)
    for index, gate in enumerate(gates):
        place, found = f"{where}[{index}]", gate["max_abs_difference"]
        # The last prefix token is read with those after it.
        positions = min(gate["prefix_tokens"] + steps, tokens) - (gate["prefix_tokens"] - 1)
        compared = ways * prompts * positions * target["vocabulary"]
        check.same(f"{place}.prompts", gate["prompts"], prompts)
        check.same(f"{place}.comparisons", gate["comparisons"], compared)
        check.same(f"{place}.tolerance", gate["tolerance"], profile.evaluation.gate_tolerance)
        check.same(f"{place}.passed", gate["passed"], True)
        check.same(f"{place}.max_abs_difference, modes", sorted(found), sorted(MODES))
        check.same(f"{place}.by_map, maps", sorted(gate["by_map"]), sorted(maps))
        for name, value in [*found.items(), *gate["by_map"].items()]:
            fits = _is_number(value) and 0 <= value <= profile.evaluation.gate_tolerance
            check.holds(fits, f"{place}, {name}: found {value!r}, expected at most the tolerance")
        check.same(f"{place}, the largest by map", max(gate["by_map"].values()), max(found.values()))


def _planned(records: Records, stage: str) -> tuple[int, int, list[int], int]:
    """(prompts, tokens in each, prefix lengths, forced steps after each) of a stage's gates."""
    profile = records.run.profile
    prompt, partitions, settings = profile.prompt, profile.partitions, profile.evaluation
    whole = prompt.prefix_tokens + prompt.forced_steps
    if stage == "latency":
        lengths = profile.latency.prefix_tokens
        return 1, max(lengths), lengths, 0
    if stage == "pair":
        prompts, tokens, lengths = partitions.screen_validate.items, whole, settings.gate_prefix_tokens
    elif stage == "frozen_evaluation":
        prompts, tokens, lengths = partitions.final.items, whole, [prompt.prefix_tokens]
    else:
        windows = partitions.screen_train if stage == "screening" else partitions.confirm_train
        prompts, tokens = min(GATE_WINDOWS, windows.items), partitions.window_tokens
        lengths = [profile.training.min_prefix_tokens, prompt.prefix_tokens, tokens - prompt.forced_steps]
    fitting = sorted({min(length, tokens) for length in lengths})
    return min(GATE_PROMPTS, prompts), tokens, fitting, prompt.forced_steps


def check_notebooks(records: Records, check: Check) -> None:
    """Every executed notebook holds no error, and was made from the settings and summaries that are there now."""
    folder, stages = records.run.folder / "notebooks", {name: stage for stage, name in NOTEBOOKS.items()}
    for path in sorted(folder.glob("*.ipynb")):
        if path.name.endswith(FAILED):
            continue
        where = records.name(path)
        with check.reading(where):
            notebook = parse_json(path)
            outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
            errors = [output["ename"] for output in outputs if output["output_type"] == "error"]
            check.same(f"{where}, errors", errors, [])
            read = notebook["metadata"]["kvlib"]["records"]
            own = [f"{stages[path.stem]}/summary.json"] if path.stem in stages else []
            for name in ["run.json", *own]:
                check.holds(name in read, f"{where}: found no hash of {name}, expected the one that it read")
            for name, expected in read.items():
                check.hash(f"{where}, the {name} that it was made from", records.run.folder / name, expected)


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
