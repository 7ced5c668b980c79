"""Which arms go on, and which one is frozen: pure functions of the records."""

import math

from kvlib.errors import KvlibError

FREEZE_RULE = (
    "Among the confirmed arms whose every seed finished, take the one with the lower mean KL32 on the confirm-validate "
    "prompts over its seeds, at the checkpoint and residual scale that screening fixed, and of it the weights of the "
    "median seed. Ties go to fewer parameters, then to the arm's id; ties between seeds to the smaller seed."
)


def rank_arms(arms: list[dict]) -> list[str]:
    """Ids of the finished arms by validation KL32, lowest first; ties to fewer parameters, then to the id.

    Args:
        arms: records with "id", "status", "kl32", "parameters".
    """
    _check_complete(arms, "id")
    finished = [arm for arm in arms if arm["status"] == "finished"]
    return [
        arm["id"] for arm in sorted(finished, key=lambda arm: (arm["kl32"], arm["parameters"], arm["id"]))
    ]


def choose_settings(grid: list[dict]) -> dict[str, dict]:
    """The best checkpoint and scale of every arm; ties to the earlier checkpoint, then to the smaller scale.

    Args:
        grid: records with "arm", "checkpoint_step", "scale", "kl32".
    """
    best: dict[str, dict] = {}
    for entry in sorted(grid, key=lambda e: (e["arm"], e["kl32"], e["checkpoint_step"], e["scale"])):
        _check_number(entry["kl32"], entry["arm"])
        best.setdefault(entry["arm"], entry)
    return best


def finalists(chosen: dict[str, dict], parameters: dict[str, int], count: int) -> list[str]:
    """The best `count` arms at their chosen settings; ties to fewer parameters, then to the id."""
    order = sorted(chosen, key=lambda arm: (chosen[arm]["kl32"], parameters[arm], arm))
    if len(order) < count:
        raise KvlibError(
            f"{len(order)} arms finished the screen, expected at least {count} to confirm: lower the learning rates "
            "or screen more arms"
        )
    return order[:count]


def freeze(arms: list[dict]) -> tuple[str, int]:
    """(arm id, seed) by `FREEZE_RULE`.

    Args:
        arms: records with "id", "parameters" and "runs": [{"seed", "status", "kl32"}].

    Raises: KvlibError when no arm finished every seed.
    """
    _check_complete(arms, "id")
    whole = [arm for arm in arms if arm["runs"] and all(run["status"] == "finished" for run in arm["runs"])]
    if not whole:
        raise KvlibError(
            "no confirmed arm finished every seed, expected at least one: lower the learning rates and screen again"
        )
    best = min(whole, key=lambda arm: (mean_kl32(arm), arm["parameters"], arm["id"]))
    return best["id"], median_seed(best["runs"])


def mean_kl32(arm: dict) -> float:
    return math.fsum(run["kl32"] for run in arm["runs"]) / len(arm["runs"])


def median_seed(runs: list[dict]) -> int:
    """The seed in the middle by KL32 (of an even number, the better of the two in the middle)."""
    for run in runs:
        _check_number(run["kl32"], run["seed"])
    median = sorted(run["kl32"] for run in runs)[(len(runs) - 1) // 2]
    return min(run["seed"] for run in runs if run["kl32"] == median)


def _check_complete(records: list[dict], key: str) -> None:
    names = [record[key] for record in records]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise KvlibError(
            f"arm {twice[0]} has more than one record, expected one: delete the stage's folder and run it again"
        )
    for record in records:
        if record.get("status") == "finished":
            _check_number(record["kl32"], record[key])


def _check_number(value, owner) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise KvlibError(
            f"the record of {owner} has KL32 {value!r}, expected a finite number: delete it and run it again"
        )
