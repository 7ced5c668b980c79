"""The summaries of screening and confirmation, every figure of them a function of tables and training records."""

import pandas as pd

from kvlib.study.arms import Arm, chosen_arms, slices
from kvlib.study.profile import Screening
from kvlib.study.scoring import against, summarise
from kvlib.study.selection import (
    by_kl32,
    choose_settings,
    freeze,
    mean_kl32,
    median_seed,
    places,
    rank_arms,
    why_frozen,
)
from kvlib.study.statistics import with_holm

BASELINES = ("direct", "ridge")
Cell = tuple[str, int, float]  # arm, checkpoint step, residual scale


def arm_record(arm: Arm, trained: dict, table: pd.DataFrame | None) -> dict:
    """An arm, how its training ended (its time left out) and its validation figures, null where it did not finish."""
    trained = {key: value for key, value in trained.items() if key != "seconds"}
    record = {**arm.record(), **trained, "kl32": None, "se": None, "median_kl32": None, "top1": None}
    return record | (summarise(table) if trained["status"] == "finished" else {})


def selected_arms(records: list[dict], settings: Screening) -> list[str]:
    """The arms whose checkpoints and scales are looked at."""
    return rank_arms(records)[: settings.select]


def summarise_screening(
    records: list[dict],
    tables: dict[str, pd.DataFrame],
    cells: dict[Cell, pd.DataFrame],
    articles: list[str],
    settings: Screening,
    seed: int,
) -> dict:
    """ "arms", "direct", "ridge", "slices", "selected", "grid", "chosen", "places" and "finalists" of the summary.

    Args:
        records: of `arm_record`. tables: prompt, kl32, top1 of both baselines and of every finished arm.
        cells: the same of every checkpoint and scale of the selected arms. articles: of each validation prompt.
    """
    order, compared = rank_arms(records), against_direct(tables, articles, seed)
    arms = [
        record
        | {
            "order": order.index(record["id"]) + 1 if record["id"] in order else None,
            "against_direct": compared.get(record["id"]),
        }
        for record in records
    ]
    grid = [
        {"arm": name, "checkpoint_step": step, "scale": scale, **summarise(table)}
        for (name, step, scale), table in cells.items()
    ]
    best = choose_settings(grid)
    parameters = {record["id"]: record["parameters"] for record in records}
    candidates = [
        {
            "id": arm.id,
            "kl32": best[arm.id]["kl32"],
            "parameters": parameters[arm.id],
            "absorbable": arm.absorbable,
        }
        for arm in chosen_arms(settings)
        if arm.id in best
    ]
    scores = {
        name: cells[name, setting["checkpoint_step"], setting["scale"]]["kl32"].tolist()
        for name, setting in best.items()
    }
    filled = places(candidates, scores, settings.finalists)
    return {
        "arms": arms,
        **{name: summarise(tables[name]) for name in BASELINES},
        "slices": _axes(settings, {record["id"] for record in records}),
        "selected": selected_arms(records, settings),
        "grid": grid,
        "chosen": by_kl32(best, parameters, settings.select),
        "places": filled,
        "finalists": [place["arm"] for place in filled],
    }


def against_direct(tables: dict[str, pd.DataFrame], articles: list[str], seed: int) -> dict[str, dict]:
    """Every scored map against direct reuse, p-values corrected over all of them."""
    return with_holm(
        {
            name: against(table, tables["direct"], articles, seed)
            for name, table in tables.items()
            if name != "direct"
        }
    )


def _axes(settings: Screening, present: set[str]) -> dict[str, dict[str, list[str]]]:
    return {
        axis.removesuffix("_steps"): {
            base: [arm.id for arm in members if arm.id in present] for base, members in by_base.items()
        }
        for axis, by_base in slices(settings).items()
    }


def seed_table(arm: str, seed: int) -> str:
    """What `confirmation/validation.parquet` calls the rows of an arm trained with one seed."""
    return f"{arm} seed {seed}"


def confirmed_arm(
    arm: Arm, setting: dict, trained: dict[int, dict], tables: dict[str, pd.DataFrame], parameters: int
) -> dict:
    """An arm's entry in the confirmation's summary: each of its seeds, their mean and the median one.

    Args:
        setting: its entry in the screen's "chosen". trained: how each seed's training ended, by seed.
        tables: by `seed_table`.
    """
    name, runs = arm.id, []
    for seed, record in trained.items():
        entry = {"seed": seed, "status": record["status"], "kl32": None, "se": None, "top1": None}
        if record["status"] == "finished":
            entry |= summarise(tables[seed_table(name, seed)])
        runs.append(entry)
    whole = all(entry["status"] == "finished" for entry in runs)
    return {
        "id": name,
        "checkpoint_step": setting["checkpoint_step"],
        "scale": setting["scale"],
        "parameters": parameters,
        "absorbable": arm.absorbable,
        "runs": runs,
        "mean_kl32": mean_kl32({"runs": runs}) if whole else None,
        "median_seed": median_seed(runs) if whole else None,
    }


def frozen_arm(arms: list[dict]) -> dict:
    """The arm, seed and settings that the rule takes from the confirmed arms, and why, in words."""
    name, seed = freeze(arms)
    record = next(entry for entry in arms if entry["id"] == name)
    return {
        "arm": name,
        "seed": seed,
        "checkpoint_step": record["checkpoint_step"],
        "scale": record["scale"],
        "parameters": record["parameters"],
        "why": why_frozen(arms, name, seed),
    }
