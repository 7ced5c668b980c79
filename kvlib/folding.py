"""Correct a handed-over cache layer by layer while the target reads it.

In place, a layer is corrected right before the target first reads it, or by the very attention that reads it, so that it
comes from memory once. In the background, attention absorbs the map first; from the second call of the model on, some layers per call
are corrected, and their map is dropped.
"""

from kvlib import guards
from kvlib.attention import IDENTITY
from kvlib.kernels.correct import Correction, LayerCorrection
from kvlib.marks import PARTLY

BACKGROUND_CALLS = 8  # calls of the model over which a background handoff spreads its work


class Folding:
    """What still waits to be corrected. `before` is called ahead of every read of a layer, `done` after one that was told to
    correct it.

    cache: the transformers cache whose `HandoffLayer`s hold the prefix. maps: what attention applies, per layer;
    changed here once a layer is corrected. angles: from `CacheMap.angles`. correct_: `CacheMap.correct_` or a compiled
    one. check: look for NaN and infinity after. keys_only: `correct_` leaves the values alone, and attention goes on
    absorbing their part: a cache that is left so is marked as partly corrected.
    """

    def __init__(
        self,
        prefix,
        cache,
        cache_map,
        angles,
        maps: list,
        correct_,
        *,
        background: bool,
        check: bool,
        keys_only: bool = False,
    ):
        self.prefix, self.cache, self.map, self.angles, self.maps = prefix, cache, cache_map, angles, maps
        self.correct_ = correct_
        self.background, self.check, self.keys_only = background, check, keys_only
        self.waiting = set(range(len(maps)))
        self._calls = self._budget = 0
        self._mark, self._failed = cache_map.mark(prefix), False
        self._per_call = -(-len(maps) // BACKGROUND_CALLS)
        self.begun = False

    def start(self) -> None:
        """Called once the model reads through this: in place, the cache is used up from here on, read or not."""
        if not self.background:
            self._begin()

    @property
    def folded(self) -> int:
        """How many layers' tensors hold corrected keys and values."""
        return len(self.maps) - len(self.waiting)

    def _begin(self) -> None:
        # From here on the cache is used up; should a layer fail, nobody may take it for a whole one.
        self.begun = True
        self.prefix.corrected_by = f"{PARTLY} {self.map.kind}"

    def before(self, layer: int) -> LayerCorrection | None:
        """Corrects the layer where it is due; or returns what the read that follows is to do to it, `done` after that."""
        if not self._is_due(layer):
            return None
        if not isinstance(self.correct_, Correction):
            self._fold(layer)
            return None
        self._failed = True  # until `done`
        self._drop_map(layer)
        return self.correct_.at(layer)

    def _is_due(self, layer: int) -> bool:
        if not self.waiting:
            return False
        if not self.background:
            return layer in self.waiting
        if layer == 0:
            self._calls += 1
            self._budget = self._per_call if self._calls > 1 else 0
        if not self._budget or layer not in self.waiting:
            return False
        if not self.begun:
            self._begin()
        self._budget -= 1
        return True

    def _fold(self, layer: int) -> None:
        held = self.cache.layers[layer]
        self._failed = True  # until it is whole: what stopped half-way is not to be corrected a second time
        self.correct_(layer, held.prefix_keys, held.prefix_values, self.angles)
        self._drop_map(layer)
        self.done(layer)

    def _drop_map(self, layer: int) -> None:
        self.maps[layer] = (IDENTITY, self.maps[layer][1] if self.keys_only else IDENTITY)

    def done(self, layer: int) -> None:
        """The layer holds corrected keys and values."""
        if self.check:
            held = self.cache.layers[layer]
            guards.check_layer_finite(layer, held.prefix_keys, held.prefix_values, "the corrected source")
        self._failed = False
        self.waiting.discard(layer)
        if not self.waiting and not self.keys_only:
            self.prefix.corrected_by = self._mark

    def finish(self) -> None:
        """Correct what is left of what was begun: a cache is corrected in all layers or in none, unless one failed."""
        if self._failed or not self.begun:
            return
        for layer in sorted(self.waiting):
            self._fold(layer)
