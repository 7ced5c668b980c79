"""Records of the evidence stage made of seeded random numbers, for a made-up run that is there already."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from fake_records import write_stage
from statsmodels.stats.power import TTestPower

from kvlib.study.profile import load_profile
from kvlib.study.records import read_json, write_table
from kvlib.study.run import Run
from kvlib.study.statistics import describe, paired

LAYERS, HEADS, RANK, VALIDATION = 30, 3, 8, 24
LENGTHS = {64: 64, 512: 64, 1024: 64, 2048: 8, 4096: 8}  # prefix tokens -> prompts
LEVEL = {"direct": 0.20, "ridge": 0.31}


def write_fake_evidence(run: Path, *, seed: int = 11, **variant) -> dict:
    """Write `run`/evidence and return its summary. `variant`: as for `fake_evidence`."""
    frozen = read_json(run / "confirmation" / "summary.json")
    summary, tables = fake_evidence(seed=seed, **variant)
    profile = load_profile("laptop")
    head = {
        "profile": profile.name,
        "label": profile.label,
        "key": Run(profile, run.name, run, {}, profile.name).key("evidence"),
        "frozen": frozen["manifest_hash"],
        "arm": frozen["frozen"]["arm"],
        "scale": frozen["frozen"]["scale"],
    }
    for name, table in tables.items():
        write_table(run / "evidence" / f"{name}.parquet", table)
    write_stage(run / "evidence", head, summary)
    return head | summary


def fake_evidence(
    *,
    seed: int = 11,
    lengths: dict[int, int] = LENGTHS,
    windows: tuple[int, ...] = (8, 16, 32, 64),
    steps: tuple[int, ...] = (10, 25, 50, 75, 100),
    validation: int = VALIDATION,
    gain: float = 0.03,
    ridge_fits: bool = True,
) -> tuple[dict, dict[str, pd.DataFrame]]:
    """(summary without its head, tables by name).

    Args: gain: what the correction takes off direct reuse, in nats; 0 makes both the same on every prompt.
        ridge_fits: whether the ridge map reconstructs the target's cache better than direct reuse does.
    """
    rng = np.random.default_rng(seed)
    frame = _lengths(rng, lengths, gain)
    learning, blocks = _learning(rng, windows, steps, validation, gain)
    ablation = _ablation(rng, blocks, gain)
    tables = {
        "lengths": frame,
        "learning": learning,
        "ablation": ablation,
        "singular_values": _singular_values(rng, gain),
        "size": _size(rng, gain),
        "ridge": _ridge(rng, ridge_fits),
    }
    summary = {
        "training_prefix_tokens": [64, 992],
        "lengths": [_length(frame, tokens) for tokens in lengths],
        "learning": _learning_summary(learning, windows, steps, validation),
        "power": _power(frame, max(lengths.values(), default=0)),
    }
    summary["ablation"] = _ablation_summary(ablation, summary["learning"]["direct"]["kl32"])
    return json.loads(json.dumps(summary)), tables


def _lengths(rng, lengths: dict[int, int], gain: float) -> pd.DataFrame:
    rows = []
    for tokens, prompts in lengths.items():
        alike = rng.normal(0, 0.7, 1 + prompts // 3)  # what the prompts of one article share
        for prompt in range(prompts):
            hard, less = rng.gamma(3, 1 / 3), gain * (rng.normal(0.9, 1.2) + alike[prompt // 3])
            growth = 1 + 0.1 * np.log2(tokens / 64)
            for path in ("direct", "ridge", "learned"):
                kl = LEVEL.get(path, LEVEL["direct"]) * hard * growth - less * (path == "learned")
                rows.append(
                    {
                        "prefix_tokens": tokens,
                        "path": path,
                        "prompt": prompt,
                        "article": f"Article {prompt // 3}",
                        "kl32": kl,
                        "top1": 0.81,
                        "text": "the river & the <b>band</b>",
                    }
                )
    names = ["prefix_tokens", "path", "prompt", "article", "kl32", "top1", "text"]
    return pd.DataFrame(rows, columns=names)


def _length(frame: pd.DataFrame, tokens: int) -> dict:
    rows = frame[frame.prefix_tokens == tokens]
    wide = rows.pivot(index="prompt", columns="path", values="kl32").reindex(
        columns=["direct", "ridge", "learned"]
    )
    articles = rows[rows.path == "direct"].article.tolist()
    differences = {path: (wide[path] - wide.direct).tolist() for path in ("learned", "ridge")}
    return {
        "prefix_tokens": tokens,
        "prompts": len(wide),
        "articles": len(set(articles)),
        "paths": {
            path: {"kl32": describe(wide[path].tolist()), "top1": 0.81 if len(wide) else None}
            for path in wide
        },
        "paired": {
            f"{path}-direct": paired(d, articles, seed=1, baseline=wide.direct.tolist())
            if d
            else paired(d, seed=1)
            for path, d in differences.items()
        },
    }


def _learning(rng, windows, steps, prompts: int, gain: float) -> tuple[pd.DataFrame, dict]:
    hard = LEVEL["direct"] * rng.gamma(3, 1 / 3, prompts)
    blocks = {("direct", 0): hard, ("ridge", 0): hard * LEVEL["ridge"] / LEVEL["direct"]}
    most = max(windows, default=1)
    for count in windows:
        part = np.log2(1 + count) / np.log2(1 + most)
        blocks["windows", count] = hard - gain * (2 * part - 1) * rng.normal(1, 0.2, prompts)
    last = blocks.get(("windows", most), hard)
    for step in steps:
        blocks["steps", step] = last + 0.5 * gain * (1 - step / max(steps)) * rng.normal(1, 0.2, prompts)
    rows = [
        {"axis": axis, "value": value, "prompt": prompt, "kl32": kl, "top1": 0.8}
        for (axis, value), found in blocks.items()
        for prompt, kl in enumerate(found)
    ]
    return pd.DataFrame(rows), {"direct": hard, "full": last}


def _scores(kl32) -> dict:
    found = describe(list(kl32))
    return {
        "kl32": found["mean"],
        "se": found["se"],
        "median_kl32": found["median"],
        "top1": 0.8 if found["n"] else None,
    }


def _learning_summary(learning: pd.DataFrame, windows, steps, prompts: int) -> dict:
    def score(axis: str, value: int) -> dict:
        return _scores(learning[(learning.axis == axis) & (learning.value == value)].kl32)

    return {
        "prompts": prompts,
        "direct": score("direct", 0),
        "ridge": score("ridge", 0),
        "windows": [
            {"windows": n, "tokens": 1024 * n, "articles": min(n, 14), **score("windows", n)} for n in windows
        ],
        "steps": [{"step": n, **score("steps", n)} for n in steps],
    }


def _ablation(rng, blocks: dict, gain: float) -> pd.DataFrame:
    direct, full = blocks["direct"], blocks["full"]
    weight = rng.gamma(0.6, 1, LAYERS)
    weight /= weight.sum()
    found = {("full", -1): full}
    found["keys_only", -1] = direct - 0.3 * (direct - full)
    found["values_only", -1] = direct - 0.8 * (direct - full)
    for layer, share in enumerate(weight):
        noise = gain * 0.02 * rng.normal(size=(2, len(direct)))
        found["off", layer] = full + 0.8 * share * (direct - full) + noise[0]
        found["only", layer] = direct - 1.3 * share * (direct - full) + noise[1]
    rows = [
        {"which": which, "layer": layer, "prompt": prompt, "kl32": kl, "top1": 0.8}
        for (which, layer), values in found.items()
        for prompt, kl in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=["which", "layer", "prompt", "kl32", "top1"])


def _ablation_summary(ablation: pd.DataFrame, direct: float | None) -> dict:
    scores = {key: _scores(rows.kl32) for key, rows in ablation.groupby(["which", "layer"])}
    full = scores.get(("full", -1), _scores([]))
    whole = direct - full["kl32"] if full["kl32"] is not None else None

    def share(part: float) -> float | None:
        return part / whole if whole else None

    off = {layer: s["kl32"] - full["kl32"] for (which, layer), s in scores.items() if which == "off"}
    only = {layer: direct - s["kl32"] for (which, layer), s in scores.items() if which == "only"}
    return {
        "full": full,
        "keys_only": scores.get(("keys_only", -1), _scores([])),
        "values_only": scores.get(("values_only", -1), _scores([])),
        "off": [
            {"layer": i, "kl32": full["kl32"] + d, "change": d, "share": share(d)} for i, d in off.items()
        ],
        "only": [{"layer": i, "kl32": direct - d, "gain": d, "share": share(d)} for i, d in only.items()],
    }


def _singular_values(rng, gain: float) -> pd.DataFrame:
    rows = []
    for layer in range(LAYERS):
        for head in range(HEADS):
            for kind, size in (("keys", 0.05), ("values", 0.12)):
                top = size * rng.normal(1, 0.15) * (1 + layer / LAYERS) * (gain != 0)
                falls = rng.uniform(0.5, 0.9)
                rows += [
                    {"layer": layer, "head": head, "kind": kind, "index": i, "value": abs(top) * falls**i}
                    for i in range(RANK)
                ]
    return pd.DataFrame(rows)


def _size(rng, gain: float) -> pd.DataFrame:
    rows = []
    for layer in range(LAYERS):
        for kind, ratio in (("keys", 0.02), ("values", 0.06)):
            cache = abs(rng.normal(3, 0.3))
            correction = cache * ratio * rng.uniform(0.6, 1.4) * (gain != 0)
            rows.append(
                {
                    "layer": layer,
                    "kind": kind,
                    "cache_rms": cache,
                    "correction_rms": correction,
                    "ratio": correction / cache,
                }
            )
    return pd.DataFrame(rows)


def _ridge(rng, ridge_fits: bool) -> pd.DataFrame:
    level = {"direct": 0.80, "ridge": 0.93 if ridge_fits else 0.6, "learned": 0.81}
    cosine = {"direct": 0.94, "ridge": 0.90, "learned": 0.955}
    rows = []
    for layer in range(LAYERS):
        for path, height in level.items():
            for kind in ("keys", "values"):
                r2 = height - 0.1 * layer / LAYERS + rng.normal(0, 0.01)
                rows.append({"layer": layer, "kind": kind, "path": path, "r2": r2, "cosine": None})
            value = cosine[path] + rng.normal(0, 0.005)
            rows.append({"layer": layer, "kind": "attention", "path": path, "r2": None, "cosine": value})
    return pd.DataFrame(rows).astype({"r2": float, "cosine": float})


def _power(frame: pd.DataFrame, prompts: int) -> dict:
    """Power of the most often measured length's paired differences, standing in for the final prompts'."""
    names = ("needed_80", "needed_95", "needed_80_clustered", "detectable_80", "detectable_80_clustered")
    empty = {"effect": None, "sd": None, "prompts": prompts, "design_effect": None, "curve": []}
    empty |= dict.fromkeys(names)
    if prompts < 2:
        return empty | {"note": "one prompt has no spread"}
    tokens = frame.groupby("prefix_tokens").prompt.count().idxmax()
    wide = frame[frame.prefix_tokens == tokens].pivot(index="prompt", columns="path", values="kl32")
    articles = frame[(frame.prefix_tokens == tokens) & (frame.path == "direct")].article.tolist()
    d = wide.learned - wide.direct
    found, sd = paired(d.tolist(), articles, seed=1), float(d.std())
    if sd == 0:
        return empty | {"effect": found["mean"], "sd": 0.0, "note": "every difference is the same"}
    test, size = TTestPower(), abs(found["mean"]) / sd
    design = (found["se_clustered"] / found["se"]) ** 2
    counts = [4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]

    def power(n: float) -> float:
        found = float(test.power(size, max(n, 2), 0.05))
        return 1.0 if np.isnan(found) else found  # so near to one that the library gives up

    return empty | {
        "effect": found["mean"],
        "sd": sd,
        "design_effect": design,
        "needed_80": float(test.solve_power(size, power=0.8, alpha=0.05)),
        "needed_95": float(test.solve_power(size, power=0.95, alpha=0.05)),
        "needed_80_clustered": float(test.solve_power(size, power=0.8, alpha=0.05)) * design,
        "detectable_80": float(test.solve_power(nobs=prompts, power=0.8, alpha=0.05)) * sd,
        "detectable_80_clustered": float(test.solve_power(nobs=prompts / design, power=0.8, alpha=0.05)) * sd,
        "curve": [
            {
                "prompts": n,
                "power": power(n),
                "power_clustered": power(n / design),
            }
            for n in counts
        ],
    }
