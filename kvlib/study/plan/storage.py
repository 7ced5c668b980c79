"""What a run downloads, and what each stage keeps in its folder on disk, in bytes."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from kvlib.study.assets import load_assets
from kvlib.study.hub import INDEX, SINGLE, shards
from kvlib.study.models import cache_folder, on_hub
from kvlib.study.plan.bench import Bench
from kvlib.study.plan.shapes import SHAPES_FILE, SIZES
from kvlib.study.profile import Profile

FLOAT32 = SIZES["float32"]
TOKEN = 8  # bytes of a token id
CHARACTERS = 5  # per token of English, markup and hashes included


@dataclass(frozen=True)
class Download:
    """name: a package with its version, or an id on the hub. here: whether this machine has it already."""

    name: str
    bytes: int
    here: bool = False


def downloads(bench: Bench) -> list[Download]:
    """What the profile's models and texts are. A text of unstated size is left out."""
    found = []
    for role in ("target", "source"):
        model, shape = getattr(bench.profile.pair, role), getattr(bench, role)
        if on_hub(model):
            size = shape.weight_bytes(shape.stored)
            found.append(Download(model.id, size, is_cached(model.id, model.revision)))
        elif model.kind == "gguf":
            found += _asset(model.asset)
    return found + _texts(bench.profile)


def _asset(name: str) -> list[Download]:
    asset = load_assets().get(name)
    if asset is None:
        return []
    here = (cache_folder() / asset.file).exists()
    return [Download(f"{asset.package} {asset.version}", asset.wheel_bytes, here)]


def _texts(profile: Profile) -> list[Download]:
    """By the corpus's asset, or by the data sets that it names anywhere: their sizes are in data/shapes.yaml."""
    if hasattr(profile.corpus, "asset"):
        return _asset(profile.corpus.asset)
    stated = yaml.safe_load(SHAPES_FILE.read_text("utf-8"))["texts"]
    named = set(_strings(profile.corpus.model_dump()))
    return [Download(name, entry["bytes"]) for name, entry in stated.items() if name in named]


def _strings(value) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in _strings(each)]
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _strings(each)]
    return [value] if isinstance(value, str) else []


def is_cached(name: str, revision: str | None) -> bool:
    """Whether every weight file of a hub model is in this machine's hub cache."""
    from huggingface_hub import try_to_load_from_cache

    def at(file: str) -> str | None:
        found = try_to_load_from_cache(name, file, revision=revision)
        return found if isinstance(found, str) else None

    index = at(INDEX)
    if index is None:
        return at(SINGLE) is not None
    return all(at(file) for file in shards(Path(index)))


def windows_bytes(bench: Bench, windows: int) -> int:
    """Of `kvlib.study.store.WindowStore`: both models' caches, and the target's final hidden states in float32."""
    tokens, settings = bench.profile.partitions.window_tokens, bench.profile.training
    cache = bench.target.cache_bytes(windows, tokens, settings.cache_dtype)
    return 2 * cache + windows * tokens * bench.target.hidden * FLOAT32


def prompts_bytes(bench: Bench, prompts: int, forcings: int) -> int:
    """Of `kvlib.study.store.PromptStore`: the source's caches; per forcing two tokens and a hidden state for each step."""
    dtype, steps = bench.profile.pair.dtype, bench.profile.prompt.forced_steps
    reference = prompts * steps * (2 * TOKEN + bench.target.hidden * SIZES[dtype])
    return bench.target.cache_bytes(prompts, bench.cached, dtype) + forcings * reference


def ridge_bytes(bench: Bench) -> int:
    """Of a ridge map's file: a matrix and a bias of each head, for keys and for values."""
    dim = bench.target.head_dim
    return 2 * bench.target.layers * bench.target.kv_heads * (dim * dim + dim) * FLOAT32


def checkpoint_bytes(bench: Bench, arm) -> int:
    """Of a learned map's file: weights, σ, and the ridge map where that is its base."""
    heads = 2 * bench.target.layers * bench.target.kv_heads
    return (bench.parameters(arm) + heads) * FLOAT32 + (ridge_bytes(bench) if arm.base == "ridge" else 0)


def kept(bench: Bench) -> dict[str, int]:
    """Stage -> bytes in its folder when it is done; tables and records, a few MB, are left out."""
    profile, settings = bench.profile, bench.profile.screening
    wanted = profile.partitions
    made = [role for role in ("target", "source") if getattr(profile.pair, role).kind != "hub"]
    models = sum(getattr(bench, role).weight_bytes("float32") for role in made)
    arms = sum(checkpoint_bytes(bench, arm) for arm in bench.arms)
    checkpoints = len({*settings.checkpoints, profile.training.steps})
    largest = max(checkpoint_bytes(bench, arm) for arm in bench.arms)
    runs = settings.finalists * len(profile.confirmation.seeds) + 1
    late = max(settings.checkpoints)
    confirmed = len({step for step in settings.checkpoints if step <= late} | {late})
    stores = {
        stage: windows_bytes(bench, getattr(wanted, f"{name}_train").items)
        + prompts_bytes(bench, getattr(wanted, f"{name}_validate").items, 1)
        + ridge_bytes(bench)
        for stage, name in (("screening", "screen"), ("confirmation", "confirm"))
    }
    return {
        "pair": models + _text_bytes(profile),
        "screening": stores["screening"] + checkpoints * arms,
        "confirmation": stores["confirmation"]
        + runs * confirmed * largest
        + 2 * largest
        + ridge_bytes(bench),
        "frozen_evaluation": prompts_bytes(bench, wanted.final.items, len(profile.evaluation.forcings)),
        "latency": 0,
    }


def _text_bytes(profile: Profile) -> int:
    """The articles that partitions are drawn from: at least the tokens that these ask for, about."""
    wanted, prompt = profile.partitions, profile.prompt
    prompts = sum(getattr(wanted, name).items for name in ("screen_validate", "confirm_validate", "final"))
    windows = sum(getattr(wanted, name).items for name in ("screen_train", "confirm_train"))
    tokens = prompts * (prompt.prefix_tokens + prompt.forced_steps) + windows * wanted.window_tokens
    return CHARACTERS * (tokens + wanted.latency.items * max(profile.latency.prefix_tokens))
