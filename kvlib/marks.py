"""What was done to a cache where it lies: one mark for all objects that share its memory, and who may still map it."""

import torch

from kvlib.errors import KvlibError

PARTLY = "partly applied"  # how the mark of a cache begins whose correction was begun and not finished


class Mark:
    """The kind of map that was applied to some tensors, None for a model's own; every view of them holds the same one."""

    __slots__ = ("kind",)

    def __init__(self, kind: str | None = None):
        self.kind = kind


def share_memory(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether a tensor lies in the storage of its counterpart: a write through one may be seen through the other."""
    return any(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(tensors, others)
    )


def is_partly(prefix) -> bool:
    return (prefix.corrected_by or "").startswith(PARTLY)


def check_uncorrected(prefix, cache_map) -> None:
    """Raises KvlibError when the map would be applied to a cache, or to memory, that a map has corrected already."""
    if prefix.corrected_by and (cache_map.kind != "direct" or is_partly(prefix)):
        raise KvlibError(
            f"a cache that a {prefix.corrected_by} map has corrected already was given with a {cache_map.kind} map, expected "
            "the source's own: prefill again (an in-place handoff uses its cache up, and every slice of it), or hand it over "
            "with DirectMap()"
        )
