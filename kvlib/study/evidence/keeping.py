"""Scores that are computed once: a run that goes on finds them, and only those of the right prompts."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from kvlib.errors import KvlibError
from kvlib.study.progress import Progress
from kvlib.study.records import read_table, write_table


def kept_scores(
    path: Path,
    prompts: Iterable[int],
    make: Callable[[], pd.DataFrame],
    progress: Progress,
    units: float,
    note: str,
    paths: Iterable[str] = (),
) -> pd.DataFrame:
    """The table at `path`, made by `make` unless it is there.

    Args:
        prompts: the numbers that its column `prompt` must hold, in this order (for each of `paths`, where there is a column
            `path`). units: what it counts on `progress`.

    Raises: KvlibError for a table of other prompts.
    """
    wanted = list(prompts)
    if not path.exists():
        write_table(path, make())
        progress.advance(units, note)
    else:
        progress.skip(units)
    return read_scores(path, wanted, paths)


def read_scores(path: Path, prompts: Iterable[int], paths: Iterable[str] = ()) -> pd.DataFrame:
    """The table at `path`, after it was found to hold one finished score per prompt (of each path, where there are some)."""
    wanted, table = list(prompts), read_table(path)
    columns = {"prompt", "kl32", "top1"} | ({"path"} if paths else set())
    rows = [(name, prompt) for name in paths for prompt in wanted] if paths else wanted
    whole = columns <= set(table.columns)
    if whole:
        found = list(zip(table["path"], table["prompt"])) if paths else table["prompt"].tolist()
        whole = found == rows and bool(table[["kl32", "top1"]].notna().all(axis=None))
    if not whole:
        raise KvlibError(
            f"{path} does not hold the scores of its {len(wanted)} prompts: delete it and run the stage again"
        )
    return table
