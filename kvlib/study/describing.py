"""What a run says of itself: its models, its text, the machine and the versions."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from kvlib.cache import Geometry
from kvlib.pair import fingerprint
from kvlib.study.assets import load_assets
from kvlib.study.corpus import Article
from kvlib.study.device import device_name
from kvlib.study.models import REVISIONS
from kvlib.study.profile import DatasetCorpus, HubModel, PrunedModel, RandomModel, WikipediaCorpus
from kvlib.study.records import read_record
from kvlib.study.run import Run

TEXTS = "texts.json"  # in the pair stage's folder: what was read of each text of a corpus that has several
PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "scipy",
    "pandas",
    "datasets",
    "safetensors",
    "papermill",
    "plotly",
    "jupyter-book",
)


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
    outside = {
        id(p): p.numel()
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        for p in part.parameters()
    }
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
    """Name, source and licence of the text and how much of it there is; where it has several, `texts` tells each."""
    corpus, texts = run.profile.corpus, []
    if isinstance(corpus, WikipediaCorpus):
        asset = load_assets()[corpus.asset]
        name, source, licence = corpus.asset, asset.source, asset.licence
    elif isinstance(corpus, DatasetCorpus):
        texts = _describe_texts(run, corpus)
        name = " and ".join(dict.fromkeys(text["name"] for text in texts))
        source = "; ".join(
            f"{text['name']}{', ' + text['config'] if text['config'] else ''}, split {text['split']}"
            for text in texts
        )
        licence = "; ".join(dict.fromkeys(text["licence"] for text in texts))
    else:
        name, source, licence = (
            "generated",
            "sentences of a small grammar, drawn from the seed",
            "none needed",
        )
    return {
        "name": name, "source": source, "licence": licence,
        "articles": len(articles), "characters": sum(len(a.text) for a in articles), "texts": texts,
    }  # fmt: skip


def _describe_texts(run: Run, corpus: DatasetCorpus) -> list[dict]:
    """Each text as the profile names it, with the commit it was read at, and how much was read and kept."""
    commits = read_record(run.stage("pair") / REVISIONS, "texts")["texts"]
    read = read_record(run.stage("pair") / TEXTS, *corpus.texts)
    return [
        {
            "text": name,
            "id": text.id,
            "name": Path(text.id).name if Path(text.id).is_absolute() else text.id,
            "config": text.config,
            "split": text.split,
            "revision": commits[name],
            "licence": text.licence,
            **read[name],
        }
        for name, text in corpus.texts.items()
    ]


def environment(device: torch.device | None = None) -> dict:
    """What ran this, for the colophon. device: where the models were; a card where there is one, when None."""
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
        "device": device_name(device or torch.device("cuda" if torch.cuda.is_available() else "cpu")),
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
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=20
        )
        state = subprocess.run(
            ["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+changes" if state.stdout.strip() else "")
