"""The memory floor of one step: the bytes that it has to read, and how long reading them takes at a given bandwidth."""

import torch

from kvlib.geometry import Geometry


def step_bytes(model) -> int:
    """Bytes of weights that reading one token takes: every parameter once, of an embedding one row.

    An output head that shares the embedding's matrix is read whole, once. Experts that a token does not visit are
    counted all the same: the floor is for dense models.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(p.numel() * p.element_size() for p in model.parameters())  # a shared one is listed once
    if embedding is head:
        return total
    return total - (embedding.shape[0] - 1) * embedding.shape[1] * embedding.element_size()


def cache_bytes(geometry: Geometry, prefix_tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values that the step after a prompt's first `prefix_tokens` − 1 positions reads, once each."""
    return 2 * geometry.layers * geometry.heads * (prefix_tokens - 1) * geometry.head_dim * dtype.itemsize


def floor_ms(read_bytes: int, bandwidth_gb_s: float) -> float:
    """Milliseconds that reading so many bytes takes at so many 10⁹ bytes per second."""
    return read_bytes / bandwidth_gb_s / 1e6
