"""Score maps on stored prompts: KL32 and top-1 per prompt, in the models' own dtype."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import pandas as pd

from kvlib.cache import PrefixCache
from kvlib.divergence import Divergence, Reference, native_logits, path_divergence
from kvlib.maps import CacheMap
from kvlib.streaming import ahead
from kvlib.study.prompts import PromptStore
from kvlib.study.statistics import describe, paired


class Scorer:
    """Scores maps on one partition's prompts; the prompts are read into this machine's memory once.

    Args:
        store: filled prompts. target: the frozen target. articles: each prompt's. forcing: along which tokens.
    """

    def __init__(self, store: PromptStore, target, articles: list[str], forcing: str = "oracle"):
        self.target, self.articles = target, articles
        self.prompts, self.room = len(store.tokens), store.room
        self.device = next(target.parameters()).device
        self._batches = [
            (prefix, references[forcing]) for prefix, references in map(store.batch, store.starts)
        ]

    def stream(self) -> AbstractContextManager[Iterator[tuple[PrefixCache, Reference]]]:
        """The source's cache and native's reference of batch after batch, on the target's device."""
        return ahead(self._batches, lambda batch: batch, self.device)

    def divergences(self, maps: list[CacheMap]) -> list[Divergence]:
        """Of each map over all prompts, (N, S); native's logits are computed once for all, one batch at a time."""
        maps = [cache_map.to(self.device) for cache_map in maps]
        found: list[list[Divergence]] = []

        def score(prefix: PrefixCache, reference: Reference) -> list[Divergence]:
            native = native_logits(self.target, reference)
            return [
                path_divergence(self.target, prefix, cache_map, reference, check=False, native=native)
                for cache_map in maps
            ]

        with self.stream() as batches:
            for prefix, reference in batches:
                found += self.room.over(
                    prefix.batch,
                    lambda few, of=(prefix, reference): score(*(one.select(few) for one in of)),
                )
        return [Divergence.cat(list(kept)) for kept in zip(*found)]

    def table(self, cache_map: CacheMap) -> pd.DataFrame:
        """One row per prompt: prompt, kl32 (nats), top1 (share of steps)."""
        return self.tables([cache_map])[0]

    def tables(self, maps: list[CacheMap]) -> list[pd.DataFrame]:
        """As `table`, of several maps."""
        return [
            pd.DataFrame(
                {
                    "prompt": range(len(found.kl)),
                    "kl32": found.kl.double().mean(-1).tolist(),
                    "top1": found.agree.double().mean(-1).tolist(),
                }
            )
            for found in self.divergences(maps)
        ]


def against(table: pd.DataFrame, direct: pd.DataFrame, articles: list[str], seed: int) -> dict:
    """Paired differences from direct reuse over the prompts of one partition; `articles` of each prompt."""
    differences = table["kl32"] - direct["kl32"]
    return paired(differences.tolist(), articles, baseline=direct["kl32"].tolist(), seed=seed)


def summarise(table: pd.DataFrame) -> dict:
    """kl32, se, median_kl32 and top1 over prompts."""
    kl = describe(table["kl32"])
    return {
        "kl32": kl["mean"],
        "se": kl["se"],
        "median_kl32": kl["median"],
        "top1": float(np.mean(table["top1"])),
    }
