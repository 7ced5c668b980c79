"""Controls and noise of the final evaluation: caches without the right content, maps without the right weights.

A divergence along forced tokens is easy to please: the forced tokens alone tell the target much. What a path gains
over these controls is what the handed-over content is worth.
"""

from dataclasses import dataclass, replace

import torch

from kvlib.cache import PrefixCache
from kvlib.maps import CacheMap, DirectMap, ResidualMap
from kvlib.maps.residual import rotate

DONOR, SHUFFLED, RANDOM, ZEROS = "other_prompt", "shuffled_positions", "random_moments", "zeros"

# name -> (which cache, which map, what it is)
CONTROLS = {
    "other_prompt": (DONOR, "direct", "the source's cache of a prompt from another article, as it is"),
    "shuffled_positions": (SHUFFLED, "direct", "every cached vector at another position's rotation"),
    "random_moments": (RANDOM, "direct", "random keys and values with each head's own mean and covariance"),
    "zeros": (ZEROS, "direct", "keys and values that are all zero"),
    "learned_heads_permuted": ("own", "permuted", "the learned map with its weights moved to other heads"),
    "learned_other_prompt": (DONOR, "learned", "the learned map on another prompt's cache"),
    "wrong_trained": ("own", "wrong_trained", "the same map trained on other prompts' caches, on the right one"),
    "wrong_trained_other_prompt": (
        DONOR,
        "wrong_trained",
        "the same map trained on other prompts' caches, on another prompt's cache",
    ),
}  # fmt: skip

NOISE = {
    "native_own_cache": "the target's own cache, taken out and handed back",
    "native_two_parts": "the target's own cache, prefilled in two parts instead of one",
    "native_training_dtype": "the target in the number format that training computes in",
}


@dataclass(frozen=True)
class Content:
    """The caches that controls read, built when they are asked for.

    own: the source's cache of the batch (B prompts). donors: of as many prompts from other articles.
    first: number of the batch's first prompt, so that a prompt's control does not depend on its batch.
    """

    own: PrefixCache
    donors: PrefixCache
    rotary: object
    seed: int
    first: int

    def cache(self, kind: str) -> PrefixCache:
        if kind == "own":
            return self.own
        if kind == DONOR:
            return self.donors
        if kind == ZEROS:
            return PrefixCache(
                [torch.zeros_like(k) for k in self.own.keys], [torch.zeros_like(v) for v in self.own.values]
            )
        build = {SHUFFLED: shuffled, RANDOM: random_like}[kind]
        parts = []
        for row in range(self.own.batch):
            generator = torch.Generator().manual_seed(hash_seed(self.seed, kind, self.first + row))
            parts.append(build(self.own.select(slice(row, row + 1)), self.rotary, generator))
        join = [
            [torch.cat(layers) for layers in zip(*(getattr(part, name) for part in parts))]
            for name in ("keys", "values")
        ]
        return PrefixCache(*join)


def hash_seed(seed: int, kind: str, prompt: int) -> int:
    """A seed of its own for every prompt and control."""
    return (seed * 1_000_003 + prompt) * 31 + sum(kind.encode())


def shuffled(prefix: PrefixCache, rotary, generator: torch.Generator) -> PrefixCache:
    """The same vectors at permuted positions: keys are turned back and forth, values follow their keys.

    Attention does not see the order in which a cache is stored, only the keys' rotation: permuting rows alone would
    change nothing. `rotary` as `kvlib.pair.rotary_of` gives it.
    """
    order = torch.randperm(prefix.tokens, generator=generator).to(prefix.device)
    cos, sin = rotary(prefix.positions)
    new_cos, new_sin = cos[:, order], sin[:, order]
    keys = []
    for layer in prefix.keys:
        plain = rotate(layer.float(), cos, -sin) / (cos * cos + sin * sin).unsqueeze(1)
        keys.append(rotate(plain, new_cos, new_sin).to(layer.dtype))
    return PrefixCache(keys, list(prefix.values), prefix.valid)


def random_like(prefix: PrefixCache, rotary, generator: torch.Generator) -> PrefixCache:
    """Gaussian vectors with the mean and the covariance that each head's vectors have over this prompt's positions.

    Random mixtures of the centred vectors: with Z (T, T) standard normal, every row of Z (x − μ) / √T has that covariance.
    """
    tokens = prefix.tokens

    def draw(x: torch.Tensor) -> torch.Tensor:  # (1, H, T, D)
        mean = x.float().mean(2, keepdim=True)
        # drawn on the processor, so that the numbers are the same whatever the device
        mixture = torch.randn(1, x.shape[1], tokens, tokens, generator=generator).to(x.device) / tokens**0.5
        return (mean + mixture @ (x.float() - mean)).to(x.dtype)

    return PrefixCache([draw(k) for k in prefix.keys], [draw(v) for v in prefix.values], prefix.valid)


def permuted_heads(learned: CacheMap) -> CacheMap:
    """The learned map with every head's correction moved to the next head (to the next layer where there is one head).

    The base and the scales σ stay with their heads.
    """
    if not isinstance(learned, ResidualMap):
        return learned
    axis = 1 if learned.geometry.heads > 1 else 0
    names = ("key_left", "key_right", "value_left", "value_right")
    return replace(learned, **{name: getattr(learned, name).roll(1, axis) for name in names})


def control_maps(maps: dict[str, CacheMap]) -> dict[str, CacheMap]:
    """The maps that controls use; `wrong_trained` is missing where its training did not finish."""
    found = {"direct": DirectMap(), "learned": maps["learned"], "permuted": permuted_heads(maps["learned"])}
    return found | ({"wrong_trained": maps["wrong_trained"]} if "wrong_trained" in maps else {})


def donors_of(articles: list[str]) -> list[int]:
    """For every prompt the next one, around the end, that comes from another article; the next one where none does."""
    count = len(articles)
    found = []
    for prompt in range(count):
        others = [(prompt + step) % count for step in range(1, count)]
        foreign = [other for other in others if articles[other] != articles[prompt]]
        found.append((foreign or others)[0])
    return found
