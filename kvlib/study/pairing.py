"""Stage 00: the text, its partitions, the two models, and the gate they must pass."""

import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import torch

from kvlib.errors import KvlibError
from kvlib.handoff import check_target
from kvlib.pair import Outline, check_alike, check_shapes, pair_fingerprint
from kvlib.pruning import prune_width
from kvlib.study.assets import fetch
from kvlib.study.corpus import (
    Article,
    build_word_tokenizer,
    generated_articles,
    load_articles,
    read_wikipedia_dump,
    save_articles,
)
from kvlib.study.decision import decision_rule_hash
from kvlib.study.describing import TEXTS, describe_corpus, describe_model, display_name, environment
from kvlib.study.device import device_of, training_dtype
from kvlib.study.documents import read_texts
from kvlib.study.gate import gates, held_out_nll, worst
from kvlib.study.models import (
    OneModel,
    cache_folder,
    load_pair_config,
    load_pair_model,
    load_pair_tokenizer,
    make_target,
    pin_revisions,
    save_folder,
)
from kvlib.study.partitions import Partitions
from kvlib.study.planning import PartitionRequest, plan_partitions
from kvlib.study.profile import (
    DatasetCorpus,
    HubModel,
    Profile,
    PrunedModel,
    RandomModel,
    WikipediaCorpus,
)
from kvlib.study.progress import Progress
from kvlib.study.records import read_json, read_record, write_json, write_table
from kvlib.study.run import Run, home

PRUNING_COST = ("seconds", "peak_bytes")


def run_pair(run: Run) -> dict:
    """Make or find text, partitions, target and source; check them; write `pair/summary.json`."""
    summary = run.finished("pair")
    if summary:
        return summary
    folder, profile, started = run.stage("pair"), run.profile, time.time()
    stale = folder / "key.json"
    if not stale.exists() or read_record(stale, "key")["key"] != run.key("pair"):
        _clear(folder)
        write_json(stale, {"key": run.key("pair")})
    progress = Progress("pair", 100)
    device_of(profile)  # that there is one, before anything is fetched
    revisions = pin_revisions(run)
    if isinstance(profile.pair.target, HubModel):
        check_lengths(run)  # before any text or weights are fetched for a model that could not read so far
    articles, tokenizer = corpus_of(run)
    progress.advance(4, "text read")
    make_target(run, tokenizer)
    progress.advance(6, "target ready")
    tokenizer = load_pair_tokenizer(run)
    check_lengths(run)  # before text is looked for that no model could read
    partitions = partitions_of(run, articles, tokenizer)
    pruning = make_source(run, partitions, tokenizer, progress, units=70)
    check_shapes(*(SimpleNamespace(config=load_pair_config(run, role)) for role in ("target", "source")))
    tokens = partitions.tokens("screen_validate", tokenizer)
    settings, models = profile.evaluation, OneModel(run)
    described, losses, outlines = {}, {}, {}
    for role in ("source", "target"):  # the target last: a longer way to go, and nothing needs it after
        model = models.get(role)
        outlines[role] = Outline(model)
        described[role] = describe_model(model, display_name(run, role))
        if role == "target":
            check_alike(outlines["target"], outlines["source"], tokenizer, load_pair_tokenizer(run, "source"))
            check_target(model)
            progress.advance(4, "models loaded and compared")
            passed = gates(
                model,
                tokens,
                settings.gate_prefix_tokens,
                profile.prompt.forced_steps,
                settings.gate_tolerance,
                progress,
            )
        losses[role] = held_out_nll(model, tokens)
        del model
    progress.advance(16, "gate and losses measured")
    summary = {
        **described,
        "revisions": {role: revisions[role] for role in ("target", "source")},
        "pruning": without_cost(pruning),
        "held_out_nll": {**losses, "tokens": int(tokens[:, 1:].numel())},
        "gate": worst(passed),
        "gates": passed,
        "decision_rule": decision_rule_hash(),
        "partitions": partitions.summary(),
        "corpus": describe_corpus(run, articles),
        "training_dtype": str(training_dtype(profile.training.dtype, device_of(profile))).removeprefix(
            "torch."
        ),
        "seed": profile.seed,
    }
    cost = {f"pruning_{key}": (pruning or {}).get(key) for key in PRUNING_COST}
    return run.publish("pair", summary, started, {**cost, "environment": environment(device_of(profile))})


def _clear(folder: Path) -> None:
    """Set aside an earlier pair made with other settings: renamed, not deleted, since it may have been hours of work."""
    if folder.exists() and any(p.name != "key.json" for p in folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"pair-before-{number}")).exists():
            number += 1
        os.replace(folder, aside)


def corpus_of(run: Run) -> tuple[list[Article], object]:
    """(articles, a tokenizer for a random target or None); cleaned text is kept as a `datasets` folder."""
    corpus, folder = run.profile.corpus, run.stage("pair") / "articles"
    if folder.exists():
        articles = load_articles(folder)
    else:
        if isinstance(corpus, WikipediaCorpus):
            articles = read_wikipedia_dump(fetch(corpus.asset, cache_folder()), corpus.min_characters)
        elif isinstance(corpus, DatasetCorpus):
            articles, read = read_texts(corpus, pin_revisions(run)["texts"], home())
            write_json(run.stage("pair") / TEXTS, read)
        else:
            articles = generated_articles(corpus.articles, corpus.sentences, run.profile.seed)
        save_articles(articles, folder)
    random_target = isinstance(run.profile.pair.target, RandomModel)
    return articles, build_word_tokenizer(articles) if random_target else None


def partitions_of(run: Run, articles: list[Article], tokenizer) -> Partitions:
    """Drawn once, listed in `partitions.json` before anything trains; later only checked against it."""
    path = run.stage("pair") / "partitions.json"
    if path.exists():
        return _listed(run, articles)
    partitions = plan_partitions(articles, partition_requests(run.profile), run.profile.seed, tokenizer)
    write_json(path, partitions.manifest())
    return partitions


def partition_requests(profile: Profile) -> dict[str, PartitionRequest]:
    """What is asked of `plan_partitions`, in the order in which the manifest lists it."""
    wanted, prompt = profile.partitions, profile.prompt
    unused = () if isinstance(profile.pair.source, PrunedModel) else ("build",)
    prompt_tokens = prompt.prefix_tokens + prompt.forced_steps
    longest = max(profile.latency.prefix_tokens)
    sizes = {
        "latency": ("prefixes", longest),
        "final": ("prompts", prompt_tokens),
        "build": ("windows", wanted.window_tokens),
        "screen_train": ("windows", wanted.window_tokens),
        "confirm_train": ("windows", wanted.window_tokens),
        "screen_validate": ("prompts", prompt_tokens),
        "confirm_validate": ("prompts", prompt_tokens),
    }
    parts = {name: (getattr(wanted, name), *size) for name, size in sizes.items()}
    return {
        name: PartitionRequest(kind, part.articles, part.items, tokens, part.text)
        for name, (part, kind, tokens) in parts.items()
        if name not in unused
    }


def without_cost(pruning: dict | None) -> dict | None:
    """What pruning kept, the same whenever it is run."""
    return pruning and {key: value for key, value in pruning.items() if key not in PRUNING_COST}


def load_partitions(run: Run) -> Partitions:
    """The run's partitions, every hash checked against the manifest and the articles."""
    return _listed(run, load_articles(run.stage("pair") / "articles"))


def _listed(run: Run, articles: list[Article]) -> Partitions:
    path = run.stage("pair") / "partitions.json"
    partitions = Partitions.from_manifest(read_json(path), articles)
    missing = partition_requests(run.profile).keys() - partitions.parts.keys()
    if missing:
        raise KvlibError(
            f"{path} lists no partition {min(missing)!r}, expected all of the profile's: delete {path.parent} and run its stage again"
        )
    return partitions


def recorded_fingerprint(summary: dict) -> str:
    """`ModelPair.fingerprint` of the run's pair, from the stage's summary: no model is loaded for it."""
    return pair_fingerprint(summary["source"]["fingerprint"], summary["target"]["fingerprint"])


def make_source(run: Run, partitions: Partitions, tokenizer, progress: Progress, units: float) -> dict | None:
    """Prune the target unless the source is there or on the hub; what pruning kept, or None."""
    wanted, folder = run.profile.pair.source, run.stage("pair") / "source"
    report_path = run.stage("pair") / "pruning.json"
    if isinstance(wanted, HubModel):
        progress.skip(units)
        return None
    if folder.exists() and report_path.exists():
        progress.skip(units)
        return read_record(
            report_path, "energy_kept", "body_parameters_kept", "head_error", "calibration_tokens", "seconds"
        )
    assert isinstance(wanted, PrunedModel)
    target = load_pair_model(run, "target", torch.float32)
    windows = partitions.tokens("build", tokenizer)
    before = progress.done

    def advance(done: int, total: int) -> None:
        progress.advance(before + units * done / total - progress.done, f"pruning, pass {done} of {total}")

    model, report = prune_width(
        target,
        windows,
        wanted.hidden_size,
        wanted.intermediate_size,
        penalty=wanted.penalty,
        progress=advance,
    )
    layers = [
        {
            "layer": entry.layer,
            "residual_error": entry.residual_error,
            "mlp_energy_kept": entry.mlp_energy_kept,
        }
        for entry in report.layers
    ]
    write_table(run.stage("pair") / "layers.parquet", pd.DataFrame(layers))
    record = {
        "energy_kept": report.energy_kept,
        "body_parameters_kept": report.body_parameters_kept,
        "head_error": report.head_error,
        "calibration_tokens": report.calibration_tokens,
        "seconds": round(report.seconds, 1),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    write_json(report_path, record)
    save_folder(folder, model, tokenizer)
    return record


def check_lengths(run: Run) -> None:
    """Raises KvlibError when the profile asks for more positions or a higher rank than the pair has."""
    profile = run.profile
    asked = {
        "prompt.prefix_tokens + prompt.forced_steps": profile.prompt.prefix_tokens
        + profile.prompt.forced_steps,
        "partitions.window_tokens": profile.partitions.window_tokens,
        "the longest of latency.prefix_tokens": max(profile.latency.prefix_tokens),
    }
    # A pruned source has the target's positions, and there is no configuration of it yet.
    roles = ("target", "source") if isinstance(profile.pair.source, HubModel) else ("target",)
    for role in roles:
        config = load_pair_config(run, role)
        limit = config.max_position_embeddings
        for what, count in asked.items():
            if count > limit:
                raise KvlibError(
                    f"{what} is {count}, the {role} has {limit} positions: lower it to {limit} at most"
                )
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if max(profile.screening.ranks) > head_dim:
            raise KvlibError(
                f"screening.ranks holds {max(profile.screening.ranks)}, expected at most head_dim = {head_dim}"
            )
