"""What the report works out from the raw tables beside the summaries: paired top-1, the paired first step, first tokens."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvlib.report.palette import PATHS
from kvlib.study.records import read_table
from kvlib.study.statistics import normal_interval, paired

# The bootstrap's draws; any number serves, as long as a book that is built again says the same.
SEED = 0
TIMED = ("direct", "ridge", "learned")


@dataclass(frozen=True)
class RawTables:
    """A run's raw tables as far as the front page works figures out from them."""

    prompts: pd.DataFrame
    steps: pd.DataFrame
    latency: pd.DataFrame


def read_raw_tables(run_folder: Path) -> RawTables:
    folder = Path(run_folder)
    return RawTables(
        read_table(folder / "frozen_evaluation" / "prompts.parquet"),
        read_table(folder / "frozen_evaluation" / "steps.parquet"),
        read_table(folder / "latency" / "raw.parquet"),
    )


def paired_top1(prompts: pd.DataFrame, forcing: str, path: str = "learned") -> dict:
    """A path's share of agreeing steps minus direct reuse's, prompt by prompt; more is better, errors by article too.

    Args:
        prompts: `frozen_evaluation/prompts.parquet`.
    """
    rows = prompts[prompts["forcing"] == forcing]
    wide = rows.pivot(index="prompt", columns="path", values="top1").sort_index()
    return _compared(wide[path] - wide["direct"], rows, lower_is_better=False)


def paired_first_step(
    steps: pd.DataFrame, prompts: pd.DataFrame, forcing: str, path: str = "learned"
) -> dict:
    """A path's KL at the first forced step minus direct reuse's, prompt by prompt (nats); less is better.

    Args:
        steps, prompts: `frozen_evaluation/steps.parquet` and `prompts.parquet`, of which the articles.
    """
    first = steps[(steps["forcing"] == forcing) & (steps["step"] == 1)]
    wide = first.pivot(index="prompt", columns="path", values="kl").sort_index()
    return _compared(
        wide[path] - wide["direct"], prompts[prompts["forcing"] == forcing], lower_is_better=True
    )


def _compared(differences: pd.Series, rows: pd.DataFrame, *, lower_is_better: bool) -> dict:
    article = rows.drop_duplicates("prompt").set_index("prompt")["article"]
    articles = [article[prompt] for prompt in differences.index]
    return paired(differences.tolist(), articles, lower_is_better=lower_is_better, seed=SEED)


def clustered_interval(found: dict) -> list[float] | None:
    """The normal 95 % interval with the standard error clustered by article."""
    error = found.get("se_clustered")
    return None if error is None or found["mean"] is None else normal_interval(found["mean"], error)


def side(found: dict) -> int | None:
    """−1 or 1 where both intervals, plain and clustered, lie on that side of zero; 0 where one holds zero; None without any."""
    intervals = [i for i in (found.get("ci95"), clustered_interval(found)) if i]
    if not intervals:
        return None
    sides = {-1 if high < 0 else 1 if low > 0 else 0 for low, high in intervals}
    return sides.pop() if len(sides) == 1 else 0


def first_tokens(raw: pd.DataFrame) -> pd.DataFrame:
    """How often a timed path's first token is native's: "prefix_tokens", "path", "agree", "prompts".

    Counted by prompt, not by repetition, with the source's cache resident; only where native was timed on that prompt.

    Args:
        raw: `latency/raw.parquet`.
    """
    resident = raw[raw["residency"] == "resident"].drop_duplicates(["prefix_tokens", "path", "prompt"])
    token = resident.set_index(["prefix_tokens", "prompt"])
    native = token.loc[token["path"] == "native", "token"]
    rows = []
    for path in (path for path in PATHS if path in TIMED):
        own = token.loc[token["path"] == path, "token"]
        both = pd.concat([own, native], axis=1, keys=["own", "native"], join="inner")
        for tokens, group in both.groupby(level="prefix_tokens"):
            agree = int((group["own"] == group["native"]).sum())
            rows.append({"prefix_tokens": int(tokens), "path": path, "agree": agree, "prompts": len(group)})
    return pd.DataFrame(rows, columns=["prefix_tokens", "path", "agree", "prompts"])
