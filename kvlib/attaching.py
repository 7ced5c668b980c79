"""Give a model an attention function that reads a handed-over prefix, and take it away again."""

import contextlib
import threading
import uuid

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvlib.attention import two_segment_attention
from kvlib.errors import KvlibError
from kvlib.geometry import name_or_type
from kvlib.linear import fast_linears


def compute_dtype(model) -> torch.dtype:
    """The dtype in which attention applies a map: float32 on a CPU (see `two_segment_attention`), else the model's."""
    weight = next(model.parameters())
    return torch.float32 if weight.device.type == "cpu" and weight.dtype != torch.float64 else weight.dtype


PREFIX = "kvlib-"  # of the names that attention functions are registered by
HELD = "_kvlib_attending"  # where a model keeps its `_Attending` while there is one
LOCK = threading.Lock()  # held while a model's attention is exchanged, a few microseconds


class _Attending:
    """The attention functions that a model has been given and not left yet: (name, thread) each, the last one at work.

    It lies on the model, so that a copy or a file of the whole model, which could not attend, is refused.
    """

    def __init__(self, own: str):
        self.own, self.names = own, []  # own: what the model attended by before the first of them

    def __reduce_ex__(self, protocol):
        raise KvlibError(
            "a model was copied or saved whole within a handoff, expected outside: do it before or after the `with` block"
        )


def _begin(model, name: str) -> None:
    with LOCK:
        held = vars(model).setdefault(HELD, _Attending(model.config._attn_implementation))
        if any(thread != threading.get_ident() for _, thread in held.names):
            raise KvlibError(
                f"a handoff into {name_or_type(model)} was begun while another thread's is not left, expected one at a time: take "
                "turns, or load the model once per thread"
            )
        held.names.append((name, threading.get_ident()))
        model.config._attn_implementation = name


def _end(model, name: str) -> None:
    """Handoffs may be left in any order: the last one begun of those that are left goes on, and the model is itself after all."""
    with LOCK:
        held = vars(model)[HELD]
        held.names = [one for one in held.names if one[0] != name]
        if (
            model.config._attn_implementation == name
        ):  # else a later one is at work, or somebody chose another
            model.config._attn_implementation = held.names[-1][0] if held.names else held.own
        if not held.names:
            del vars(model)[HELD]


@contextlib.contextmanager
def attention_of(model, attention):
    """Within the block `model` attends by this function of transformers' attention interface; yields its name there.

    Raises: KvlibError when another thread is within such a block of the same model.
    """
    name = f"{PREFIX}{uuid.uuid4().hex}"
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    try:
        _begin(model, name)
        try:
            yield name
        finally:
            _end(model, name)
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


def attach(model, cache, maps, valid, before=None, after=None):
    """Give `model` an attention function of its own that reads the prefix of `cache` through `maps`.

    Until it is taken away, the model's linear layers go through `kvlib.linear` as well.

    Args:
        maps: (key, value) `Affine` per layer; looked up at every read. valid: bool (B, T) or None.
        before: called with a layer's index ahead of every read of its prefix. What it returns, if anything, is the
            `correction` that the read takes along; `after` is called with the index when that is done.

    Returns: a function that takes it away again; its `calls` counts how often the model came by, its `name` is
    the attention's.
    """

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        layer = cache.layers[module.layer_idx]
        restore.calls += 1
        _check_call(model, layer, query, key)
        correction = None if before is None else before(module.layer_idx)
        key_map, value_map = maps[module.layer_idx]
        out = two_segment_attention(
            query, layer.prefix_keys, layer.prefix_values, key, value, scaling, key_map, value_map, valid,
            correction,
        )  # fmt: skip
        if correction is not None:
            after(module.layer_idx)
        return out.transpose(1, 2), None

    changes = contextlib.ExitStack()
    name = changes.enter_context(attention_of(model, attention))
    changes.enter_context(fast_linears(model))

    def restore():
        changes.close()

    restore.calls, restore.name = 0, name
    return restore


def _check_call(model, layer, query, key) -> None:
    """Raises KvlibError when attention was called for something else than reading on after the prefix."""
    if key.data_ptr() != layer.keys.data_ptr():
        raise KvlibError(
            f"the model {name_or_type(model)} was called within a handoff on another cache or on none, expected the handoff's: "
            "use its `logits`, `hidden` or `generate`, or call the model outside the `with` block"
        )
    if query.shape[0] != layer.prefix_keys.shape[0]:
        raise KvlibError(
            f"{query.shape[0]} sequences read a handed-over cache of {layer.prefix_keys.shape[0]} prompts, expected as many: leave "
            "out beams and num_return_sequences"
        )
