"""The models of a run: made once in the pair stage, loaded from its folder afterwards."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvlib.errors import KvlibError
from kvlib.pair import first_line, load_model, load_tokenizer
from kvlib.study.assets import fetch
from kvlib.study.folders import check_folder, write_folder
from kvlib.study.profile import GgufModel, HubModel, RandomModel
from kvlib.study.run import Run, device_of

CACHE_VARIABLE = "KVLIB_CACHE"  # where assets are kept; .cache in the project's folder unless set


def cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path(__file__).resolve().parents[2] / ".cache")


def place_of(run: Run, role: str) -> str:
    """What to load the run's `target` or `source` from: its own folder, or a hub id or local folder as it is."""
    model = getattr(run.profile.pair, role)
    return model.id if isinstance(model, HubModel) else str(run.stage("pair") / role)


def load_pair_model(run: Run, role: str, dtype: torch.dtype | None = None):
    """The run's `target` or `source`, frozen, on the profile's device; in its dtype unless another is given."""
    dtype = dtype or getattr(torch, run.profile.pair.dtype)
    return load_model(_checked_place(run, role), dtype=dtype, device=device_of(run.profile))


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


def load_pair_tokenizer(run: Run):
    return load_tokenizer(_checked_place(run, "target"))


def load_pair_config(run: Run, role: str):
    """The model's configuration alone: enough to tell what it can do, before its weights are read."""
    place = _checked_place(run, role)
    try:
        return AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise KvlibError(
            f"{place} given, expected a folder or hub id of a causal language model: {first_line(error)}"
        ) from error


def _checked_place(run: Run, role: str) -> str:
    """`place_of`, after the run's own folder was found as it was written; what others keep is theirs to change."""
    if not isinstance(getattr(run.profile.pair, role), HubModel):
        check_folder(Path(place_of(run, role)))
    return place_of(run, role)


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
