"""Gates that a pair must pass before its figures mean anything, and how well its two models know held-out text."""

from dataclasses import dataclass

import torch

from kvlib.cache import Geometry, PrefixCache, prefill
from kvlib.divergence import text_reference
from kvlib.errors import KvlibError
from kvlib.handoff import handoff
from kvlib.maps import CacheMap, DirectMap, ResidualMap, RidgeMap
from kvlib.room import Room
from kvlib.study.progress import Progress

MODES = ("materialised", "in_place", "absorbed")
GATE_PROMPTS = LOSS_PROMPTS = 4


def identity_maps(geometry: Geometry) -> dict[str, CacheMap]:
    """One map of every kind that changes nothing, so that a gate runs the code that the paths run."""
    layers, heads, dim = geometry.layers, geometry.heads, geometry.head_dim
    eye, zero = torch.eye(dim).repeat(layers, heads, 1, 1), torch.zeros(layers, heads, dim)
    one = torch.ones(layers, heads)
    generator = torch.Generator().manual_seed(0)
    residuals = {
        f"{residual} {features}": ResidualMap.initial(
            one, one, dim, 1, residual=residual, features=features, generator=generator
        )
        for residual, features in (("linear", "own"), ("quadratic", "rms"), ("linear", "rope_stripped"))
    }
    return {"direct": DirectMap(), "ridge": RidgeMap(eye, zero, eye, zero, penalty=0.0), **residuals}


@dataclass(frozen=True, eq=False)
class Native:
    """The target's own pass over prompts (N, T): its cache, and final hidden states (N, T, C)."""

    prompts: torch.Tensor
    cache: PrefixCache
    hidden: torch.Tensor

    @classmethod
    def of(cls, target, prompts: torch.Tensor) -> "Native":
        """Of at most `GATE_PROMPTS` of the prompts."""
        prompts = prompts[:GATE_PROMPTS].to(next(target.parameters()).device)
        return cls(prompts, *prefill(target, prompts, return_hidden=True))

    def over(self, tokens: int) -> "Native":
        """The pass over the first `tokens` alone: no position sees any after it."""
        return Native(self.prompts[:, :tokens], self.cache.slice(tokens), self.hidden[:, :tokens])


@torch.no_grad()
def gate(target, native: Native, prefix_tokens: int, tolerance: float) -> dict:
    """The target's own cache, taken out and put back through every map kind and handoff mode, against native's logits.

    The last prefix token is held back and read with the rest of the prompt, as every path does.

    Args:
        native: the target's pass over (N, T). prefix_tokens: of the T, those whose cache is handed back, the held-back one
            included. tolerance: on logits, absolute.

    Returns: {"prefix_tokens", "prompts", "comparisons" (logits compared), "max_abs_difference" by mode, "by_map",
        "logit_scale", "tolerance", "passed"}. Raises KvlibError when it does not pass.
    """
    prompts = native.prompts
    prefix_tokens = min(prefix_tokens, prompts.shape[1])
    head, start = target.get_output_embeddings(), prefix_tokens - 1
    wanted, inputs, own = head(native.hidden[:, start:]), prompts[:, start:], native.cache.slice(start)
    differences, by_map, comparisons = dict.fromkeys(MODES, 0.0), {}, 0
    for name, cache_map in identity_maps(Geometry.of(target)).items():
        for mode in MODES:
            if mode == "absorbed" and cache_map.why_not_affine:
                continue
            with handoff(target, own.clone(), cache_map, mode) as active:
                found = float((active.logits(inputs) - wanted).abs().max())
            differences[mode] = max(differences[mode], found)
            by_map[name] = max(by_map.get(name, 0.0), found)
            comparisons += wanted.numel()
    record = {
        "prefix_tokens": prefix_tokens,
        "prompts": len(prompts),
        "comparisons": comparisons,
        "max_abs_difference": differences,
        "by_map": by_map,
        "logit_scale": float(wanted.abs().max()),
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


def gates(
    target, prompts: torch.Tensor, lengths, steps: int, tolerance: float, progress: Progress | None = None
) -> list[dict]:
    """One gate per prefix length that the prompts have, shortest first, over `steps` forced tokens after each.

    The target reads the prompts once, over the longest of these lengths, and the others are that pass's beginnings.
    """
    known = sorted({min(length, prompts.shape[1]) for length in lengths})
    native, found = Native.of(target, prompts[:, : known[-1] + steps]), []
    for length in known:
        found.append(
            gate(target, native.over(min(length + steps, native.prompts.shape[1])), length, tolerance)
        )
        if progress is not None:
            progress.advance(0, f"gate over {length} tokens passed")
    return found


@torch.no_grad()
def agreement(
    target, prefix: PrefixCache, inputs: torch.Tensor, maps: dict[str, CacheMap], tolerance: float
) -> list[dict]:
    """Real maps over a source's cache, through every mode that each allows, against the corrected cache written out.

    What `gate` cannot show, since its maps change nothing: that the ways of applying a map that changes the cache agree.

    Args:
        prefix: the source's, over (N, T) tokens; at most `GATE_PROMPTS` prompts are used. inputs: (N, S) tokens to read
            after it. tolerance: on logits, absolute.

    Returns: per map {"map", "prompts", "comparisons" (logits compared), "moved" (the largest difference from direct
        reuse's logits: how much the map changes), "max_abs_difference" by mode, "logit_scale", "tolerance", "passed"}.
        Raises KvlibError when one does not pass.
    """
    few = slice(0, GATE_PROMPTS)
    prefix, inputs = prefix.select(few), inputs[few]
    untouched = _through(target, prefix, DirectMap(), "materialised", inputs)
    found = []
    for name, cache_map in maps.items():
        written = _through(target, prefix, cache_map, "materialised", inputs)
        modes = [mode for mode in MODES[1:] if mode != "absorbed" or not cache_map.why_not_affine]
        differences = {
            mode: float((_through(target, prefix, cache_map, mode, inputs) - written).abs().max())
            for mode in modes
        }
        largest = max(differences.values())
        found.append(
            {
                "map": name,
                "prompts": len(inputs),
                "comparisons": len(modes) * written.numel(),
                "moved": float((written - untouched).abs().max()),
                "max_abs_difference": differences,
                "logit_scale": float(written.abs().max()),
                "tolerance": tolerance,
                "passed": largest <= tolerance,
            }
        )
        if not found[-1]["passed"]:
            raise KvlibError(
                f"the {name} map gives logits that differ by {largest:.3g} between two ways of applying it, expected at most "
                f"{tolerance:g}; its figures would depend on the way that was timed: check dtype and attention of the target"
            )
    return found


def _through(
    target, prefix: PrefixCache, cache_map: CacheMap, mode: str, inputs: torch.Tensor
) -> torch.Tensor:
    with handoff(target, prefix.clone(), cache_map, mode) as active:
        return active.logits(inputs)


def worst(found: list[dict]) -> dict:
    """The gate with the largest difference."""
    return max(found, key=lambda record: max(record["max_abs_difference"].values()))


@torch.no_grad()
def held_out_nll(model, prompts: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats per token, the first token of each prompt left out."""
    prompts = prompts.to(next(model.parameters()).device)

    def loss(few: slice) -> float:
        part = prompts[few]
        reference = text_reference(model, part[:, :1], part[:, 1:])
        logits = model.get_output_embeddings()(reference.hidden).float()
        return float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        )

    room = Room("prompts", LOSS_PROMPTS, "lower prompt.prefix_tokens, or take a device with more memory")
    return sum(room.over(len(prompts), loss)) / prompts[:, 1:].numel()
