"""A source and a target that can share a cache: loading, compatibility, fingerprints."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvlib.cache import PrefixCache, prefill
from kvlib.errors import KvlibError
from kvlib.geometry import (
    Geometry,
    RotarySample,
    name_or_type,
    rope_settings,
    rotary_gap,
    rotary_of,
    windowed_layers,
)
from kvlib.handoff import Handoff, check_target, handoff
from kvlib.load_errors import check_place, first_line, load_error
from kvlib.maps.base import CacheMap

# The homes of these are elsewhere; other files know them from here.
__all__ = [
    "ModelPair",
    "check_compatible",
    "fingerprint",
    "first_line",
    "load_model",
    "load_tokenizer",
    "rotary_of",
]


@dataclass(frozen=True)
class ModelPair:
    """Two models over one tokenizer. `ModelPair.load` checks that they fit; the constructor does not."""

    target: PreTrainedModel
    source: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(
        cls,
        target: str | Path,
        source: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> "ModelPair":
        """Load both from folders or hub ids and check them.

        Raises: KvlibError naming both models and what does not fit.
        """
        models, tokenizers = [], []
        for place in (target, source):
            models.append(load_model(place, dtype=dtype, device=device))
            tokenizers.append(load_tokenizer(place))
        check_compatible(models[0], models[1], *tokenizers)
        return cls(models[0], models[1], tokenizers[0])

    @property
    def fingerprint(self) -> str:
        """One hash for both models' weights and geometry, the same in every dtype that holds bfloat16."""
        return pair_fingerprint(fingerprint(self.source), fingerprint(self.target))

    def prefill(self, input_ids: torch.Tensor, **kwargs) -> PrefixCache:
        """The source's cache over `input_ids` (B, T), all of a prompt but its last token; kwargs as for `prefill`."""
        return prefill(self.source, input_ids, **kwargs)

    def handoff(
        self,
        prefix: PrefixCache,
        cache_map: CacheMap,
        mode: str = "auto",
        *,
        source: PreTrainedModel | None = None,
    ) -> Handoff:
        """`kvlib.handoff` into the target, for a cache that this pair's source computed.

        Args:
            source: whose cache is expected instead, the target itself for native in, native out.

        Raises: KvlibError, as `kvlib.handoff`, and for another model's cache or one of unknown origin.
        """
        return handoff(self.target, prefix, cache_map, mode, source=self.source if source is None else source)


def load_model(
    place: str | Path, *, dtype=torch.float32, device="cpu", revision: str | None = None
) -> PreTrainedModel:
    """A causal language model in evaluation mode, frozen, with finite weights.

    Args:
        revision: of a hub id, a branch, tag or commit; ignored for a folder.

    Raises: KvlibError, one sentence, for whatever keeps it from being loaded.
    """
    check_place(place, "a model")
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, revision=revision or "main", output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
        raise load_error(error, place, "a folder or hub id of a causal language model") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise KvlibError(
            f"the weight files of {place} lack {missing[0]} ({len(missing)} missing in all), expected every weight of the model: "
            "download or make it again"
        )
    try:
        model = model.to(device).eval().requires_grad_(False)
    except RuntimeError as error:
        raise load_error(error, place, f"a model that fits on {device}") from error
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise KvlibError(
                f"weight {name} of {place} holds NaN or infinity, expected finite values: download the model again"
            )
    return model


def load_tokenizer(place: str | Path, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    check_place(place, "a tokenizer")
    try:
        return AutoTokenizer.from_pretrained(place, revision=revision or "main")
    except (OSError, ValueError) as error:
        raise load_error(error, place, "a folder or hub id with a tokenizer") from error


def pair_fingerprint(source: str, target: str) -> str:
    """One hash out of the fingerprints of a source and a target."""
    return hashlib.sha256((source + target).encode()).hexdigest()


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 over geometry, rotary settings and all weights (as bfloat16, so a dtype does not change it)."""
    config = model.config
    digest = hashlib.sha256(
        json.dumps(
            [str(Geometry.of(model)), config.vocab_size, rope_settings(config)], sort_keys=True
        ).encode()
    )
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().data)
    return digest.hexdigest()


class Outline:
    """What of a model can be compared without its weights: configuration, dtype, rotary embedding.

    Kept of a model that is let go before the other one of its pair is loaded. It passes for a model where its weights
    are not asked for.
    """

    def __init__(self, model):
        weight = next(model.parameters())
        self.config, self._weight = model.config, torch.empty(0, dtype=weight.dtype, device=weight.device)
        self.base_model = SimpleNamespace(rotary_emb=getattr(model.base_model, "rotary_emb", None))

    def parameters(self):
        return iter((self._weight,))


def check_compatible(
    target: PreTrainedModel,
    source: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None = None,
    source_tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Raises KvlibError, one sentence naming both models, at the first thing that keeps a cache from being shared."""
    check_alike(target, source, target_tokenizer, source_tokenizer)
    check_target(target)


def check_shapes(target, source) -> None:
    """The part of `check_compatible` that asks the configurations alone: of anything that has a `config`."""
    names, differ = _differing(target, source)
    given, wanted = Geometry.of(source), Geometry.of(target)
    for what, field in (("layers", "layers"), ("KV heads", "heads"), ("head_dim", "head_dim")):
        if getattr(given, field) != getattr(wanted, field):
            differ(
                what,
                getattr(given, field),
                getattr(wanted, field),
                "choose a source with the target's cache shape",
            )
    for model in (source, target):
        if kind := windowed_layers(model):
            raise KvlibError(
                f"{names} cannot share a cache: {name_or_type(model)} has layers with {kind}, "
                "expected full attention in every layer; choose another model"
            )
    if source.config.vocab_size != target.config.vocab_size:
        differ(
            "vocabulary size",
            source.config.vocab_size,
            target.config.vocab_size,
            "choose models with one tokenizer",
        )


def check_alike(target, source, target_tokenizer=None, source_tokenizer=None) -> None:
    """`check_compatible` of two models or `Outline`s of them, without trying whether the target reads a cache."""
    check_shapes(target, source)
    names, differ = _differing(target, source)
    if target_tokenizer is not None and source_tokenizer is not None:
        _check_tokenizers(names, target_tokenizer, source_tokenizer)
    dtypes = [next(m.parameters()).dtype for m in (source, target)]
    if dtypes[0] != dtypes[1]:
        differ("dtype", *dtypes, "load both with the same dtype=")
    _check_rotary(target, source, differ)


def _differing(target, source):
    """(both models' names, a function that refuses them for one difference)."""
    names = f"source {name_or_type(source)} and target {name_or_type(target)}"

    def differ(what, given, wanted, remedy):
        raise KvlibError(f"{names} differ in {what}: {given} against {wanted}; {remedy}")

    return names, differ


def _check_tokenizers(names, target, source):
    ours, theirs = _words(source), _words(target)
    if ours != theirs:
        token = next(t for t in sorted(ours.keys() | theirs.keys()) if ours.get(t) != theirs.get(t))
        raise KvlibError(
            f"{names} differ in tokenizer: token {token!r} has id {ours.get(token)} against {theirs.get(token)}; "
            "choose models with one tokenizer"
        )
    sample = "Two models, one cache: naïve 12,345 — déjà vu."
    if source(sample).input_ids != target(sample).input_ids:
        raise KvlibError(
            f"{names} differ in tokenizer: the same sentence gives {source(sample).input_ids[:4]}… against "
            f"{target(sample).input_ids[:4]}…; choose models that tokenise alike (an added BOS alone is enough to break a cache)"
        )


def _words(tokenizer) -> dict[str, int]:
    """Token -> id without those added by name: reserved ones are renamed from model to model, and text has none."""
    added = tokenizer.added_tokens_decoder
    return {token: index for token, index in tokenizer.get_vocab().items() if index not in added}


def _check_rotary(target, source, differ):
    limits = [getattr(m.config, "max_position_embeddings", None) for m in (source, target)]
    furthest = min([n for n in limits if n] or [2048]) - 1
    gap = rotary_gap(target, RotarySample.of(source, (0, 1, 2, 63, furthest // 2, furthest)))
    if gap > 0:
        differ(
            "rotary embedding",
            rope_settings(source.config),
            rope_settings(target.config),
            f"cos and sin are up to {gap:.2g} apart",
        )
