"""KL(native ‖ path) over the whole vocabulary along forced tokens, and the oracle that forces them."""

from dataclasses import dataclass

import torch
from transformers import DynamicCache

from kvlib.cache import PrefixCache, branch, forward
from kvlib.errors import KvlibError
from kvlib.guards import all_finite, check_prompt, kind_of, position_limit
from kvlib.handoff import handoff
from kvlib.linear import fast_linears
from kvlib.maps.base import CacheMap

ROWS_AT_ONCE = 8  # of logits: 8 x 49,152 numbers in float32 are 1.5 MiB


@dataclass(frozen=True)
class Reference:
    """What the native target says along the forced tokens.

    inputs: (B, S) the tokens to read: the prompt's last one, then the forced ones but the last.
    forced: (B, S) the token forced at each step. hidden: (B, S, C) native's final hidden states.
    """

    inputs: torch.Tensor
    forced: torch.Tensor
    hidden: torch.Tensor

    def select(self, prompts) -> "Reference":
        return Reference(self.inputs[prompts], self.forced[prompts], self.hidden[prompts])


@torch.no_grad()
def oracle_reference(target, prompts: torch.Tensor, steps: int) -> Reference:
    """Native's own greedy continuation of `prompts` (B, T); an end-of-text token does not stop it."""
    check_prompt(target, prompts)
    _check_steps(target, prompts.shape[1], steps)
    return _decoded(target, prompts, steps, *_read(target, prompts))


def _read(target, prompts: torch.Tensor) -> tuple[DynamicCache, torch.Tensor]:
    """(native's cache over `prompts` (B, T), its final hidden state at the last position (B, 1, C))."""
    cache = DynamicCache()
    positions = torch.arange(prompts.shape[1], device=prompts.device).unsqueeze(0)
    with fast_linears(target):
        return cache, forward(target, prompts, cache, positions)[:, -1:]


def _decoded(
    target, prompts: torch.Tensor, steps: int, cache: DynamicCache, state: torch.Tensor
) -> Reference:
    """Greedy from what `_read` gave; the cache grows."""
    head = target.get_output_embeddings()
    with fast_linears(target):
        logits = head(state)
        hidden, forced = [state], [logits.argmax(-1)]
        for step in range(steps - 1):
            position = torch.full((1, 1), prompts.shape[1] + step, device=prompts.device)
            state = forward(target, forced[-1], cache, position)
            logits = head(state)
            hidden.append(state)
            forced.append(logits.argmax(-1))
    _check_finite("native", logits)  # NaN stays in the cache, so that the last step shows it
    forced = torch.cat(forced, 1)
    return Reference(torch.cat([prompts[:, -1:], forced[:, :-1]], 1), forced, torch.cat(hidden, 1))


@torch.no_grad()
def text_reference(target, prompts: torch.Tensor, continuation: torch.Tensor) -> Reference:
    """Native along the text's own continuation (B, S) of `prompts` (B, T), in one pass."""
    _check_text(target, prompts, continuation)
    tokens = torch.cat([prompts, continuation[:, :-1]], 1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    with fast_linears(target):
        hidden = forward(target, tokens, DynamicCache(), positions)
    start = prompts.shape[1] - 1
    return Reference(tokens[:, start:], continuation, hidden[:, start:])


@torch.no_grad()
def both_references(target, prompts: torch.Tensor, continuation: torch.Tensor) -> dict[str, Reference]:
    """`oracle_reference` and `text_reference` of `prompts` (B, T) over as many steps, by "oracle" and "text".

    The prompts, the dearest part of either, are read once.
    """
    _check_text(target, prompts, continuation)
    steps, seen = continuation.shape[1], prompts.shape[1]
    cache, state = _read(target, prompts)
    hidden, new = [state], continuation[:, :-1]
    if steps > 1:
        own = branch(cache)
        positions = torch.arange(seen, seen + steps - 1, device=prompts.device).unsqueeze(0)
        with fast_linears(target):
            hidden.append(forward(target, new, own, positions))
        del own
    text = Reference(torch.cat([prompts[:, -1:], new], 1), continuation, torch.cat(hidden, 1))
    return {"oracle": _decoded(target, prompts, steps, cache, state), "text": text}


def _check_text(target, prompts, continuation) -> None:
    check_prompt(target, prompts)
    if getattr(continuation, "ndim", 0) != 2 or len(continuation) != len(prompts):
        raise KvlibError(
            f"a continuation {kind_of(continuation)} of prompts {kind_of(prompts)} given, expected one row per prompt: "
            "cut both from the same text"
        )
    _check_steps(target, prompts.shape[1], continuation.shape[1])
    check_prompt(target, continuation)


def _check_steps(target, tokens: int, steps: int) -> None:
    limit = position_limit(target)
    if steps < 1 or (limit is not None and tokens + steps - 1 > limit):
        most = "any number from 1" if limit is None else f"1 to {limit - tokens + 1}"
        raise KvlibError(
            f"{steps} steps asked after a prompt of {tokens} tokens, expected {most}: change the steps or the prompt's length"
        )


def _check_finite(name: str, logits: torch.Tensor) -> None:
    if not all_finite(logits):
        raise KvlibError(
            f"{name} logits hold NaN or infinity, expected finite values: check weights, cache and dtype"
        )


@dataclass(frozen=True)
class Divergence:
    """Per prompt and forced step, each (B, S): KL in nats, whether the argmax agrees, both argmaxes, and the
    probability of the forced token under native and under the path."""

    kl: torch.Tensor
    agree: torch.Tensor
    native_token: torch.Tensor
    path_token: torch.Tensor
    native_probability: torch.Tensor
    path_probability: torch.Tensor

    @classmethod
    def cat(cls, parts: list["Divergence"]) -> "Divergence":
        return cls(*(torch.cat([getattr(p, n) for p in parts]) for n in cls.__dataclass_fields__))


@torch.no_grad()
def divergence(native_logits: torch.Tensor, path_logits: torch.Tensor, forced: torch.Tensor) -> Divergence:
    """KL(native ‖ path) = Σ p (log p − log q), natural log, in float32 or wider; logits (B, S, V), forced (B, S).

    Raises: KvlibError for logits that are not finite (their argmax is 0, so two broken paths would agree), and for shapes
        that do not go together (they would broadcast).
    """
    if native_logits.ndim != 3 or path_logits.shape != native_logits.shape:
        raise KvlibError(
            f"native logits {tuple(native_logits.shape)} and path logits {tuple(path_logits.shape)} given, expected (B, S, V) "
            "of both: read the same tokens with both"
        )
    if (
        forced.shape != native_logits.shape[:2]
        or forced.dtype != torch.int64
        or forced.numel() == 0
        or int(forced.min()) < 0
        or int(forced.max()) >= native_logits.shape[2]
    ):
        raise KvlibError(
            f"forced tokens {kind_of(forced)} given, expected {tuple(native_logits.shape[:2])} torch.int64 of ids below "
            f"{native_logits.shape[2]}: pass the reference's own"
        )
    _check_finite("native", native_logits)
    _check_finite("path", path_logits)
    # A processor's cache holds a few rows of logits: what is computed from them is not written to memory and read again.
    rows = ROWS_AT_ONCE if native_logits.device.type == "cpu" else forced.numel()
    flat = native_logits.flatten(0, 1), path_logits.flatten(0, 1), forced.flatten()
    found = Divergence.cat([_of_rows(*part) for part in zip(*(tensor.split(rows) for tensor in flat))])
    return Divergence(*(getattr(found, name).view(forced.shape) for name in Divergence.__dataclass_fields__))


def _of_rows(native_logits: torch.Tensor, path_logits: torch.Tensor, forced: torch.Tensor) -> Divergence:
    """`divergence` of some rows: logits (N, V), forced (N,)."""
    wide = torch.float64 if native_logits.dtype == torch.float64 else torch.float32
    native = native_logits.to(wide).log_softmax(-1)
    path = path_logits.to(wide).log_softmax(-1)
    native_token, path_token = native.argmax(-1), path.argmax(-1)

    def of_forced(log_probabilities):
        return log_probabilities.gather(-1, forced.unsqueeze(-1)).squeeze(-1).exp()

    probabilities = (of_forced(native), of_forced(path))
    kl = (native.exp() * (native - path)).sum(-1)
    return Divergence(kl, native_token == path_token, native_token, path_token, *probabilities)


@torch.no_grad()
def path_divergence(
    target,
    prefix: PrefixCache,
    cache_map: CacheMap,
    reference: Reference,
    mode: str = "auto",
    *,
    check: bool = True,
    native: torch.Tensor | None = None,
) -> Divergence:
    """Hand `prefix` (B prompts) over through the map, force the reference's tokens, and compare with native.

    An in-place map works on a copy here, so that the prefix can be used again. native: `native_logits` of the reference,
    for several maps; made here when None.
    """
    if cache_map.why_not_affine and mode in ("auto", "in_place"):
        prefix = prefix.clone()
    if len(reference.inputs) != prefix.batch:
        raise KvlibError(
            f"a cache of {prefix.batch} prompts given with a reference of {len(reference.inputs)}, expected as many: select the "
            "same prompts of both"
        )
    with handoff(target, prefix, cache_map, mode, check=check) as active:
        path = active.logits(reference.inputs)
    return divergence(native_logits(target, reference) if native is None else native, path, reference.forced)


@torch.no_grad()
def native_logits(target, reference: Reference) -> torch.Tensor:
    """(B, S, V)."""
    with fast_linears(target):
        return target.get_output_embeddings()(reference.hidden)
