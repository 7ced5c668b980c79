"""The models of a run: made once in the pair stage, loaded from its folder afterwards."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvlib.errors import KvlibError
from kvlib.load_errors import first_line, load_error
from kvlib.pair import load_model, load_tokenizer
from kvlib.study.assets import fetch
from kvlib.study.device import device_of
from kvlib.study.folders import check_folder, write_folder
from kvlib.study.headroom import check_memory
from kvlib.study.hub import check_files, commit_of, local_folder, snapshot
from kvlib.study.profile import DatasetCorpus, GgufModel, HubModel, Pair, RandomModel
from kvlib.study.records import read_record, write_json
from kvlib.study.run import Run, home

REVISIONS = "revisions.json"  # in the pair stage's folder
CACHE_VARIABLE = "KVLIB_CACHE"  # where assets are kept; .cache in the project's folder unless set


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path(__file__).resolve().parents[2] / ".cache")


def pin_revisions(run: Run) -> dict:
    """The commit of every hub id of the run, resolved once and kept: a branch that moves later cannot mix two models.

    Returns: {"target", "source", "texts" by name}, None for what is no hub id.
    """
    path = run.stage("pair") / REVISIONS
    if not path.exists():
        summary = run.finished("pair")  # lost, not new: the stage's summary has them too
        found = _recorded(summary) if summary else _resolved(run)
        write_json(path, found)
    return read_record(path, "target", "source", "texts")


def _recorded(summary: dict) -> dict:
    return {
        **summary["revisions"],
        "texts": {text["text"]: text["revision"] for text in summary["corpus"]["texts"]},
    }


def _resolved(run: Run) -> dict:
    pair, corpus = run.profile.pair, run.profile.corpus
    texts = corpus.texts if isinstance(corpus, DatasetCorpus) else {}
    found = {
        role: commit_of(model.id, model.revision) if on_hub(model) else None
        for role, model in (("target", pair.target), ("source", pair.source))
    }
    found["texts"] = {
        name: None if local_folder(text.id, home()) else commit_of(text.id, text.revision, "dataset")
        for name, text in texts.items()
    }
    return found


def fetch_models(pair: Pair, folder: Path, say: Callable[[str], None]) -> list[str]:
    """Download the pair's hub models where the cache lacks them, with the hub client's own bars; the ids, of both or none.

    Args:
        folder: of the run's pair stage, whose commits are taken where it has begun.
    """
    pinned = read_record(folder / REVISIONS) if (folder / REVISIONS).exists() else {}
    ids = []
    for role in ("target", "source"):
        model = getattr(pair, role)
        if on_hub(model):
            commit = pinned.get(role) or commit_of(model.id, model.revision)
            say(f"{role}: {model.id} at commit {commit[:12]}, in {snapshot(model.id, commit)}")
            ids.append(model.id)
    return ids


def on_hub(model) -> bool:
    """Whether a profile's model is a hub id, and no folder."""
    return isinstance(model, HubModel) and local_folder(model.id, home()) is None


def place_of(run: Run, role: str) -> str:
    """The folder of the run's `target` or `source`: its own, a local one, or the hub's cache, where it is downloaded to."""
    place, commit = address_of(run, role)
    return place if commit is None else str(snapshot(place, commit))


def address_of(run: Run, role: str) -> tuple[str, str | None]:
    """(a folder, None) or (hub id, commit): enough to read a configuration or a tokenizer without the weights."""
    model = getattr(run.profile.pair, role)
    if on_hub(model):
        return model.id, pin_revisions(run)[role]
    own = run.stage("pair") / role
    return str(local_folder(model.id, home()) if isinstance(model, HubModel) else own), None


def load_pair_model(run: Run, role: str, dtype: torch.dtype | None = None):
    """The run's `target` or `source`, frozen, on the profile's device; in its dtype unless another is given."""
    dtype, device = dtype or getattr(torch, run.profile.pair.dtype), device_of(run.profile)
    place = _checked_place(run, role)
    check_memory(Path(place), dtype, device)
    return load_model(place, dtype=dtype, device=device)


class OneModel:
    """One model in memory at a time: before another is loaded, the last one is let go.

    checked: called with the role and every model that is loaded. It must keep none of them, and nor must who asks.
    """

    def __init__(self, run: Run, checked: Callable[[str, object], None] = lambda role, model: None):
        self.run, self.checked, self.held, self.model = run, checked, None, None

    def get(self, role: str, dtype: torch.dtype | None = None):
        """`load_pair_model`, unless it is the one that is there."""
        wanted = role, dtype or getattr(torch, self.run.profile.pair.dtype)
        if self.held != wanted:
            self.free()
            self.model, self.held = load_pair_model(self.run, *wanted), wanted
            self.checked(role, self.model)
        return self.model

    def free(self) -> None:
        """Let the model go; a card's memory is given back to whoever asks for it next."""
        self.model = self.held = None
        gc.collect()  # a model's modules refer to one another
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def load_pair_tokenizer(run: Run, role: str = "target"):
    """Both models read the target's tokens; the source's own tokenizer is only compared with it."""
    _check_own(run, role)
    place, commit = address_of(run, role)
    return load_tokenizer(place, revision=commit)


def load_pair_config(run: Run, role: str):
    """The model's configuration alone: enough to tell what it can do, before its weights are read."""
    _check_own(run, role)
    place, commit = address_of(run, role)
    try:
        return AutoConfig.from_pretrained(place, revision=commit or "main")
    except (OSError, ValueError) as error:
        raise load_error(error, place, "a folder or hub id of a causal language model") from error


def _checked_place(run: Run, role: str) -> str:
    """`place_of`, after the run's own folder was found as it was written, and one of others with all of its files."""
    _check_own(run, role)
    place = place_of(run, role)
    if isinstance(getattr(run.profile.pair, role), HubModel):
        check_files(Path(place))
    return place


def _check_own(run: Run, role: str) -> None:
    if not isinstance(getattr(run.profile.pair, role), HubModel):
        check_folder(run.stage("pair") / role)


def make_target(run: Run, tokenizer) -> None:
    """Write the target as a Hugging Face folder, unless it is there or on the hub. `tokenizer` is for random models."""
    wanted, folder = run.profile.pair.target, run.stage("pair") / "target"
    if isinstance(wanted, HubModel) or folder.exists():
        return
    if isinstance(wanted, GgufModel):
        model, tokenizer = load_gguf(fetch(wanted.asset, cache_folder()))
    else:
        model = random_llama(wanted, len(tokenizer), run.profile.seed, tokenizer)
    save_folder(folder, model, tokenizer)


def load_gguf(path: Path):
    """(model, tokenizer) of a GGUF file, dequantised to float32."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (
        Exception
    ) as error:  # the reader and transformers raise many kinds for a file that is cut or no GGUF
        raise KvlibError(
            f"{path} given, expected a whole GGUF file of a Llama ({first_line(error)}): delete it, and it is fetched again"
        ) from error
    # A GGUF model refuses save_pretrained until its quantisation record is cleared.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    return model.eval().requires_grad_(False), tokenizer


def random_llama(wanted: RandomModel, vocabulary: int, seed: int, tokenizer) -> LlamaForCausalLM:
    """A Llama with normal weights of the wanted spread, drawn from `seed` alone."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=wanted.hidden_size, intermediate_size=wanted.intermediate_size,
        num_hidden_layers=wanted.layers, num_attention_heads=wanted.heads, num_key_value_heads=wanted.kv_heads,
        head_dim=wanted.head_dim, max_position_embeddings=wanted.max_positions, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * wanted.spread)
    return model.eval().requires_grad_(False)


def save_folder(folder: Path, model, tokenizer) -> None:
    """An ordinary Hugging Face folder with safetensors, whole or not at all."""

    def write(place: Path) -> None:
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)

    write_folder(folder, write)
