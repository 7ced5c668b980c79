"""Maps from a source's cache onto a target's: one method, one dataclass, one file."""

from kvlib.maps.base import CacheMap, load_map, save_map
from kvlib.maps.direct import DirectMap
from kvlib.maps.residual import ResidualMap
from kvlib.maps.ridge import RidgeAccumulator, RidgeMap

__all__ = ["CacheMap", "DirectMap", "RidgeAccumulator", "RidgeMap", "ResidualMap", "load_map", "save_map"]
