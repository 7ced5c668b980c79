"""Hand a prompt's KV cache from one language model to another, and measure what it costs and gains."""

from kvlib.cache import PrefixCache, prefill
from kvlib.errors import KvlibError
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
