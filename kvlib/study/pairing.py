"""Stage 00: the text, its partitions, the two models, and the gate they must pass."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import time
from pathlib import Path

import pandas as pd
import torch

from kvlib.cache import Geometry, prefill
from kvlib.divergence import text_reference
from kvlib.errors import KvlibError
from kvlib.handoff import handoff
from kvlib.maps import DirectMap
from kvlib.pair import check_compatible, fingerprint
from kvlib.pruning import prune_width
from kvlib.study.assets import fetch, load_assets
from kvlib.study.corpus import (
    Article,
    build_word_tokenizer,
    generated_articles,
    load_articles,
    read_wikipedia_dump,
    save_articles,
)
from kvlib.study.models import cache_folder, load_pair_model, load_pair_tokenizer, make_target, save_folder
from kvlib.study.partitions import Partitions
from kvlib.study.planning import PartitionRequest, plan_partitions
from kvlib.study.profile import HubModel, PrunedModel, RandomModel, WikipediaCorpus
from kvlib.study.progress import Progress
from kvlib.study.records import read_json, write_json, write_table
from kvlib.study.run import Run, training_dtype

PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "datasets", "safetensors", "papermill", "plotly", "jupyter-book")
MODES = ("materialised", "in_place", "absorbed")


def run_pair(run: Run) -> dict:
    """Make or find text, partitions, target and source; check them; write `pair/summary.json`."""
    summary = run.finished("pair")
    if summary:
        return summary
    folder, profile, started = run.stage("pair"), run.profile, time.time()
    stale = folder / "key.json"
    if not stale.exists() or read_json(stale)["key"] != run.key("pair"):
        _clear(folder)
        write_json(stale, {"key": run.key("pair")})
    progress = Progress("pair", 100)
    articles, tokenizer = corpus_of(run)
    progress.advance(4, "text read")
    make_target(run, tokenizer)
    progress.advance(6, "target ready")
    tokenizer = load_pair_tokenizer(run)
    partitions = partitions_of(run, articles, tokenizer)
    pruning = make_source(run, partitions, tokenizer, progress, units=70)
    target, source = load_pair_model(run, "target"), load_pair_model(run, "source")
    check_compatible(target, source, tokenizer, tokenizer)
    check_lengths(run, target)
    progress.advance(4, "models loaded and compared")
    tokens = partitions.tokens("screen_validate", tokenizer)
    gates = [gate(target, tokens, count, profile.evaluation.gate_tolerance) for count in profile.evaluation.gate_prefix_tokens]
    worst = max(gates, key=lambda g: max(g["max_abs_difference"].values()))
    losses = {role: held_out_nll(model, tokens) for role, model in (("target", target), ("source", source))}
    progress.advance(16, "gate and losses measured")
    described = {role: describe_model(model, display_name(run, role)) for role, model in (("target", target), ("source", source))}
    summary = {
        **described,
        "pruning": pruning,
        "held_out_nll": {**losses, "tokens": int(tokens[:, 1:].numel())},
        "gate": worst,
        "gates": gates,
        "partitions": partitions.summary(),
        "corpus": describe_corpus(run, articles),
        "environment": environment(),
        "training_dtype": str(training_dtype(profile.training.dtype)).removeprefix("torch."),
        "seed": profile.seed,
    }
    return run.publish("pair", summary, started)


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
        else:
            articles = generated_articles(corpus.articles, corpus.sentences, run.profile.seed)
        save_articles(articles, folder)
    random_target = isinstance(run.profile.pair.target, RandomModel)
    return articles, build_word_tokenizer(articles) if random_target else None


def partitions_of(run: Run, articles: list[Article], tokenizer) -> Partitions:
    """Drawn once, listed in `partitions.json` before anything trains; later only checked against it."""
    path = run.stage("pair") / "partitions.json"
    if path.exists():
        return Partitions.from_manifest(read_json(path), articles)
    wanted, prompt = run.profile.partitions, run.profile.prompt
    prompt_tokens = prompt.prefix_tokens + prompt.forced_steps
    longest = max(run.profile.latency.prefix_tokens)
    sizes = {
        "latency": ("prefixes", longest),
        "final": ("prompts", prompt_tokens),
        "build": ("windows", wanted.window_tokens),
        "screen_train": ("windows", wanted.window_tokens),
        "confirm_train": ("windows", wanted.window_tokens),
        "screen_validate": ("prompts", prompt_tokens),
        "confirm_validate": ("prompts", prompt_tokens),
    }
    requests = {
        name: PartitionRequest(kind, getattr(wanted, name).articles, getattr(wanted, name).items, tokens)
        for name, (kind, tokens) in sizes.items()
    }
    partitions = plan_partitions(articles, requests, run.profile.seed, tokenizer)
    write_json(path, partitions.manifest())
    return partitions


def load_partitions(run: Run) -> Partitions:
    """The run's partitions, every hash checked against the manifest and the articles."""
    return Partitions.from_manifest(read_json(run.stage("pair") / "partitions.json"), load_articles(run.stage("pair") / "articles"))


def make_source(run: Run, partitions: Partitions, tokenizer, progress: Progress, units: float) -> dict | None:
    """Prune the target unless the source is there or on the hub; what pruning kept, or None."""
    wanted, folder = run.profile.pair.source, run.stage("pair") / "source"
    report_path = run.stage("pair") / "pruning.json"
    if isinstance(wanted, HubModel):
        progress.skip(units)
        return None
    if folder.exists() and report_path.exists():
        progress.skip(units)
        return read_json(report_path)
    assert isinstance(wanted, PrunedModel)
    target = load_pair_model(run, "target", torch.float32)
    windows = partitions.tokens("build", tokenizer)
    before = progress.done

    def advance(done: int, total: int) -> None:
        progress.advance(before + units * done / total - progress.done, f"pruning, pass {done} of {total}")

    model, report = prune_width(target, windows, wanted.hidden_size, wanted.intermediate_size, penalty=wanted.penalty, progress=advance)
    layers = [
        {"layer": entry.layer, "residual_error": entry.residual_error, "mlp_energy_kept": entry.mlp_energy_kept} for entry in report.layers
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


def check_lengths(run: Run, target) -> None:
    """Raises KvlibError when the profile asks for more positions or a higher rank than the pair has."""
    profile, limit = run.profile, target.config.max_position_embeddings
    asked = {
        "prompt.prefix_tokens + prompt.forced_steps": profile.prompt.prefix_tokens + profile.prompt.forced_steps,
        "partitions.window_tokens": profile.partitions.window_tokens,
        "the longest of latency.prefix_tokens": max(profile.latency.prefix_tokens),
    }
    for what, count in asked.items():
        if count > limit:
            raise KvlibError(f"{what} is {count}, the model has {limit} positions: lower it to {limit} at most")
    head_dim = Geometry.of(target).head_dim
    if max(profile.screening.ranks) > head_dim:
        raise KvlibError(f"screening.ranks holds {max(profile.screening.ranks)}, expected at most head_dim = {head_dim}")


@torch.no_grad()
def gate(target, prompts: torch.Tensor, prefix_tokens: int, tolerance: float) -> dict:
    """The target's own cache, taken out and put back through every handoff mode, against native's logits.

    The last prefix token is held back and read with the rest of the prompt, as every path does.
    """
    prompts = prompts[:4]
    prefix_tokens = min(prefix_tokens, prompts.shape[1] - 1)
    head, tail = prompts[:, :prefix_tokens], prompts[:, prefix_tokens:]
    reference = text_reference(target, head, tail)
    native = target.get_output_embeddings()(reference.hidden)
    own = prefill(target, head[:, :-1])
    differences = {}
    for mode in MODES:
        with handoff(target, own.clone(), DirectMap(), mode) as active:
            differences[mode] = float((active.logits(reference.inputs) - native).abs().max())
    record = {
        "prefix_tokens": prefix_tokens,
        "max_abs_difference": differences,
        "logit_scale": float(native.abs().max()),
        "tolerance": tolerance,
        "passed": max(differences.values()) <= tolerance,
    }
    if not record["passed"]:
        raise KvlibError(
            f"the gate failed: the target's own cache handed back over {prefix_tokens} tokens moves its logits by "
            f"{max(differences.values()):.3g}, expected at most {tolerance:g}; no figure of this pair would mean anything: "
            "check dtype and attention of the target"
        )
    return record


@torch.no_grad()
def held_out_nll(model, prompts: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats per token, the first token of each prompt left out."""
    total = 0.0
    for start in range(0, len(prompts), 4):
        part = prompts[start : start + 4]
        reference = text_reference(model, part[:, :1], part[:, 1:])
        logits = model.get_output_embeddings()(reference.hidden).float()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / prompts[:, 1:].numel()


def display_name(run: Run, role: str) -> str:
    """What a reader knows the model by."""
    wanted = getattr(run.profile.pair, role)
    if isinstance(wanted, HubModel):
        return Path(wanted.id).name
    if isinstance(wanted, PrunedModel):
        return f"{display_name(run, 'target')} pruned to {wanted.hidden_size} x {wanted.intermediate_size}"
    if isinstance(wanted, RandomModel):
        return "tiny random Llama"
    return Path(load_assets()[wanted.asset].file).stem


def describe_model(model, name: str) -> dict:
    config, geometry = model.config, Geometry.of(model)
    parameters = sum(p.numel() for p in model.parameters())
    outside = {id(p): p.numel() for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()}
    return {
        "name": name,
        "fingerprint": fingerprint(model),
        "layers": geometry.layers,
        "query_heads": config.num_attention_heads,
        "kv_heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "parameters": parameters,
        "body_parameters": parameters - sum(outside.values()),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def describe_corpus(run: Run, articles: list[Article]) -> dict:
    corpus = run.profile.corpus
    if isinstance(corpus, WikipediaCorpus):
        asset = load_assets()[corpus.asset]
        name, source, licence = corpus.asset, asset.source, asset.licence
    else:
        name, source, licence = "generated", "sentences of a small grammar, drawn from the seed", "none needed"
    return {
        "name": name, "source": source, "licence": licence,
        "articles": len(articles), "characters": sum(len(a.text) for a in articles),
    }  # fmt: skip


def environment() -> dict:
    """What ran this, for the colophon."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(memory, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": commit(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The checkout's commit, with "+changes" when the working tree differs; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=20)
        state = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+changes" if state.stdout.strip() else "")
