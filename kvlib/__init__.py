"""Hand a prompt's KV cache from one language model to another, and measure what it costs and gains."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from kvlib.errors import KvlibError

if TYPE_CHECKING:
    from kvlib.cache import PrefixCache, prefill
    from kvlib.handoff import Handoff, handoff
    from kvlib.maps import CacheMap, DirectMap, ResidualMap, RidgeAccumulator, RidgeMap, load_map, save_map
    from kvlib.pair import ModelPair, check_compatible, fingerprint
    from kvlib.pipeline import cold_handoff, pipelined

__version__ = "0.1.0"

__all__ = [
    "CacheMap",
    "DirectMap",
    "Handoff",
    "KvlibError",
    "ModelPair",
    "PrefixCache",
    "ResidualMap",
    "RidgeAccumulator",
    "RidgeMap",
    "check_compatible",
    "cold_handoff",
    "fingerprint",
    "handoff",
    "load_map",
    "pipelined",
    "prefill",
    "save_map",
]

# Read when first asked for: torch and transformers take seconds, which a shell that completes a line has not got.
_NAMES = {
    "cache": ("PrefixCache", "prefill"),
    "handoff": ("Handoff", "handoff"),
    "maps": ("CacheMap", "DirectMap", "ResidualMap", "RidgeAccumulator", "RidgeMap", "load_map", "save_map"),
    "pair": ("ModelPair", "check_compatible", "fingerprint"),
    "pipeline": ("cold_handoff", "pipelined"),
}
_FILES = {name: file for file, names in _NAMES.items() for name in names}


class _Package(ModuleType):
    """This package, whose public names come from their files when they are used."""

    def __getattr__(self, name: str):
        if name not in _FILES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{self.__name__}.{_FILES[name]}"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value) -> None:
        # Python puts every file that it imports into its package: `kvlib.handoff` stays the function.
        if not (name in _FILES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
