"""A target's layers computed again in the backward pass, over the handed-over prefix they read in the forward pass."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.utils.checkpoint import checkpoint

from kvlib.cache import PrefixCache
from kvlib.errors import KvlibError
from kvlib.geometry import name_or_type
from kvlib.linear import replaced


@contextlib.contextmanager
def recomputed(model, cache, prefix: PrefixCache, attached: Callable[[], AbstractContextManager]):
    """Within the block, one call of `model` keeps what enters its layers and nothing that they compute.

    Args:
        cache: of `HandoffLayer`s over `prefix`. attached: a context manager that puts in place whatever the forward pass
            ran under; the backward pass comes after the block and enters it again for every layer.
    """
    layers = getattr(model.base_model, "layers", None)
    if layers is None or len(layers) != len(prefix.keys):
        raise KvlibError(
            f"the model {name_or_type(model)} does not list its {len(prefix.keys)} layers, expected `layers` as Llama has: set "
            "training.checkpoint_activations to false"
        )

    def again(number: int, forward: Callable):
        held = cache.layers[number]

        def run(*args, **kwargs):
            # As the forward pass met it: no new position yet, and the prefix as it was handed over.
            held.prefix_keys, held.prefix_values = prefix.keys[number], prefix.values[number]
            held.keys, held.values = held.prefix_keys[:, :, :0], held.prefix_values[:, :, :0]
            try:
                return forward(*args, **kwargs)
            finally:
                held.prefix_keys, held.prefix_values = prefix.keys[number], prefix.values[number]

        def twice(*args, **kwargs):
            return checkpoint(
                run, *args, use_reentrant=False, preserve_rng_state=False,
                context_fn=lambda: (contextlib.nullcontext(), attached()), **kwargs,
            )  # fmt: skip

        return twice

    with replaced({layer: again(n, layer.forward) for n, layer in enumerate(layers)}):
        yield
