"""What charts, tables and sentences of the evidence chapter all work out from its records, in one place."""

from pathlib import Path

import pandas as pd

from kvlib.study.records import read_table
from kvlib.study.statistics import describe, normal_interval

TABLES = ("lengths", "learning", "ablation", "singular_values", "size", "ridge")
PATHS = ("direct", "ridge", "learned")
KINDS = ("keys", "values")
FEW_PROMPTS = 20  # below this a normal interval is rough, and the chapter says so
GAIN, HARM, OPEN, UNJUDGED, EMPTY = "gain", "harm", "open", "unjudged", "empty"


def read_evidence(folder: Path) -> dict[str, pd.DataFrame]:
    """The stage's tables by name. `folder`: results/<run>/evidence."""
    return {name: read_table(Path(folder) / f"{name}.parquet") for name in TABLES}


def at_length(entry: dict, path: str) -> dict:
    """A path's mean, se, median, q10, q90 and top1 at one prefix length; empty where there were no prompts."""
    found = (entry.get("paths") or {}).get(path) or {}
    kl32 = found.get("kl32") or {}
    return {**kl32, "top1": found.get("top1")} if kl32.get("mean") is not None else {}


def paired_at(entry: dict, path: str = "learned") -> dict:
    """The paired comparison of a path with direct reuse at one prefix length; empty where there is none."""
    found = (entry.get("paired") or {}).get(f"{path}-direct") or {}
    return found if found.get("mean") is not None else {}


def clustered_interval(paired: dict) -> list[float] | None:
    """The normal 95 % interval with the standard error clustered by article."""
    error = paired.get("se_clustered")
    return None if error is None else normal_interval(paired["mean"], error)


def verdict(entry: dict, path: str = "learned", *, clustered: bool = False) -> str:
    """Which side of zero the interval of path − direct lies on: gain, harm, open; unjudged or empty without one."""
    paired = paired_at(entry, path)
    if not paired:
        return EMPTY
    interval = clustered_interval(paired) if clustered else paired.get("ci95")
    if not interval:
        return UNJUDGED
    return GAIN if interval[1] < 0 else HARM if interval[0] > 0 else OPEN


def strict_verdict(entry: dict) -> str:
    """`verdict` of the learned correction, and open where the interval clustered by article says otherwise."""
    plain, clustered = verdict(entry), verdict(entry, clustered=True)
    return OPEN if clustered in (GAIN, HARM, OPEN) and clustered != plain else plain


def difference(after: pd.Series, before: pd.Series) -> dict:
    """mean, se, ci95 and prompts of after − before, paired by prompt; prompts that lack one of them drop out."""
    found = describe((after - before).dropna().tolist())
    ci95 = None if found["se"] is None else normal_interval(found["mean"], found["se"])
    return {"mean": found["mean"], "se": found["se"], "ci95": ci95, "prompts": found["n"]}


def last_change(learning: pd.DataFrame, axis: str) -> dict | None:
    """`difference` of the last value of an axis from the one before, with from and to; None with fewer than two.

    Args: learning: the table of that name. axis: "windows" or "steps".
    """
    rows = learning[(learning.axis == axis) & learning.kl32.notna()]
    wide = rows.pivot(index="prompt", columns="value", values="kl32").sort_index(axis=1)
    if wide.shape[1] < 2:
        return None
    before, after = wide.columns[-2:]
    return {"from": int(before), "to": int(after), **difference(wide[after], wide[before])}


def errors_against_direct(learning: pd.DataFrame) -> dict[tuple[str, int], float | None]:
    """(axis, value) -> standard error of its difference from direct reuse, paired by prompt."""
    direct = learning[learning.axis == "direct"].set_index("prompt").kl32
    return {
        (axis, int(value)): difference(rows.set_index("prompt").kl32, direct)["se"]
        for (axis, value), rows in learning.groupby(["axis", "value"])
    }


def total_gain(summary: dict) -> float | None:
    """Direct reuse minus the whole correction, in nats, on the validation prompts."""
    direct, full = summary["learning"]["direct"]["kl32"], summary["ablation"]["full"]["kl32"]
    return None if direct is None or full is None else direct - full


def parts(summary: dict, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Gain over direct reuse of keys alone, values alone and the whole: part, kl32, gain, se, share."""
    per_prompt, direct, whole = _by_prompt(tables), summary["learning"]["direct"]["kl32"], total_gain(summary)
    rows = []
    for key, name in (("keys_only", "keys only"), ("values_only", "values only"), ("full", "both")):
        kl32 = summary["ablation"][key]["kl32"]
        gain = None if kl32 is None or direct is None else direct - kl32
        rows.append(
            {
                "part": name,
                "kl32": kl32,
                "gain": gain,
                "se": _error(per_prompt, "direct", key),
                "share": gain / whole if gain is not None and whole else None,
            }
        )
    return pd.DataFrame(rows)


def by_layer(summary: dict, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Per layer: off (the change when it is off), only (the gain when it alone is on), their se and shares."""
    per_prompt, ablation = _by_prompt(tables), summary["ablation"]
    only = {entry["layer"]: entry for entry in ablation["only"]}
    rows = []
    for entry in ablation["off"]:
        layer = entry["layer"]
        alone = only.get(layer, {})
        rows.append(
            {
                "layer": layer,
                "off": entry["change"],
                "off_se": _error(per_prompt, ("off", layer), "full"),
                "off_share": entry["share"],
                "only": alone.get("gain"),
                "only_se": _error(per_prompt, "direct", ("only", layer)),
                "only_share": alone.get("share"),
            }
        )
    names = ["layer", "off", "off_se", "off_share", "only", "only_se", "only_share"]
    table = pd.DataFrame(rows, columns=names)
    numbers = table.columns.drop("layer")
    return table.assign(**{name: pd.to_numeric(table[name]) for name in numbers}).sort_values("layer")


def spectrum(singular_values: pd.DataFrame) -> pd.DataFrame:
    """Per layer and kind, over heads: mean, low and high of the largest singular value and of the directions.

    `directions` is the participation ratio (Σσ²)² / Σσ⁴: how many equal directions would carry as much. A head
    whose correction is zero has none.
    """
    squares = singular_values.assign(square=singular_values.value**2, fourth=singular_values.value**4)
    heads = squares.groupby(["layer", "kind", "head"]).agg(
        largest=("value", "max"), square=("square", "sum"), fourth=("fourth", "sum")
    )
    heads["directions"] = (heads.square**2 / heads.fourth).where(heads.fourth > 0)
    columns = {
        f"{name}{suffix}": (name, how)
        for name in ("largest", "directions")
        for suffix, how in (("", "mean"), ("_low", "min"), ("_high", "max"))
    }
    return heads.groupby(["layer", "kind"]).agg(**columns).reset_index()


def typical(ridge: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(kind, path) -> median over layers of R² (keys, values) or of the cosine (attention); absent where null."""
    found = {}
    for (kind, path), rows in ridge.groupby(["kind", "path"]):
        values = rows["cosine" if kind == "attention" else "r2"].dropna()
        if len(values):
            found[kind, path] = float(values.median())
    return found


def path_scores(summary: dict) -> dict[str, dict]:
    """KL32 of the paths on the validation prompts: the whole correction is the learned one."""
    learning = summary["learning"]
    return {
        "direct": learning["direct"],
        "ridge": learning["ridge"],
        "learned": summary["ablation"]["full"],
    }


def _by_prompt(tables: dict[str, pd.DataFrame]) -> dict:
    """What was scored -> KL32 by prompt: "direct", "full", "keys_only", "values_only", (which, layer)."""
    learning, ablation = tables["learning"], tables["ablation"]
    found = {"direct": learning[learning.axis == "direct"].set_index("prompt").kl32}
    for (which, layer), rows in ablation.groupby(["which", "layer"]):
        found[which if layer < 0 else (which, int(layer))] = rows.set_index("prompt").kl32
    return found


def _error(per_prompt: dict, after, before) -> float | None:
    if after not in per_prompt or before not in per_prompt:
        return None
    return difference(per_prompt[after], per_prompt[before])["se"]
