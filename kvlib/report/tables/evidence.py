"""Tables of the evidence chapter: the numbers behind its charts, units in the headings."""

import pandas as pd

from kvlib.report import evidence
from kvlib.report.palette import path_label


def lengths(summary: dict) -> pd.DataFrame:
    """One row per prefix length and path; the paired columns hold path − direct."""
    rows = []
    for entry in sorted(summary["lengths"], key=lambda entry: entry["prefix_tokens"]):
        for path in evidence.PATHS:
            values = evidence.at_length(entry, path)
            paired = evidence.paired_at(entry, path)
            low, high = paired.get("ci95") or (None, None)
            rows.append(
                {
                    "prefix (tokens)": entry["prefix_tokens"],
                    "prompts": entry["prompts"],
                    "articles": entry["articles"],
                    "path": path_label(path),
                    "KL32 (nats)": values.get("mean"),
                    "± se": values.get("se"),
                    "median": values.get("median"),
                    "top-1": values.get("top1"),
                    "minus direct (nats)": paired.get("mean"),
                    "95 % from": low,
                    "to": high,
                    "se, clustered by article": paired.get("se_clustered"),
                    "relative": paired.get("relative"),
                    "lower on": paired.get("wins"),
                }
            )
    return _plain(pd.DataFrame(rows))


def learning(summary: dict, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    found, errors = summary["learning"], evidence.errors_against_direct(tables["learning"])
    direct, rows = found["direct"]["kl32"], []

    def add(what: str, score: dict, key: tuple[str, int] | None, **more) -> None:
        known = direct is not None and score["kl32"] is not None and key is not None
        rows.append(
            {
                "what": what,
                "windows": more.get("windows"),
                "tokens": more.get("tokens"),
                "articles": more.get("articles"),
                "steps": more.get("step"),
                "KL32 (nats)": score["kl32"],
                "± se": score["se"],
                "median": score["median_kl32"],
                "top-1": score["top1"],
                "minus direct (nats)": score["kl32"] - direct if known else None,
                "± se of that": errors.get(key) if known else None,
            }
        )

    add("direct reuse", found["direct"], None)
    add("ridge map", found["ridge"], ("ridge", 0))
    for point in found["windows"]:
        add("more text", point, ("windows", point["windows"]), **point)
    for point in found["steps"]:
        add("more steps", point, ("steps", point["step"]), **point)
    return _plain(pd.DataFrame(rows))


def correction(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Per layer and kind: the spectrum over heads, and the correction's size beside the cache."""
    found = tables["size"].merge(
        evidence.spectrum(tables["singular_values"]), on=["layer", "kind"], how="outer"
    )
    names = {
        "layer": "layer",
        "kind": "of",
        "largest": "largest singular value, mean over heads",
        "largest_low": "lowest head",
        "largest_high": "highest head",
        "directions": "directions, mean over heads",
        "directions_low": "fewest",
        "directions_high": "most",
        "cache_rms": "RMS of the cache",
        "correction_rms": "RMS of the correction",
        "ratio": "ratio",
    }
    return _plain(found.sort_values(["kind", "layer"])[list(names)].rename(columns=names))


def layers(summary: dict, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The parts first, then one row per layer."""
    parts = evidence.parts(summary, tables)
    each = evidence.by_layer(summary, tables)
    rows = [
        {
            "what is on": {"both": "the whole correction"}.get(row.part, row.part),
            "gain (nats)": row.gain,
            "± se": row.se,
            "share of the gain": row.share,
        }
        for row in parts.itertuples()
    ]
    rows += [
        {
            "what is on": f"layer {row.layer} alone",
            "layer": row.layer,
            "gain (nats)": row.only,
            "± se": row.only_se,
            "share of the gain": row.only_share,
            "lost when it is off (nats)": row.off,
            "± se of that": row.off_se,
            "share lost": row.off_share,
        }
        for row in each.itertuples()
    ]
    names = ["what is on", "layer", "gain (nats)", "± se", "share of the gain"]
    names += ["lost when it is off (nats)", "± se of that", "share lost"]
    return _plain(pd.DataFrame(rows, columns=names))


def reconstruction(summary: dict, tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """KL32 of the paths, then R² and cosine by layer."""
    ridge = tables["ridge"]
    ridge = ridge.assign(score=ridge.r2.where(ridge.kind != "attention", ridge.cosine))
    measures = [("keys", "keys, R²"), ("values", "values, R²"), ("attention", "attention, cosine")]
    blocks = [
        pd.DataFrame(
            [
                {"measure": "KL32 (nats)"}
                | {path_label(path): score["kl32"] for path, score in evidence.path_scores(summary).items()}
            ]
        )
    ]
    for kind, name in measures:
        wide = ridge[ridge.kind == kind].pivot(index="layer", columns="path", values="score")
        wide = wide.reindex(columns=list(evidence.PATHS)).rename(columns=path_label)
        blocks.append(wide.rename_axis(columns=None).reset_index().assign(measure=name))
    names = ["measure", "layer", *(path_label(path) for path in evidence.PATHS)]
    rows = [row for block in blocks for row in block.to_dict("records")]
    return _plain(pd.DataFrame(rows, columns=names))


def power(summary: dict) -> pd.DataFrame:
    """What was found and what it takes, then the curve."""
    found = summary["power"]
    rows = [
        ("mean of learned − direct (nats)", found["effect"]),
        ("standard deviation of the differences (nats)", found["sd"]),
        ("prompts of this run", found["prompts"]),
        ("design effect of sharing articles", found["design_effect"]),
        ("prompts for a power of 80 %", found["needed_80"]),
        ("prompts for a power of 95 %", found["needed_95"]),
        ("prompts for a power of 80 %, clustered", found["needed_80_clustered"]),
        ("smallest mean difference shown with a power of 80 % (nats)", found["detectable_80"]),
        ("the same, clustered (nats)", found["detectable_80_clustered"]),
    ]
    for point in found["curve"]:
        rows.append((f"power with {point['prompts']:,} prompts", point["power"]))
        rows.append((f"power with {point['prompts']:,} prompts, clustered", point["power_clustered"]))
    return pd.DataFrame(rows, columns=["what", "value"], dtype=object)


def _plain(table: pd.DataFrame) -> pd.DataFrame:
    """Whole numbers stay whole and what is missing is None, whatever else is in its column."""
    plain = table.astype(object).where(table.notna(), None)
    for name in ("layer", "windows", "tokens", "articles", "steps", "lower on"):
        if name in plain:
            plain[name] = pd.Series(
                [None if value is None else int(value) for value in plain[name]],
                index=plain.index,
                dtype=object,
            )
    return plain
