"""Which arms go on, and which one is frozen: pure functions of the records."""

import math
import statistics
from collections.abc import Sequence

from scipy import stats

from kvlib.errors import KvlibError

FREEZE_RULE = (
    "Among the confirmed arms whose every seed finished, find the lowest mean KL32 on the confirm-validate prompts over its "
    "seeds, at the checkpoint and residual scale that screening fixed. Arms within one standard error of it (over that "
    "arm's seeds) tie. Of those that tie take one that attention can absorb before one that it cannot, then the one with fewer "
    "parameters, then the lower mean, then the arm's id; and of it the weights of the median seed. Ties between seeds go to "
    "the smaller seed."
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


def places(arms: list[dict], scores: dict[str, Sequence[float]], count: int) -> list[dict]:
    """Who goes on to be confirmed: `count` places, filled one after the other from the arms that have none yet.

    For each the lowest KL32 is found. Arms tie with it whose mean paired difference from it, over the same prompts, is no
    larger than the standard error of that difference. Of those that tie an arm that attention can absorb goes first, then
    one with fewer parameters, then the lower KL32, then the id.

    Args:
        arms: "id", "kl32" at the chosen checkpoint and scale, "parameters", "absorbable". scores: KL32 per prompt by id.

    Returns: per place {"arm", "lowest", "tied": [{"arm", "difference", "se"}]}, the lowest itself not among the tied;
        se is null for a single prompt, where only equal scores tie.

    Raises: KvlibError where there are fewer arms than places.
    """
    if len(arms) < count:
        raise KvlibError(
            f"{len(arms)} arms finished the screen, expected at least {count} to confirm: lower the learning rates "
            "or screen more arms"
        )
    left, found = list(arms), []
    while len(found) < count:
        lowest = min(left, key=lambda arm: (arm["kl32"], arm["parameters"], arm["id"]))
        tied = {
            arm["id"]: tie
            for arm in left
            if arm is not lowest and (tie := _tie(scores[arm["id"]], scores[lowest["id"]]))
        }
        best = min((arm for arm in left if arm is lowest or arm["id"] in tied), key=_preference)
        found.append(
            {
                "arm": best["id"],
                "lowest": lowest["id"],
                "tied": [{"arm": name, **tied[name]} for name in sorted(tied)],
            }
        )
        left.remove(best)
    return found


def _tie(scores: Sequence[float], lowest: Sequence[float]) -> dict | None:
    """The mean paired difference and its standard error where the first does not exceed the second, else None."""
    differences = [one - other for one, other in zip(scores, lowest, strict=True)]
    mean = math.fsum(differences) / len(differences)
    error = float(stats.sem(differences)) if len(differences) > 1 else None
    return {"difference": mean, "se": error} if mean <= (error or 0.0) else None


def _preference(arm: dict) -> tuple:
    """Among arms that cannot be told apart: no cost in time, then size, then the score."""
    return not arm["absorbable"], arm["parameters"], arm["kl32"], arm["id"]


def by_kl32(chosen: dict[str, dict], parameters: dict[str, int], count: int) -> list[dict]:
    """The best `count` entries of `choose_settings`; ties to fewer parameters, then to the id."""
    order = sorted(chosen, key=lambda arm: (chosen[arm]["kl32"], parameters[arm], arm))
    return [chosen[arm] for arm in order[:count]]


def freeze(arms: list[dict]) -> tuple[str, int]:
    """(arm id, seed) by `FREEZE_RULE`.

    Args:
        arms: records with "id", "parameters", "absorbable" and "runs": [{"seed", "status", "kl32"}].

    Raises: KvlibError when no arm finished every seed.
    """
    _check_complete(arms, "id")
    whole = [arm for arm in arms if arm["runs"] and all(run["status"] == "finished" for run in arm["runs"])]
    if not whole:
        raise KvlibError(
            "no confirmed arm finished every seed, expected at least one: lower the learning rates and screen again"
        )
    lowest = min(whole, key=lambda arm: (mean_kl32(arm), arm["parameters"], arm["id"]))
    limit = mean_kl32(lowest) + standard_error(lowest)
    tied = [arm for arm in whole if mean_kl32(arm) <= limit]
    best = min(tied, key=lambda arm: (not arm["absorbable"], arm["parameters"], mean_kl32(arm), arm["id"]))
    return best["id"], median_seed(best["runs"])


def why_frozen(arms: list[dict], name: str, seed: int) -> str:
    """One sentence: the means that `freeze` compared, whether they tie, and what decided."""
    chosen = next(arm for arm in arms if arm["id"] == name)
    others = [
        arm for arm in arms if arm["id"] != name and all(r["status"] == "finished" for r in arm["runs"])
    ]
    text = f"mean KL32 {mean_kl32(chosen):.5f} over {len(chosen['runs'])} seeds"
    if others:
        other = min(others, key=mean_kl32)
        text += f" against {mean_kl32(other):.5f}"
        lower, higher = sorted((chosen, other), key=mean_kl32)
        if mean_kl32(higher) <= mean_kl32(lower) + standard_error(lower):
            text += f", a tie within the standard error of {standard_error(lower):.5f}"
            if chosen["absorbable"] != other["absorbable"]:
                text += ", decided by what attention can absorb"
            elif chosen["parameters"] != other["parameters"]:
                text += ", decided by fewer parameters"
    return f"{text}; the median of its seeds is {seed}"


def standard_error(arm: dict) -> float:
    """Of the mean KL32 over the arm's seeds; 0 for a single seed, so that only equal means tie then."""
    values = [run["kl32"] for run in arm["runs"]]
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


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
