"""Summaries, paired comparisons and their errors, from scipy.stats and statsmodels.

Where a figure cannot be computed it is None (null in a record) and `note` says why; no figure is ever NaN.
"""

import math
import warnings
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import stats
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.multitest import multipletests

from kvlib.errors import KvlibError

CONFIDENCE = 0.95
BOOTSTRAP_RESAMPLES = 9999
PAIRED_FIELDS = ("mean", "se", "ci95", "bca95", "wins", "losses", "ties", "prompts", "wilcoxon_p", "sign_p")


def describe(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> dict:
    """mean, se (of the mean, n − 1), median, q10, q90 and n; `note` where one of them is None.

    clusters: one label per value (its article); adds `se_clustered`, the cluster-robust error of the mean.
    """
    x = _vector(values)
    _check_clusters(x, clusters)
    summary = dict.fromkeys(("mean", "se", "median", "q10", "q90"))
    if clusters is not None:
        summary["se_clustered"] = None
    note = _unusable(x)
    if note is None:
        summary |= {"mean": float(x.mean()), "median": float(np.median(x))}
        summary |= {"q10": float(np.quantile(x, 0.1)), "q90": float(np.quantile(x, 0.9))}
        if len(x) > 1:
            summary["se"] = float(stats.sem(x))
            if clusters is not None:
                summary["se_clustered"], note = _clustered(x, clusters)
        else:
            note = "one value has no standard error"
    return _with_note(summary | {"n": len(x)}, [note])


def normal_interval(mean: float, se: float) -> list[float]:
    """The normal 95 % interval [low, high] of a mean: the study's own."""
    low, high = stats.norm.interval(CONFIDENCE, loc=mean, scale=se) if se > 0 else (mean, mean)
    return [float(low), float(high)]


def paired(
    differences: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    lower_is_better: bool = True,
    seed: int,
    baseline: float | Sequence[float] | None = None,
) -> dict:
    """Everything said about paired differences (path − direct), one per prompt.

    A win is a difference strictly on the better side: a tie is none. `sign_p` is the exact two-sided binomial
    test of wins against losses, `wilcoxon_p` the two-sided signed-rank test; both leave ties out, as is
    usual. `bca95` is the bias-corrected and accelerated bootstrap (9,999 resamples drawn from `seed`),
    `se_clustered` the cluster-robust error of the mean (`clusters`: one label per prompt, its article),
    `relative` the mean over the baseline's mean; both stand there only when asked for. Raises KvlibError
    where the lengths differ.
    """
    d = _vector(differences)
    _check_clusters(d, clusters)
    asked = [("se_clustered", clusters), ("relative", baseline)]
    result = dict.fromkeys([*PAIRED_FIELDS, *(field for field, given in asked if given is not None)])
    result["prompts"] = len(d)
    note = _unusable(d)
    if note is not None:
        return _with_note(result, [note])
    signed = -d if lower_is_better else d
    wins, losses = int((signed > 0).sum()), int((signed < 0).sum())
    result |= {"mean": float(d.mean()), "wins": wins, "losses": losses, "ties": len(d) - wins - losses}
    notes = []
    if wins + losses:
        result["sign_p"] = float(stats.binomtest(wins, wins + losses).pvalue)
        result["wilcoxon_p"] = float(stats.wilcoxon(d).pvalue)
    else:
        notes.append("every difference is zero: there is nothing for the sign and Wilcoxon tests to rank")
    if len(d) == 1:
        notes.append("one prompt has no standard error and no interval")
    else:
        result["se"] = float(stats.sem(d))
        result["ci95"] = normal_interval(result["mean"], result["se"])
        result["bca95"], reason = _bca(d, seed)
        notes.append(reason)
        if clusters is not None:
            result["se_clustered"], reason = _clustered(d, clusters)
            notes.append(reason)
    if baseline is not None:
        result["relative"], reason = _relative(result["mean"], baseline)
        notes.append(reason)
    return _with_note(result, notes)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted by Holm's step-down method, in the order given; None stays and is not counted."""
    given = [p for p in p_values if p is not None]
    if any(not 0 <= p <= 1 for p in given):  # NaN fails this too
        raise KvlibError(f"p-values must lie between 0 and 1, or be null where there is none; {given} do not")
    adjusted = iter(multipletests(given, method="holm")[1].tolist() if given else [])
    return [None if p is None else next(adjusted) for p in p_values]


def with_holm(comparisons: dict[Hashable, dict], tests: Sequence[str] = ("wilcoxon_p", "sign_p")) -> dict:
    """The same comparisons, read together: each with `<test>_holm` beside every test's p-value."""
    corrected = {test: holm([found.get(test) for found in comparisons.values()]) for test in tests}
    return {
        name: found | {f"{test}_holm": corrected[test][index] for test in tests}
        for index, (name, found) in enumerate(comparisons.items())
    }


def _check_clusters(x: np.ndarray, clusters: Sequence[Hashable] | None) -> None:
    if clusters is not None and len(clusters) != len(x):
        raise KvlibError(
            f"{len(x)} values came with {len(clusters)} cluster labels; give one label per value"
        )


def _bca(d: np.ndarray, seed: int) -> tuple[list[float] | None, str | None]:
    if np.ptp(d) == 0:
        return None, "all differences are equal: the bootstrap has nothing to resample"
    with warnings.catch_warnings():
        # Both say that the interval is not defined, which is checked below and said in the note.
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = stats.bootstrap(
            (d,),
            np.mean,
            confidence_level=CONFIDENCE,
            method="BCa",
            n_resamples=BOOTSTRAP_RESAMPLES,
            vectorized=True,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return None, f"the BCa interval is not defined for these {len(d)} differences"
    return [float(interval.low), float(interval.high)], None


def _clustered(d: np.ndarray, clusters: Sequence[Hashable]) -> tuple[float | None, str | None]:
    """Cluster-robust standard error of the mean: OLS on a constant, statsmodels' small-sample correction."""
    labels = {label: code for code, label in enumerate(dict.fromkeys(clusters))}
    if len(labels) < 2:
        return None, "all prompts come from one article: no clustered standard error"
    groups = np.array([labels[label] for label in clusters])
    fit = OLS(d, np.ones(len(d))).fit(cov_type="cluster", cov_kwds={"groups": groups})
    return float(np.sqrt(fit.cov_params()[0, 0])), None


def _relative(mean: float, baseline: float | Sequence[float]) -> tuple[float | None, str | None]:
    reference = float(np.mean(_vector(np.atleast_1d(baseline))))
    if not math.isfinite(reference) or reference == 0:
        return None, f"the baseline's mean is {reference}: there is no relative difference"
    return mean / reference, None


def _vector(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1:
        raise KvlibError(
            f"statistics take one value per prompt; values of shape {x.shape} were given: average them first"
        )
    return x


def _unusable(x: np.ndarray) -> str | None:
    if len(x) == 0:
        return "there are no values"
    bad = int((~np.isfinite(x)).sum())
    return f"{bad} of {len(x)} values are not finite, so nothing is computed from them" if bad else None


def _with_note(summary: dict, notes: list[str | None]) -> dict:
    said = [note for note in notes if note]
    return summary | {"note": "; ".join(said)} if said else summary
