"""Tables of chapters 00 to 02: the pair, its text, the arms, their confirmation."""

from pathlib import Path

import pandas as pd

from kvlib.study.records import read_table

PARTITIONS = {
    "build": "calibrating the source",
    "screen_train": "ridge map and arms",
    "screen_validate": "ranking arms, checkpoints, scales",
    "confirm_train": "retraining the finalists",
    "confirm_validate": "choosing what to freeze",
    "final": "the result, once",
    "latency": "timing",
}


def models(pair: dict) -> pd.DataFrame:
    rows = {
        "layers": "layers",
        "query heads": "query_heads",
        "KV heads": "kv_heads",
        "head dimension": "head_dim",
        "hidden size": "hidden_size",
        "MLP size": "intermediate_size",
        "vocabulary (tokens)": "vocabulary",
        "longest context (tokens)": "max_positions",
        "parameters": "parameters",
        "parameters without the embeddings": "body_parameters",
        "number format": "dtype",
    }
    if any(pair["revisions"].values()):
        rows["commit on the hub"] = "revision"
        pair = {
            **pair,
            **{
                role: {**pair[role], "revision": commit or "a local folder"}
                for role, commit in pair["revisions"].items()
            },
        }
    both = [(label, pair["target"][key], pair["source"][key]) for label, key in rows.items()]
    loss = pair["held_out_nll"]
    both.append(("loss on held-out text (nats per token)", loss["target"], loss["source"]))
    return pd.DataFrame(
        both,
        columns=["", f"target: {pair['target']['name']}", f"source: {pair['source']['name']}"],
        dtype=object,
    )


def partitions(pair: dict) -> pd.DataFrame:
    order = {name: i for i, name in enumerate(PARTITIONS)}
    rows = [
        {
            "partition": name.replace("_", "-"),
            "used for": PARTITIONS.get(name, ""),
            "articles": p["articles"],
            "spans": p["items"],
            "kind": p["kind"],
            "tokens each": p["tokens_each"],
            "SHA-256": p["hash"][:16],
        }
        for name, p in sorted(pair["partitions"].items(), key=lambda item: order.get(item[0], len(order)))
    ]
    return pd.DataFrame(rows)


def texts(pair: dict) -> pd.DataFrame:
    """What was read of each text of a corpus that has several."""
    rows = [
        {
            "text": text["text"],
            "data set": text["name"],
            "configuration": text["config"] or "",
            "split": text["split"],
            "commit": (text["revision"] or "")[:16],
            "licence": text["licence"],
            "documents read": text["documents"],
            "kept": text["articles"],
            "characters kept": text["characters"],
        }
        for text in pair["corpus"]["texts"]
    ]
    return pd.DataFrame(rows)


def read_layers(folder: Path) -> pd.DataFrame:
    """What pruning recorded of each layer; an empty table where the source was loaded instead."""
    path = folder / "pair" / "layers.parquet"
    return (
        read_table(path)
        if path.exists()
        else pd.DataFrame(columns=["layer", "residual_error", "mlp_energy_kept"])
    )


def layers(table: pd.DataFrame) -> pd.DataFrame:
    names = {
        "layer": "layer",
        "residual_error": "residual error (share of energy)",
        "mlp_energy_kept": "MLP energy kept (share)",
    }
    return table.rename(columns=names)[list(names.values())]


def gate(pair: dict) -> pd.DataFrame:
    found = pair["gate"]
    rows = [
        (mode.replace("_", " "), value, found["tolerance"], found["logit_scale"])
        for mode, value in found["max_abs_difference"].items()
    ]
    return pd.DataFrame(
        rows, columns=["mode", "largest difference (logits)", "allowed (logits)", "largest logit"]
    )


def arms(screening: dict) -> pd.DataFrame:
    """Every arm, best first; those that broke off last, with the reason."""
    rows = []
    for arm in sorted(screening["arms"], key=lambda a: (a.get("order") is None, a.get("order") or 0)):
        rows.append(
            {
                "rank": arm.get("order"),
                "base": arm["base"],
                "residual": arm["residual"],
                "features": arm["features"],
                "rank r": arm["rank"],
                "learning rate": arm["learning_rate"],
                "warm-up (steps)": arm["warmup_steps"],
                "parameters": arm["parameters"],
                "KL32 (nats)": arm["kl32"],
                "± se": arm["se"],
                "median KL32": arm["median_kl32"],
                "top-1": arm["top1"],
                "minus direct (nats)": (arm["against_direct"] or {}).get("mean"),
                "Wilcoxon p, Holm": (arm["against_direct"] or {}).get("wilcoxon_p_holm"),
                "training (s)": screening["seconds"][arm["id"]],
                "note": arm["reason"] or ("selected" if arm["id"] in screening["selected"] else ""),
            }
        )
    for name in ("direct", "ridge"):
        plain = screening[name]
        rows.append(
            {
                "base": name,
                "residual": "none",
                "KL32 (nats)": plain["kl32"],
                "± se": plain["se"],
                "top-1": plain["top1"],
                "note": "no training",
            }
        )
    return (
        pd.DataFrame(rows)
        .astype(object)
        .pipe(lambda t: t.where(t.notna(), None))
        .rename(columns={"rank": "order"})
    )


def curves(table: pd.DataFrame) -> pd.DataFrame:
    """Per arm: how far it trained, and its loss on KL at both ends, as means of ten steps."""
    rows = []
    for name, found in table[table.phase == "kl"].groupby("arm", sort=False):
        loss = found.sort_values("step").loss
        rows.append(
            {
                "arm": name,
                "last step": int(found.step.max()),
                "loss, first ten steps (nats)": float(loss.head(10).mean()),
                "loss, last ten steps (nats)": float(loss.tail(10).mean()),
            }
        )
    return pd.DataFrame(rows)


def grid(screening: dict) -> pd.DataFrame:
    names = {
        "arm": "arm",
        "checkpoint_step": "checkpoint (step)",
        "scale": "scale",
        "kl32": "KL32 (nats)",
        "se": "± se",
        "top1": "top-1",
    }
    return pd.DataFrame(screening["grid"])[list(names)].rename(columns=names)


def confirmation(summary: dict) -> pd.DataFrame:
    rows = [
        {
            "arm": arm["id"],
            "seed": run["seed"],
            "KL32 (nats)": run["kl32"],
            "± se": run["se"],
            "top-1": run["top1"],
            "mean over seeds": arm["mean_kl32"],
            "note": run["status"]
            if run["status"] != "finished"
            else "frozen"
            if (arm["id"], run["seed"]) == (summary["frozen"]["arm"], summary["frozen"]["seed"])
            else "",
        }
        for arm in summary["arms"]
        for run in arm["runs"]
    ]
    rows += [
        {
            "arm": name,
            "KL32 (nats)": summary[name]["kl32"],
            "± se": summary[name]["se"],
            "top-1": summary[name]["top1"],
            "note": "no training",
        }
        for name in ("direct", "ridge")
    ]
    return pd.DataFrame(rows).astype(object).pipe(lambda t: t.where(t.notna(), None))
