"""Which layers, and which of keys and values, the frozen correction works through: parts of it switched off."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

from kvlib.maps import ResidualMap
from kvlib.study.evidence.keeping import kept_scores
from kvlib.study.progress import Progress
from kvlib.study.scoring import Scorer, summarise
from kvlib.study.screening import SCORE_STEPS

COLUMNS = ["which", "layer", "prompt", "kl32", "top1"]
WHOLE = ("full", "keys_only", "values_only")


def with_corrections(cache_map: ResidualMap, keys: list[bool], values: list[bool]) -> ResidualMap:
    """The map with the correction of a layer's keys or values switched off where the list says false; the base stays."""

    def kept(right: torch.Tensor, on: list[bool]) -> torch.Tensor:  # (L, H, r, D)
        return right * torch.tensor(on, dtype=right.dtype, device=right.device)[:, None, None, None]

    return replace(
        cache_map, key_right=kept(cache_map.key_right, keys), value_right=kept(cache_map.value_right, values)
    )


def variants(cache_map: ResidualMap) -> dict[tuple[str, int], ResidualMap]:
    """(which, layer; -1 where none) -> the map, in the order of the table."""
    layers = range(cache_map.geometry.layers)
    on, off = [True] * len(layers), [False] * len(layers)
    found = {
        ("full", -1): cache_map,
        ("keys_only", -1): with_corrections(cache_map, on, off),
        ("values_only", -1): with_corrections(cache_map, off, on),
    }
    for which in ("off", "only"):
        for layer in layers:
            chosen = [(i == layer) == (which == "only") for i in layers]
            found[which, layer] = with_corrections(cache_map, chosen, chosen)
    return found


def variant_file(which: str, layer: int) -> str:
    """Where a variant's scores are kept."""
    return f"ablation-{which}.parquet" if layer < 0 else f"ablation-{which}-{layer:03d}.parquet"


def ablation_units(layers: int, prompts: int) -> float:
    """What the ablations cost, in training steps."""
    return (len(WHOLE) + 2 * layers) * prompts * SCORE_STEPS


def measure_ablation(scorer: Scorer, cache_map: ResidualMap, work: Path, progress: Progress) -> pd.DataFrame:
    """One row per variant and validation prompt (`COLUMNS`)."""
    tables = []
    for (which, layer), variant in variants(cache_map).items():
        table = kept_scores(
            work / variant_file(which, layer), range(scorer.prompts), lambda variant=variant: scorer.table(variant),
            progress, scorer.prompts * SCORE_STEPS, f"correction {which.replace('_', ' ')}{f', layer {layer}' if layer >= 0 else ''}",
        )  # fmt: skip
        tables.append(table.assign(which=which, layer=layer))
    return pd.concat(tables, ignore_index=True)[COLUMNS]


def summarise_ablation(table: pd.DataFrame, direct_kl32: float) -> dict:
    """Of ablation.parquet. direct_kl32: direct reuse's mean on the same prompts; shares are of direct − full."""
    whole = {which: summarise(table[table["which"] == which]) for which in WHOLE}
    full = whole["full"]["kl32"]
    gained = direct_kl32 - full

    def layers(which: str, change_name: str, change) -> list[dict]:
        means = table[table["which"] == which].groupby("layer")["kl32"].mean().sort_index()
        return [
            {"layer": int(layer), "kl32": float(kl), change_name: change(float(kl))}
            | _share(change(float(kl)), gained)
            for layer, kl in means.items()
        ]

    return {
        **whole,
        "off": layers("off", "change", lambda kl: kl - full),
        "only": layers("only", "gain", lambda kl: direct_kl32 - kl),
    }


def _share(change: float, gained: float) -> dict:
    if gained == 0:
        return {"share": None, "note": "the whole correction changes nothing, so there are no shares of it"}
    return {"share": change / gained}
