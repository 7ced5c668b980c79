"""Llamas, caches and maps of random numbers in given shapes: what a benchmark needs where there is no network.

Import `common` first: it finds kvlib.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvlib.cache import Geometry, PrefixCache
from kvlib.maps import CacheMap, ResidualMap, RidgeMap


@dataclass(frozen=True)
class Shape:
    """A Llama's shape. `tied`: one matrix serves as embedding and head."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    rope: tuple = (("rope_type", "default"), ("rope_theta", 10000.0))
    tied: bool = False

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.layers, self.kv_heads, self.head_dim)

    def with_layers(self, layers: int) -> "Shape":
        return replace(self, layers=layers)


LLAMA3 = (
    ("rope_type", "llama3"), ("rope_theta", 500000.0), ("factor", 8.0), ("low_freq_factor", 1.0),
    ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192),
)  # fmt: skip
LLAMA_31_8B = Shape("Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128, 128256, 131072, LLAMA3)
# 32 heads of 128 are 4,096 wide, the hidden size is 3,072: head_dim is explicit.
MINITRON_4B_WIDTH = Shape("Llama-3.1-Minitron-4B-Width", 3072, 9216, 32, 32, 8, 128, 128256, 131072, LLAMA3)
SMOLLM2_135M = Shape(
    "SmolLM2-135M", 576, 1536, 30, 9, 3, 64, 49152, 8192,
    (("rope_type", "default"), ("rope_theta", 100000.0)), tied=True,
)  # fmt: skip
SMOLLM2_PRUNED = replace(SMOLLM2_135M, name="SmolLM2-135M, pruned", hidden=504, mlp=1152, tied=False)
TINY_TARGET = Shape("tiny target", 64, 96, 3, 4, 2, 32, 211, 16384, LLAMA3)
TINY_SOURCE = replace(TINY_TARGET, name="tiny source", hidden=48, mlp=64)

SCORE_GAIN = 1.2  # of q and of k: scores of size 1.5, so that heads prefer some positions to others
OUTPUT_GAIN = 2.0  # of what attention writes, which averaging over positions has made small


def config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=shape.positions, rope_parameters=dict(shape.rope),
        rms_norm_eps=1e-5, tie_word_embeddings=shape.tied, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


@torch.no_grad()
def random_model(shape: Shape, *, device="cpu", dtype: torch.dtype = torch.float32, seed: int = 0):
    """A Llama of this shape, made where it is used, whose activations stay of order one from layer to layer.

    Logits have a standard deviation of about 1, attention is neither uniform nor on one position, and what the
    prefix says reaches the logits: a path that reads it wrongly cannot hide.
    """
    with torch.device(device):  # no copy from the host, and initialised at the device's speed
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.ndim == 2:
            weight.normal_(0, _std(name, weight, shape), generator=generator)
    model.config.name_or_path = f"{shape.name} (random weights)"
    return model.eval().requires_grad_(False)


def _std(name: str, weight: torch.Tensor, shape: Shape) -> float:
    fan_in = weight.shape[1] ** -0.5
    if "embed_tokens" in name:
        return fan_in if shape.tied else 1.0
    if "q_proj" in name or "k_proj" in name:
        return SCORE_GAIN * fan_in
    if "o_proj" in name:
        return OUTPUT_GAIN * fan_in / shape.layers**0.5
    return fan_in / shape.layers**0.5 if "down_proj" in name else fan_in


def random_prefix(
    geometry: Geometry, tokens: int, *, batch: int = 1, device="cpu", dtype=torch.float32, seed: int = 0
) -> PrefixCache:
    """A cache of `tokens` positions, standard normal: layer by layer one tensor (B, H, T, D) each."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (batch, geometry.heads, tokens, geometry.head_dim)
    tensors = [
        torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(2 * geometry.layers)
    ]
    return PrefixCache(tensors[::2], tensors[1::2])


def random_maps(geometry: Geometry, *, device="cpu", rank: int = 8, seed: int = 0) -> dict[str, CacheMap]:
    """One map of each kind: ridge, linear (on direct), quadratic, rms, rope_stripped, float32 as they are trained.

    Each moves the cache by a fifth of its size or so, so that rounding cannot be taken for the map.
    """
    generator = torch.Generator().manual_seed(seed)
    size, dim = (geometry.layers, geometry.heads), geometry.head_dim

    def near_identity():
        return torch.eye(dim) + torch.randn(*size, dim, dim, generator=generator) * 0.2 / dim**0.5

    def bias():
        return torch.randn(*size, dim, generator=generator) * 0.1

    maps: dict[str, CacheMap] = {"ridge": RidgeMap(near_identity(), bias(), near_identity(), bias(), 1e-3)}
    kinds = {
        "linear": ("linear", "own"), "quadratic": ("quadratic", "own"),
        "rms": ("linear", "rms"), "rope_stripped": ("linear", "rope_stripped"),
    }  # fmt: skip
    for name, (residual, features) in kinds.items():
        fresh = ResidualMap.initial(
            torch.ones(size), torch.ones(size), dim, rank,
            residual=residual, features=features, generator=generator,
        )  # fmt: skip
        rights = [
            torch.randn(t.shape, generator=generator) * 0.3 / rank**0.5
            for t in (fresh.key_right, fresh.value_right)
        ]
        maps[name] = replace(fresh, key_right=rights[0], value_right=rights[1], scale=0.75)
    return {name: cache_map.to(device) for name, cache_map in maps.items()}


def shape_options(prog: str, description: str) -> argparse.ArgumentParser:
    """The options of a benchmark that takes a shape and no run; `chosen` says what they come to."""
    parser = argparse.ArgumentParser(prog=prog, description=description.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: the same code in seconds")
    parser.add_argument("--out", type=Path, help="where the table is written as JSON")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="float32 on a CPU, else bfloat16, when left out")
    parser.add_argument("--threads", type=int, help="of torch; all it takes by itself when left out")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--repetitions", type=int, help="20, tiny: 2; p95 needs 20")
    return parser


def chosen(given: argparse.Namespace) -> tuple[Shape, str]:
    """(shape, name of the dtype), torch's threads set."""
    if given.threads:
        torch.set_num_threads(given.threads)
    on_cpu = given.device == "cpu"
    shape = TINY_TARGET if given.tiny else SMOLLM2_135M if on_cpu else LLAMA_31_8B
    return shape, given.dtype or ("float32" if on_cpu else "bfloat16")
