"""What a cache, its padding and a prompt must be: each check refuses in one sentence, or passes."""

import torch

from kvlib.errors import KvlibError
from kvlib.geometry import Geometry, check_full_attention, name_or_type
from kvlib.room import out_of_memory

TOKEN_DTYPES = (torch.int64, torch.int32)  # what an embedding takes


def kind_of(thing) -> str:
    """What was given, in a word or two: a tensor by shape and dtype, anything else by its type."""
    if isinstance(thing, torch.Tensor):
        return f"{tuple(thing.shape)} {thing.dtype}"
    return f"a {type(thing).__name__}"


def check_layers(keys, values) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The layers as two lists; raises KvlibError unless they are of one (B, H, T, D), dtype and device."""
    try:
        keys, values = list(keys), list(values)
    except TypeError as error:
        raise KvlibError(
            f"{kind_of(keys)} given as keys and {kind_of(values)} as values, expected a list of each: one tensor per layer"
        ) from error
    if len(keys) == 0 or len(keys) != len(values):
        raise KvlibError(
            f"a cache needs as many key as value layers and at least one; got {len(keys)} key and "
            f"{len(values)} value layers: pass one tensor of each per layer"
        )
    first = keys[0]
    for name, tensors in (("key", keys), ("value", values)):
        for layer, tensor in enumerate(tensors):
            where = f"{name} layer {layer} of the cache"
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                given = f"on {tensor.device}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else ""
                raise KvlibError(
                    f"{where} is {kind_of(tensor)} {given}, expected a dense tensor in memory: pass one tensor per layer"
                )
            if tensor.ndim != 4 or tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise KvlibError(
                    f"{where} is {kind_of(tensor)}, expected {kind_of(first)} like key layer 0, as (B, H, T, D): "
                    "rebuild the cache from one prefill"
                )
            if tensor.device != first.device:
                raise KvlibError(
                    f"{where} is on {tensor.device}, expected {first.device} like key layer 0: "
                    "move the layers to one device"
                )
    if not first.is_floating_point():
        raise KvlibError(
            f"the cache is {first.dtype}, expected floating point: pass keys and values as the model computed them"
        )
    if 0 in first.shape:
        raise KvlibError(
            f"the cache is empty, {tuple(first.shape)} as (B, H, T, D), expected at least 1 of each: prefill a prompt of 2 "
            "tokens or more"
        )
    return keys, values


def check_padding(valid, like: torch.Tensor) -> None:
    """Raises KvlibError unless `valid` is None or marks one run of positions in each row of `like` (B, H, T, D)."""
    if valid is None:
        return
    wanted = (like.shape[0], like.shape[2])
    if not isinstance(valid, torch.Tensor) or valid.shape != wanted or valid.dtype != torch.bool:
        raise KvlibError(
            f"the cache's validity mask is {kind_of(valid)}, expected {wanted} torch.bool: one entry per prompt and position"
        )
    if valid.device != like.device:
        raise KvlibError(
            f"the cache's validity mask is on {valid.device}, expected {like.device} like the cache: move it there"
        )
    runs = valid[:, 0].long() + (valid[:, 1:] & ~valid[:, :-1]).sum(-1)  # (B,): how many runs begin
    if not bool((runs == 1).all()):
        row = int((runs != 1).nonzero()[0])
        raise KvlibError(
            f"row {row} of the cache's validity mask marks {int(runs[row])} runs of positions, expected one, of at least one "
            "valid position per prompt, since positions are counted from its start: pad on the left or on the right only"
        )


def converted(tensors: list[torch.Tensor], *args, **kwargs) -> list[torch.Tensor]:
    """Each through `Tensor.to`; KvlibError where that knows no such device or dtype."""
    try:
        return [tensor.to(*args, **kwargs) for tensor in tensors]
    except (RuntimeError, TypeError, AssertionError) as error:  # the last: torch without CUDA
        if out_of_memory(error):
            raise
        given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        raise KvlibError(
            f"a cache was to be converted by .to({given}), expected a device that is here or a dtype of torch: write .to('cpu') "
            "or .to(torch.float32) for example"
        ) from error


def chosen_rows(prompts, batch: int) -> torch.Tensor:
    """The rows that `prompts` (a list, a slice or a 1-dimensional tensor) picks out of `batch`; KvlibError for none."""
    try:
        rows = torch.arange(batch)[prompts if isinstance(prompts, slice) else torch.as_tensor(prompts).cpu()]
    except (IndexError, TypeError, ValueError, RuntimeError):
        rows = torch.empty(0)
    if rows.ndim != 1 or len(rows) == 0:
        raise KvlibError(
            f"prompts {prompts!r} asked of a cache that has {batch}, expected a list, a slice or a 1-dimensional tensor of one "
            f"or more indices from 0 to {batch - 1}: write [i] for the prompt i"
        )
    return rows


def check_computed_by(cache, model, input_ids) -> None:
    """Raises KvlibError when `cache` cannot be what `model` computed over `input_ids` (B, T; None: not known)."""
    if model is None:
        raise KvlibError("token ids given for a cache of no known model, expected both: pass model= as well")
    if input_ids is not None:
        check_prompt(model, input_ids)
    if cache.geometry != Geometry.of(model):
        raise KvlibError(
            f"a cache of {cache.geometry} given as computed by {name_or_type(model)}, which has {Geometry.of(model)}: "
            "pass the model that computed it"
        )


def check_finite(cache, owner: str) -> None:
    """Raises KvlibError at the first layer that holds NaN or infinity, padding included (0 × NaN is NaN)."""
    for layer, (k, v) in enumerate(zip(cache.keys, cache.values)):
        check_layer_finite(layer, k, v, owner)


def check_layer_finite(layer: int, keys: torch.Tensor, values: torch.Tensor, owner: str) -> None:
    """`check_finite` of one layer."""
    for name, tensor in (("keys", keys), ("values", values)):
        if not all_finite(tensor):
            raise KvlibError(
                f"the {name} of layer {layer} of {owner}'s cache hold NaN or infinity, expected finite values: "
                "check the model's weights and dtype"
            )


def all_finite(tensor: torch.Tensor) -> bool:
    """Without a mask in memory: a sum is finite unless an entry is not or it overflows, and then all are looked at."""
    tensor = tensor.detach()
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def check_writable(cache) -> None:
    """Raises KvlibError when correcting the cache where it lies would fail half-way or correct something twice."""
    tensors = [*cache.keys, *cache.values]
    if any(tensor.is_inference() for tensor in tensors) and not torch.is_inference_mode_enabled():
        raise KvlibError(
            "a cache made in torch.inference_mode given to be corrected in place, expected ordinary tensors: prefill under "
            "torch.no_grad, or pass prefix.clone()"
        )
    shared = len({tensor.data_ptr() for tensor in tensors}) < len(tensors)
    if shared or any(0 in tensor.stride() and tensor.numel() > 1 for tensor in tensors):
        raise KvlibError(
            "a cache whose layers or prompts share memory given to be corrected in place, expected memory of their own: pass "
            "prefix.clone()"
        )


def check_fits(cache, model, owner: str) -> None:
    """Raises KvlibError unless `model` can read this cache: geometry, dtype, device, positions, and its origin if known."""
    wanted, given = Geometry.of(model), cache.geometry
    for what, field in (("layers", "layers"), ("KV heads", "heads"), ("head_dim", "head_dim")):
        if getattr(given, field) != getattr(wanted, field):
            raise KvlibError(
                f"{owner} has {getattr(given, field)} {what}, the model {name_or_type(model)} "
                f"has {getattr(wanted, field)}: hand over a cache of a model with the same layers, KV heads and head_dim"
            )
    check_full_attention(model)
    weight = next(model.parameters())
    if cache.dtype != weight.dtype:
        raise KvlibError(
            f"{owner} is {cache.dtype}, the model {weight.dtype}: convert one of them with .to({weight.dtype})"
        )
    if cache.device != weight.device:
        raise KvlibError(
            f"{owner} is on {cache.device}, the model on {weight.device}: move one of them with .to(device)"
        )
    limit = position_limit(model)
    if limit is not None and cache.tokens >= limit:
        raise KvlibError(
            f"{owner} covers {cache.tokens} positions and the model has {limit}: leave room for at least one new token"
        )
    if cache.origin is not None:
        cache.origin.check_reader(model)


def position_limit(model) -> int | None:
    return getattr(model.config, "max_position_embeddings", None)


def check_prompt(model, input_ids: torch.Tensor) -> None:
    """Raises KvlibError unless `input_ids` is (B, T) with ids in the vocabulary and T within the positions."""
    if (
        isinstance(input_ids, torch.Tensor)
        and input_ids.ndim == 2
        and input_ids.shape[1] == 0
        and len(input_ids)
    ):
        raise KvlibError(
            f"token ids {tuple(input_ids.shape)} given, expected at least one token per prompt: a prompt of one token leaves "
            "nothing to cache, since the last is held back; let the target read it alone"
        )
    if (
        not isinstance(input_ids, torch.Tensor)
        or input_ids.ndim != 2
        or input_ids.numel() == 0
        or input_ids.dtype not in TOKEN_DTYPES
    ):
        raise KvlibError(
            f"token ids {kind_of(input_ids)} given, expected whole numbers (B, T) as an int64 tensor, at least one prompt of at "
            "least one token: tokenise with return_tensors='pt'"
        )
    limit = position_limit(model)
    if limit is not None and input_ids.shape[1] > limit:
        raise KvlibError(
            f"a prompt of {input_ids.shape[1]} tokens given, the model has {limit} positions: shorten the prompt"
        )
    check_vocabulary(model, input_ids)


def check_chunk(chunk_tokens: int | None) -> None:
    """Raises KvlibError unless it is a number of positions, or None for all at once."""
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise KvlibError(
            f"chunk_tokens is {chunk_tokens!r}, expected 1 or more: give a number of positions, or None for the whole prompt at once"
        )


def check_held_back(input_ids: torch.Tensor) -> None:
    """Raises KvlibError for prompts (B, T) of one token: the last one is held back, and a cache covers the others."""
    if input_ids.shape[1] < 2:
        raise KvlibError(
            f"prompts of {input_ids.shape[1]} token given, expected at least 2: the cache covers all but the last"
        )


def check_no_padding(attention_mask) -> None:
    """Raises KvlibError for a mask (B, T) that leaves a token out."""
    if attention_mask is None or bool(torch.as_tensor(attention_mask).all()):
        return
    raise KvlibError(
        "an attention_mask with padding given to prefill, expected prompts of one length: prefill each by itself, or run the model "
        "with its mask and pass its keys and values to PrefixCache(keys, values, valid=attention_mask.bool())"
    )


def check_vocabulary(model, ids: torch.Tensor) -> None:
    """Raises KvlibError when a token id is not one of the model's, or lies on another device."""
    device = next(model.parameters()).device
    if ids.device != device:
        raise KvlibError(
            f"token ids on {ids.device} given, the model is on {device}: move one of them with .to(device)"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= model.config.vocab_size:
        raise KvlibError(
            f"token ids from {low} to {high} given, the vocabulary has {model.config.vocab_size}: tokenise with the pair's tokenizer"
        )
