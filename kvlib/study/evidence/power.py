"""How many prompts it takes to see the effect that the final evaluation found, from statsmodels' paired t-test."""

import math
import warnings
from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd
from statsmodels.stats.power import TTestPower, normal_power

from kvlib.study.statistics import paired

ALPHA, WANTED = 0.05, {"needed_80": 0.8, "needed_95": 0.95}
CURVE = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FEWEST = 2  # prompts of a t-test
FIELDS = (
    "effect", "sd", "prompts", "design_effect", "needed_80", "needed_95", "needed_80_clustered", "detectable_80",
    "detectable_80_clustered",
)  # fmt: skip


def final_differences(prompts: pd.DataFrame) -> tuple[list[float], list[str]]:
    """(learned − direct KL32, article) per final prompt, from frozen_evaluation/prompts.parquet; oracle forcing where there is."""
    found = prompts["forcing"].unique()
    forcing = "oracle" if "oracle" in found else found[0]
    rows = prompts[prompts["forcing"] == forcing].sort_values("prompt")
    learned, direct = (rows[rows["path"] == path] for path in ("learned", "direct"))
    return (learned["kl32"].to_numpy() - direct["kl32"].to_numpy()).tolist(), direct["article"].tolist()


def summarise_power(differences: Sequence[float], clusters: Sequence[Hashable]) -> dict:
    """Two-sided paired t-tests at 5 %, for the mean and spread that `differences` have.

    Prompts of one article are not independent: n of them count as n / design_effect, where design_effect is
    (clustered standard error / plain standard error)². What cannot be told is None, and `note` says why.
    """
    result = {**dict.fromkeys(FIELDS), "prompts": len(differences), "curve": []}
    found = paired(differences, clusters, seed=0)
    if found["mean"] is None or found["se"] is None:
        return result | {"effect": found["mean"], "note": found.get("note", "there are too few prompts")}
    result["effect"] = found["mean"]
    # equal numbers have a spread of exactly zero, whatever their mean is rounded to
    result["sd"] = sd = float(np.std(differences, ddof=1)) if np.ptp(differences) > 0 else 0.0
    if sd == 0:
        return result | {"note": "all differences are equal: a spread of zero has no power to be told"}
    notes = []
    if found.get("se_clustered"):
        result["design_effect"] = (found["se_clustered"] / found["se"]) ** 2
    else:
        notes.append("no clustered standard error, so nothing is said of clustered prompts")
    size, inflated = abs(found["mean"]) / sd, result["design_effect"]
    needed = {name: needed_prompts(size, power) for name, power in WANTED.items()}
    if None in needed.values():
        notes.append("the mean is too close to zero for a number of prompts to be found")
    result |= {name: None if n is None else math.ceil(n) for name, n in needed.items()}
    if inflated and needed["needed_80"] is not None:
        result["needed_80_clustered"] = max(FEWEST, math.ceil(needed["needed_80"] * inflated))
    result["detectable_80"] = detectable(len(differences), sd)
    if inflated:
        result["detectable_80_clustered"] = detectable(len(differences) / inflated, sd)
    if result["detectable_80"] is None or (inflated and result["detectable_80_clustered"] is None):
        notes.append("there are too few independent prompts for the smallest effect to be told")
    result["curve"] = [
        {
            "prompts": n,
            "power": power(size, n),
            "power_clustered": power(size, n / inflated) if inflated else None,
        }
        for n in sorted({*CURVE, len(differences)})
    ]
    return result | ({"note": "; ".join(notes)} if notes else {})


def power(size: float, prompts: float) -> float | None:
    """Of n independent prompts for a mean of `size` standard deviations; None below two prompts."""
    if prompts < FEWEST:
        return None
    found = float(TTestPower().power(size, prompts, ALPHA))
    # scipy's noncentral t has no value far out, where power is 1 to many digits: the normal one does as well there
    return found if math.isfinite(found) else float(normal_power(size, prompts, ALPHA))


def needed_prompts(size: float, wanted: float) -> float | None:
    """Independent prompts for the wanted power, not rounded, at least two; None where none is found."""
    if size <= 0:
        return None
    if (power(size, FEWEST) or 0) >= wanted:
        return float(FEWEST)
    found = _solved(effect_size=size, power=wanted)
    return found if found is not None and _reached(power(size, found), wanted) else None


def detectable(prompts: float, sd: float) -> float | None:
    """The smallest |mean| that n independent prompts show with 80 % power; None where none is found."""
    wanted = WANTED["needed_80"]
    if prompts < FEWEST:
        return None
    found = _solved(nobs=prompts, power=wanted)
    return found * sd if found is not None and _reached(power(found, prompts), wanted) else None


def _solved(**known) -> float | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a search that fails is found out by its result
        found = float(np.squeeze(TTestPower().solve_power(alpha=ALPHA, **known)))
    return found if math.isfinite(found) and found > 0 else None


def _reached(found: float | None, wanted: float) -> bool:
    return found is not None and abs(found - wanted) < 1e-3
