"""Checks of what was frozen: the manifest and all that it fixes, the maps, and the ledger of openings."""

import datetime
from pathlib import Path

from kvlib.maps import CacheMap, load_map
from kvlib.maps.base import map_provenance
from kvlib.study.arms import chosen_arms
from kvlib.study.evaluation import work_folder
from kvlib.study.evidence import stage as evidence
from kvlib.study.freezing import WRONG_TRAINED, compared, ledger, openings
from kvlib.study.learning import Task, checkpoint_file
from kvlib.study.records import hash_json, read_lines, read_record
from kvlib.study.screening import caches_key
from kvlib.study.verification.checking import Check
from kvlib.study.verification.reading import Records
from kvlib.study.verification.training import Training

AFTER = ("frozen_evaluation", "latency")  # the stages that name the manifest they ran under


def check_manifest(records: Records, check: Check) -> None:
    """The manifest has its own hash, everything it fixes is as it was, and the later stages ran under it."""
    run, where = records.run, "confirmation/manifest.json"
    manifest = records.json("confirmation", "manifest.json")
    stated = manifest.pop("hash")
    check.same(f"{where}, hash", stated, hash_json(manifest))
    with check.reading(where):
        for what, (present, frozen) in compared(run, manifest).items():
            check.same(f"{where}, {what}", frozen, present)
    summary = records.summary("confirmation")
    with check.reading(where):
        frozen = {key: value for key, value in summary["frozen"].items() if key != "weights_sha256"}
        check.same(f"{where}, frozen", manifest["frozen"], frozen)
        fingerprints = {role: records.summary("pair")[role]["fingerprint"] for role in ("source", "target")}
        check.same(f"{where}, pair", manifest["pair"], fingerprints)
        maps = ["learned", "ridge"]
        if summary["wrong_trained"]["status"] == "finished":
            maps.append(WRONG_TRAINED)
        check.same(f"{where}, maps", sorted(manifest["weights"]), maps)
        settings = run.profile.evaluation.model_dump(mode="json") | run.profile.prompt.model_dump(mode="json")
        at_a_time = "batch_prompts"  # changes no figure
        fixed, present = (
            {k: v for k, v in e.items() if k != at_a_time} for e in (manifest["evaluation"], settings)
        )
        check.same(f"{where}, evaluation", fixed, present)
    check.same("confirmation/summary.json, manifest_hash", summary.get("manifest_hash"), stated)
    for stage in AFTER:
        if records.has(stage):
            with check.reading(f"{stage}/summary.json, frozen"):
                check.same(f"{stage}/summary.json, frozen", records.summary(stage)["frozen"], stated)


def check_maps(records: Records, check: Check) -> None:
    """The frozen maps are those of the pair, the arm and the seed: the checkpoints themselves, at the frozen scale."""
    run, summary = records.run, records.summary("confirmation")
    frozen, folder = summary["frozen"], run.stage("confirmation")
    arm = next(arm for arm in chosen_arms(run.profile.screening) if arm.id == frozen["arm"])
    caches = caches_key(run, records.training_dtype)
    for stage in ("screening", "confirmation"):
        with check.reading(f"{stage}/ridge-{caches}.safetensors"):
            _load(records, run.stage(stage) / f"ridge-{caches}.safetensors", check)
    wanted = {"ridge": folder / f"ridge-{caches}.safetensors"}
    for name in records.json("confirmation", "manifest.json")["weights"]:
        if name != "ridge":
            task = Task(arm, frozen["seed"], frozen["checkpoint_step"], wrong_prompts=name == WRONG_TRAINED)
            wanted[name] = Training(records, "confirmation", task).folder / checkpoint_file(task.steps)
    for name, source in wanted.items():
        path = folder / f"{name}.safetensors"
        with check.reading(records.name(path)):
            found, made_of = _load(records, path, check), load_map(source, pair=records.pair)
            made_of = made_of if name == "ridge" else made_of.with_scale(frozen["scale"])
            provenance = {"map": name, "arm": frozen["arm"], "seed": frozen["seed"]}
            check.same(f"{records.name(path)}, provenance", map_provenance(path), provenance)
            check.same(f"{records.name(path)}, settings", found.settings(), made_of.settings())
            ours, theirs = found.tensors(), made_of.tensors()
            check.same(f"{records.name(path)}, tensors", sorted(ours), sorted(theirs))
            for tensor in ours:
                same = ours[tensor].equal(theirs[tensor])
                check.holds(
                    same,
                    f"{records.name(path)}, {tensor}: found other numbers than in {records.name(source)}",
                )
            if name == "learned":
                place = "confirmation/summary.json, frozen.parameters"
                check.same(place, frozen["parameters"], found.parameters)


def _load(records: Records, path: Path, check: Check) -> CacheMap:
    found = load_map(path, pair=records.pair)  # refuses another pair's map and numbers that are not finite
    check.checked += 1
    return found


def check_ledger(records: Records, check: Check) -> None:
    """Every opening of the final prompts stands in the ledger once; the present tables' own, under the present manifest."""
    where = records.name(ledger(records.run))
    lines, manifest = read_lines(ledger(records.run)), records.json("confirmation", "manifest.json")
    opened = records.made("frozen_evaluation")["opened"]
    check.same("frozen_evaluation/made.json, opened", opened, len(openings(records.run)))
    check.holds(bool(lines), f"{where}: found no line, expected one for each opening of the final prompts")
    times = [datetime.datetime.fromisoformat(line["opened"]) for line in lines]
    check.holds(times == sorted(times), f"{where}, opened: found times that do not follow one another")
    for number, line in enumerate(lines, 1):
        for key in ("manifest", "kvlib"):
            whole = isinstance(line[key], str) and len(line[key]) == len(manifest["hash"])
            check.holds(whole, f"{where}, line {number}, {key}: found {line[key]!r}, expected a SHA-256")
    names = [line["opening"] for line in lines]
    check.same(f"{where}, openings told twice", len(names) - len({*names}), 0)
    stated = manifest["hash"]
    _own_opening(
        records,
        work_folder(records.run, stated),
        "final",
        {"manifest": stated, "kvlib": manifest["kvlib"]},
        check,
    )
    if records.has(evidence.STAGE):  # which any later code may run
        _own_opening(
            records, evidence.work_folder(records.run, stated), evidence.STAGE, {"manifest": stated}, check
        )


def _own_opening(records: Records, work: Path, purpose: str, expected: dict, check: Check) -> None:
    """The opening that a folder of work names stands in the ledger, and says what is expected."""
    where = records.name(ledger(records.run))
    with check.reading(records.name(work)):
        opening = read_record(work / "opening.json", "opening")["opening"]
        found = [line for line in openings(records.run, purpose) if line["opening"] == opening]
        there = f"{where}: found no line of the opening that {records.name(work)} names"
        check.holds(bool(found), there)
        for line in found:
            for key, value in expected.items():
                check.same(f"{where}, opening of {records.name(work)}, {key}", line[key], value)
