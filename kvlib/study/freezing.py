"""The frozen manifest: what is fixed before the final prompts are read, and the check that it still holds."""

import uuid
from pathlib import Path

from kvlib.errors import KvlibError
from kvlib.study.decision import decision_rule_hash
from kvlib.study.describing import commit, environment
from kvlib.study.device import device_name, device_of
from kvlib.study.records import (
    append_line,
    hash_json,
    read_json,
    read_lines,
    read_record,
    sha256_file,
    write_json,
)
from kvlib.study.run import NOTEBOOKS, Run, code_hash, now
from kvlib.study.selection import FREEZE_RULE

WRONG_TRAINED = "wrong_trained"  # the control: the frozen arm, trained on other prompts' caches


def model_files(run: Run) -> dict[str, str]:
    """SHA-256 of every weight file of models that the run made itself, by its place in the run."""
    paths = sorted(
        path for role in ("target", "source") for path in (run.stage("pair") / role).glob("*.safetensors")
    )
    return {str(path.relative_to(run.folder)): sha256_file(path) for path in paths}


def profile_hash(run: Run) -> str:
    """Of everything that the final evaluation depends on: not what comes after it, nor how many prompts go through at a time."""
    apart = {"latency": True, "evidence": True, "evaluation": {"batch_prompts"}}
    return hash_json(run.profile.model_dump(mode="json", exclude=apart))


def freeze_manifest(run: Run, frozen: dict, maps: list[str]) -> tuple[str, dict[str, str]]:
    """Write `confirmation/manifest.json`; returns (its hash, the SHA-256 of every map's file).

    Nothing in it depends on the hour or the folder: the same run gives the same manifest.
    """
    folder, pair = run.stage("confirmation"), run.require("pair", "confirmation")
    partitions = read_json(run.stage("pair") / "partitions.json")
    weights = {name: sha256_file(folder / f"{name}.safetensors") for name in maps}
    manifest = {
        "frozen": frozen,
        "rule": FREEZE_RULE,
        "decision_rule": decision_rule_hash(),
        "weights": weights,
        "models": model_files(run),
        "pair": {role: pair[role]["fingerprint"] for role in ("source", "target")},
        "partitions": {name: record["hash"] for name, record in partitions["partitions"].items()},
        "final_prompts": [item["sha256"] for item in partitions["partitions"]["final"]["items"]],
        "evaluation": run.profile.evaluation.model_dump(mode="json")
        | run.profile.prompt.model_dump(mode="json"),
        "profile": profile_hash(run),
        "kvlib": code_hash(),
        "packages": environment()["packages"],
        "device": device_name(device_of(run.profile)),
        "commit": commit(),
    }
    write_json(folder / "manifest.json", {**manifest, "hash": hash_json(manifest)})
    return hash_json(manifest), weights


def check_manifest(run: Run) -> dict:
    """The manifest, after everything it fixes was compared with what is there now.

    Raises: KvlibError that names what is missing or differs.
    """
    path = run.stage("confirmation") / "manifest.json"
    again = f"run `python -m kvlib run {NOTEBOOKS['confirmation']} --profile {run.source} --run {run.name}`"
    if not path.exists():
        raise KvlibError(
            f"the frozen manifest {path} is missing, and the final prompts are opened only with it: {again} first"
        )
    manifest = read_record(
        path,
        "hash",
        "rule",
        "decision_rule",
        "profile",
        "kvlib",
        "partitions",
        "final_prompts",
        "models",
        "weights",
    )
    stated = manifest.pop("hash", None)
    if hash_json(manifest) != stated:
        raise KvlibError(
            f"the frozen manifest {path} was edited: its content does not match its own hash; restore it"
        )
    summary = run.require("confirmation", "frozen_evaluation")
    if summary["manifest_hash"] != stated:
        raise KvlibError(
            f"the frozen manifest {path} has hash {stated[:12]}, the confirmation stage recorded {summary['manifest_hash'][:12]}: restore it"
        )
    for what, (now_there, frozen) in compared(run, manifest).items():
        if now_there != frozen:
            raise KvlibError(
                f"{what} changed after the freeze ({short(frozen)} then, {short(now_there)} now), so the final prompts stay closed: "
                f"restore it, or freeze anew: delete {path.parent / 'summary.json'} and {again}"
            )
    return {**manifest, "hash": stated}


def compared(run: Run, manifest: dict) -> dict[str, tuple]:
    """Everything that the manifest fixes, in words -> (what is there now, what the manifest says)."""
    partitions = read_json(run.stage("pair") / "partitions.json")["partitions"]
    found = {
        "the decision rule": (
            [FREEZE_RULE, decision_rule_hash()],
            [manifest["rule"], manifest["decision_rule"]],
        ),
        "the profile": (
            profile_hash(run),
            manifest["profile"],
        ),
        "kvlib's code": (code_hash(), manifest["kvlib"]),
        "the partitions": (
            {name: record["hash"] for name, record in partitions.items()},
            manifest["partitions"],
        ),
        "the final prompts": (
            [item["sha256"] for item in partitions["final"]["items"]],
            manifest["final_prompts"],
        ),
        "the models' weights": (model_files(run), manifest["models"]),
    }
    for name in manifest["weights"]:
        file = run.stage("confirmation") / f"{name}.safetensors"
        found[f"the {name} map's weights"] = (
            sha256_file(file) if file.exists() else "missing",
            manifest["weights"][name],
        )
    return found


def short(value) -> str:
    text = value if isinstance(value, str) else hash_json(value)
    return text[:12]


def ledger(run: Run) -> Path:
    return run.stage("frozen_evaluation") / "ledger.jsonl"


def openings(run: Run, purpose: str = "final") -> list[dict]:
    """Every opening of the final prompts in this run, oldest first; a line that names no purpose is of the evaluation."""
    return [line for line in read_lines(ledger(run)) if line.get("purpose", "final") == purpose]


def record_opening(run: Run, manifest_hash: str, work: Path, purpose: str = "final") -> None:
    """Append one opening, once for a folder of work: killed anywhere, a stage that goes on there is the same opening."""
    mark = work / "opening.json"
    if not mark.exists():
        write_json(mark, {"opening": uuid.uuid4().hex})
    opening = read_record(mark, "opening")["opening"]
    if all(line.get("opening") != opening for line in openings(run, purpose)):
        line = {
            "opening": opening,
            "opened": now(),
            "manifest": manifest_hash,
            "commit": commit(),
            "kvlib": code_hash(),
        }
        append_line(ledger(run), line | ({} if purpose == "final" else {"purpose": purpose}))
