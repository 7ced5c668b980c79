"""The source's cache as it is."""

from dataclasses import dataclass

from kvlib.attention import IDENTITY
from kvlib.maps.base import CacheMap


@dataclass(frozen=True)
class DirectMap(CacheMap):
    """b(x) = x. Costs nothing and has no parameters."""

    kind = "direct"

    @property
    def geometry(self):
        return None

    def affine(self, layer):
        return IDENTITY, IDENTITY

    def correct(self, layer, keys, values, rotary=None):
        return keys, values

    def correct_(self, layer, keys, values, angles, chunk_tokens=0):
        pass

    def tensors(self):
        return {}

    def settings(self):
        return {}

    @classmethod
    def restore(cls, settings, tensors):
        return cls(**settings)
