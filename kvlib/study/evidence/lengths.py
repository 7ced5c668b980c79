"""The frozen maps at other prefix lengths: prompts cut from the final articles, scored a few at a time, each part kept."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from kvlib.cache import PrefixCache, prefill
from kvlib.divergence import Divergence, oracle_reference, path_divergence
from kvlib.maps import CacheMap
from kvlib.room import Room
from kvlib.study.device import device_of
from kvlib.study.evidence.keeping import kept_scores
from kvlib.study.lowering import room
from kvlib.study.models import OneModel
from kvlib.study.partitions import content_tokens, encode
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_tensors, write_tensors
from kvlib.study.run import Run
from kvlib.study.statistics import describe, paired

PATHS = ("direct", "ridge", "learned")
TEXT_CHARACTERS = 200  # of a prompt's end, kept for people to read
TOKENS_AT_ONCE = 4096  # prefix positions in one batch: bounds the memory at every length
COLUMNS = ["prefix_tokens", "path", "prompt", "article", "kl32", "top1", "text"]


def length_units(prefix_tokens: int) -> float:
    """What one prompt costs, in training steps: two prefills, the oracle's decoding and three paths; on two cores."""
    thousands = prefix_tokens / 1024
    return thousands * (5 + 0.6 * thousands) + 1.2


def length_prompts(
    articles: list[tuple[str, list[int]]],
    tokenizer: PreTrainedTokenizerBase,
    prefix_tokens: int,
    count: int,
    seed: int,
) -> tuple[torch.Tensor, list[str]]:
    """(token ids (N, prefix_tokens), the article of each), N <= count: fewer where the articles have no room for more.

    Args:
        articles: title and token ids of each. seed: draws which of an article's spans come first.

    Spans of an article lie side by side; articles take turns, so that any first part is spread over them.
    """
    content, bos = content_tokens(tokenizer, prefix_tokens)
    slots = []
    for title, ids in articles:
        starts = list(range(0, len(ids) - content + 1, content))
        random.Random(f"{seed}/evidence/{prefix_tokens}/{title}").shuffle(starts)
        slots.append([(title, bos + ids[start : start + content]) for start in starts])
    drawn = [slot for turn in zip_longest(*slots) for slot in turn if slot is not None][:count]
    ids = torch.tensor([ids for _, ids in drawn], dtype=torch.int64).reshape(len(drawn), prefix_tokens)
    return ids, [title for title, _ in drawn]


@dataclass(frozen=True)
class LengthPart:
    """Prompts of one length that go through the models together: ids (B, T), and the article of each.

    start: the first one's number, of the `drawn` prompts of this length. file: where their scores are kept.
    """

    prefix_tokens: int
    start: int
    drawn: int
    tokens: torch.Tensor
    articles: list[str]
    file: str

    @property
    def source_file(self) -> str:
        """Where the source's caches wait for the target."""
        return f"source-{Path(self.file).stem}.safetensors"

    @property
    def prompts(self) -> range:
        return range(self.start, self.start + len(self.tokens))

    def described(self, scores: pd.DataFrame, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
        """The scores with the length, and each prompt's article and end (`COLUMNS`)."""
        rows = [prompt - self.start for prompt in scores["prompt"]]
        table = scores.assign(
            prefix_tokens=self.prefix_tokens,
            article=[self.articles[row] for row in rows],
            text=[tokenizer.decode(self.tokens[row].tolist())[-TEXT_CHARACTERS:] for row in rows],
        )
        return table[COLUMNS]


def length_parts(run: Run, articles: list, tokenizer: PreTrainedTokenizerBase) -> Iterator[LengthPart]:
    """The prompts of every length, in the order in which they are measured. articles: with `title` and `text`."""
    settings, steps = run.profile.evidence, run.profile.prompt.forced_steps
    encoded = [(article.title, encode(tokenizer, article.text)[0]) for article in articles]
    for length, wanted in zip(settings.prefix_tokens, settings.prompts):
        tokens, titles = length_prompts(encoded, tokenizer, length, wanted, run.profile.seed)
        size = min(run.profile.evaluation.batch_prompts, max(1, TOKENS_AT_ONCE // length))
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            file = f"length-{length:05d}-{start:04d}-{hash_json([part.tolist(), steps])[:10]}.parquet"
            yield LengthPart(length, start, len(tokens), part, titles[start : start + size], file)


def measure_lengths(
    run: Run, articles: list, tokenizer, maps: dict[str, CacheMap], work: Path, progress: Progress
) -> pd.DataFrame:
    """One row per length, path and prompt (`COLUMNS`); models are loaded only where scores are missing.

    At every length one model passes over all prompts before the other is loaded; the source's caches wait on the disk.

    Args:
        articles: of the final partition, with `title` and `text`. maps: one for each of `PATHS`. work: for what is kept.
    """
    steps, models, tables = run.profile.prompt.forced_steps, OneModel(run), []
    maps = {name: cache_map.to(device_of(run.profile)) for name, cache_map in maps.items()}
    parts, settings = list(length_parts(run, articles, tokenizer)), run.profile.evidence
    asked = sum(n * length_units(length) for length, n in zip(settings.prefix_tokens, settings.prompts))
    progress.skip(asked - sum(len(part.tokens) * length_units(part.prefix_tokens) for part in parts))
    for length, group in groupby(parts, lambda part: part.prefix_tokens):
        group = list(group)
        fits = room(
            run.stage("evidence"), f"prompts of {length} tokens", f"prompts of {length} tokens", len(group[0].tokens),
            "leave this length out of evidence.prefix_tokens, or take a device with more memory", progress,
        )  # fmt: skip
        for part in group:
            if not (work / part.file).exists() and not (work / part.source_file).exists():
                keep_source(models.get("source"), part, work, fits)
        for part in group:
            scores = kept_scores(
                work / part.file, part.prompts,
                lambda part=part, fits=fits: score_batch(
                    models.get("target"), work / part.source_file, part.tokens, steps, maps, part.start, fits
                ),
                progress, len(part.tokens) * length_units(length),
                f"{length} tokens, prompt {part.prompts.stop} of {part.drawn}", PATHS,
            )  # fmt: skip
            (work / part.source_file).unlink(missing_ok=True)
            tables.append(part.described(scores, tokenizer))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


@torch.no_grad()
def keep_source(source, part: LengthPart, work: Path, fits: Room) -> None:
    """Write the source's caches of a part's prompts."""
    ids = part.tokens.to(next(source.parameters()).device)
    found = fits.over(len(ids), lambda few: prefill(source, ids[few, :-1]).to("cpu"))
    tensors = {
        name: torch.cat([torch.stack(getattr(cache, name)) for cache in found], 1)
        for name in ("keys", "values")
    }
    write_tensors(work / part.source_file, tensors)


@torch.no_grad()
def score_batch(
    target, source_file: Path, prompts: torch.Tensor, steps: int, maps: dict[str, CacheMap], start: int, fits: Room
) -> pd.DataFrame:  # fmt: skip
    """Path by path along native's greedy tokens: path, prompt, kl32, top1. prompts: (B, T); the first has number `start`."""
    device, tensors = next(target.parameters()).device, read_tensors(source_file)[0]

    def measure(few: slice) -> dict[str, Divergence]:
        prefix = PrefixCache(*([layer[few] for layer in tensors[name]] for name in ("keys", "values")))
        prefix = prefix.to(device)
        reference = oracle_reference(target, prompts[few].to(device), steps)
        return {name: path_divergence(target, prefix, maps[name], reference) for name in PATHS}

    parts = fits.over(len(prompts), measure)
    frames = []
    for name in PATHS:
        found = Divergence.cat([part[name] for part in parts])
        frames.append(
            pd.DataFrame(
                {
                    "path": name,
                    "prompt": range(start, start + len(prompts)),
                    "kl32": found.kl.double().mean(-1).tolist(),
                    "top1": found.agree.double().mean(-1).tolist(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def summarise_lengths(table: pd.DataFrame, prefix_tokens: list[int], seed: int) -> list[dict]:
    """An entry for each of `prefix_tokens`, from lengths.parquet; nulls and a note where there are too few prompts."""
    return [_summarise_length(table[table["prefix_tokens"] == n], n, seed) for n in prefix_tokens]


def _summarise_length(table: pd.DataFrame, prefix_tokens: int, seed: int) -> dict:
    by_path = {name: table[table["path"] == name].sort_values("prompt") for name in PATHS}
    paths = {}
    for name, rows in by_path.items():
        found = describe(rows["kl32"].tolist())
        found.pop("n")
        paths[name] = {"kl32": found, "top1": float(rows["top1"].mean()) if len(rows) else None}
    direct = by_path["direct"]["kl32"].to_numpy(dtype=float)
    clusters = by_path["direct"]["article"].tolist()
    return {
        "prefix_tokens": prefix_tokens,
        "prompts": len(direct),
        "articles": len(set(clusters)),
        "paths": paths,
        "paired": {
            f"{name}-direct": paired(
                by_path[name]["kl32"].to_numpy(dtype=float) - direct, clusters, seed=seed, baseline=direct
            )
            for name in ("learned", "ridge")
        },
    }
