"""What every cache map offers, and how one is written to and read from safetensors."""

import functools
import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvlib.attention import Affine
from kvlib.cache import Geometry, PrefixCache
from kvlib.errors import KvlibError
from kvlib.load_errors import check_place
from kvlib.marks import PARTLY, is_partly

FORMAT = "kvlib-map-1"
CHUNK_TOKENS = 4096  # positions corrected at a time in place: bounds the extra memory


class CacheMap(ABC):
    """A map of cached vectors, per layer and KV head, for keys and for values.

    Subclasses are dataclasses whose fields that are not tensors are hyper-parameters, so `str(map)` is provenance.
    """

    kind: str

    @property
    @abstractmethod
    def geometry(self) -> Geometry | None:
        """Layers, KV heads and head_dim that it was made for; None when it fits any."""

    @abstractmethod
    def affine(self, layer: int) -> tuple[Affine, Affine] | None:
        """(key map, value map) of a layer when each is affine in its own head's vector, else None."""

    @abstractmethod
    def correct(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New keys and values (B, H, T, D) of one layer, float32 or wider; `rotary` is cos, sin (B, T, D)."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights by name."""

    @abstractmethod
    def settings(self) -> dict:
        """The hyper-parameters, JSON types only; with `tensors`, enough to rebuild the map."""

    @classmethod
    @abstractmethod
    def restore(cls, settings: dict, tensors: dict[str, torch.Tensor]) -> "CacheMap":
        """The inverse of `settings` and `tensors`."""

    @property
    def why_not_affine(self) -> str | None:
        """None when the map can be absorbed into attention, else the reason in a few words."""
        return None

    @property
    def needs_rotary(self) -> bool:
        return False

    @property
    def parameters(self) -> int:
        """How many learned or fitted numbers it holds."""
        return sum(t.numel() for t in self.tensors().values())

    def to(self, *args, **kwargs) -> "CacheMap":
        """A copy with every tensor through `Tensor.to`; itself where none of them changes."""
        tensors = self.tensors()
        moved = {name: tensor.to(*args, **kwargs) for name, tensor in tensors.items()}
        if all(moved[name] is tensor for name, tensor in tensors.items()):
            return self
        return type(self).restore(self.settings(), moved)

    @functools.cached_property
    def affines(self) -> "list[tuple[Affine, Affine]]":
        """`affine` of every layer, composed once: attention applies them at every step."""
        return [tuple(a.composed() for a in self.affine(layer)) for layer in range(self.geometry.layers)]

    @functools.cached_property
    def value_affines(self) -> list[Affine] | None:
        """The values' part of every layer, composed, where that is affine even if the keys' is not; else None."""
        return [values for _, values in self.affines] if self.why_not_affine is None else None

    def check_shapes(self) -> None:  # noqa: B027 - a map without tensors has nothing to check
        """Raises ValueError when a tensor or setting does not go with the others; for files from outside."""

    def check_fits(self, geometry: Geometry) -> None:
        """Raises KvlibError unless the map was made for this many layers, KV heads and dimensions."""
        try:
            own = self.geometry
            self.check_shapes()
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise KvlibError(
                f"the parts of the {self.kind} map do not go together ({error}): fit, train or load it again"
            ) from error
        if own is not None and own != geometry:
            raise KvlibError(
                f"the {self.kind} map is for {own}, the cache is {geometry}: use a map fitted on this pair"
            )
        for name, tensor in self.tensors().items():
            if not torch.isfinite(tensor).all():
                raise KvlibError(
                    f"tensor {name} of the {self.kind} map holds NaN or infinity: fit or train the map again"
                )

    @torch.no_grad()
    def materialise(self, prefix: PrefixCache, rotary=None) -> PrefixCache:
        """A corrected copy of the whole cache, in the cache's dtype; `rotary` as for `apply_`."""
        cos_sin = self.angles(rotary, prefix)
        pairs = [self.correct(i, k, v, cos_sin) for i, (k, v) in enumerate(zip(prefix.keys, prefix.values))]
        dtype = prefix.dtype
        return PrefixCache(
            [k.to(dtype) for k, _ in pairs],
            [v.to(dtype) for _, v in pairs],
            prefix.valid,
            origin=prefix.origin,
            corrected_by=self.mark(prefix),
        )

    @torch.no_grad()
    def apply_(self, prefix: PrefixCache, rotary=None, chunk_tokens: int = CHUNK_TOKENS) -> PrefixCache:
        """Correct the cache where it lies, in chunks of positions: one pass, no second copy.

        `rotary` is a callable (B, T) positions -> cos, sin (B, T, D) float32, needed by RoPE-stripped maps.
        """
        angles, mark = self.angles(rotary, prefix), self.mark(prefix)
        if self.kind != "direct":
            prefix.corrected_by = f"{PARTLY} {self.kind}"  # until it is whole: a layer may fail
        for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values)):
            self.correct_(layer, keys, values, angles, chunk_tokens)
        prefix.corrected_by = mark
        return prefix

    @torch.no_grad()
    def correct_(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, angles, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        """Correct one layer's keys and values (B, H, T, D) where they lie, in chunks; `angles` from `angles`."""
        cos, sin = angles
        for start in range(0, keys.shape[2], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            turned = (cos[:, part], sin[:, part]) if cos is not None else (None, None)
            self._correct_chunk_(layer, keys[:, :, part], values[:, :, part], turned)

    def _correct_chunk_(self, layer, keys, values, angles) -> None:
        new_keys, new_values = self.correct(layer, keys, values, angles)
        keys.copy_(new_keys)
        values.copy_(new_values)

    def mark(self, prefix: PrefixCache) -> str | None:
        """What a cache is called that this map was applied to; a map that changes nothing leaves no mark."""
        unchanged = self.kind == "direct" or is_partly(prefix)  # no further map makes that one whole
        return prefix.corrected_by if unchanged else self.kind

    def angles(self, rotary, prefix: PrefixCache):
        """(cos, sin) (B, T, D) of every cached position where the map needs them, else (None, None)."""
        if not self.needs_rotary:
            return None, None
        if rotary is None:
            raise KvlibError("a RoPE-stripped map was given no rotary embedding: pass rotary_of(target)")
        cos, sin = rotary(prefix.positions)
        if cos.shape[-1] != prefix.geometry.head_dim:
            raise KvlibError(
                f"a RoPE-stripped map was given a rotary embedding of {cos.shape[-1]} dimensions, expected all "
                f"{prefix.geometry.head_dim} of each head: use a map with other features on a model that rotates a part only"
            )
        return cos, sin


def save_map(cache_map: CacheMap, path: str | Path, *, pair: str, provenance: dict | None = None) -> None:
    """Write a map as safetensors, whole or not at all.

    Args:
        pair: fingerprint of the pair that it was made for. provenance: JSON types, kept in the metadata.
    """
    if not isinstance(cache_map, CacheMap):
        raise KvlibError(
            f"a {type(cache_map).__name__} given to be saved, expected a CacheMap: pass the map first, the file second"
        )
    path = Path(check_place(path, "a map's file"))
    if not isinstance(pair, str):
        raise KvlibError(f"pair={type(pair).__name__} given, expected a fingerprint: pass pair.fingerprint")
    description = {
        "format": FORMAT,
        "kind": cache_map.kind,
        "settings": cache_map.settings(),
        "pair": pair,
        "provenance": provenance or {},
    }
    # Cloned: safetensors refuses tensors that share memory, and a map may use one for keys and values.
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in cache_map.tensors().items()}
    # One key: safetensors writes several in an order that changes from run to run, and equal maps are equal files.
    try:
        description["sha256"] = hash_map(description, tensors)
        metadata = {"kvlib": json.dumps(description, sort_keys=True)}
    except TypeError as error:
        raise KvlibError(
            f"provenance that is no JSON given ({error}): use strings, numbers, lists and dicts"
        ) from error
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        os.close(handle)
        save_file(tensors, temporary, metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise KvlibError(
            f"{path} could not be written ({error}): free some space or choose another folder"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_map(description: dict, tensors: dict[str, torch.Tensor]) -> str:
    """What a map's file states as its `sha256`: over its description and its tensors."""
    stated = {key: value for key, value in description.items() if key != "sha256"}
    text = json.dumps([stated, hash_tensors(tensors)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_map(path: str | Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(description, tensors) of a file that `save_map` wrote. Raises KvlibError for any other."""
    check_place(path, "a map's file")
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {}).get("kvlib", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise KvlibError(
            f"{path} given, expected a map written by kvlib: it cannot be read ({error})"
        ) from error
    if not isinstance(described, dict) or described.get("format") != FORMAT:
        raise KvlibError(f"{path} is safetensors but no {FORMAT} map: give a file that kvlib.save_map wrote")
    if described.get("sha256") != hash_map(described, tensors):
        raise KvlibError(
            f"{path} was changed after kvlib wrote it, expected the map as it was: restore it, or write it again"
        )
    return described, tensors


def load_map(path: str | Path, *, pair: str | None) -> CacheMap:
    """Read a map back.

    Args:
        pair: fingerprint of the pair it is to be used on; another pair's map is refused. None accepts any pair: ask
            for it by name, `pair=None`.

    Raises: KvlibError for a missing, truncated or foreign file, and for another pair's map.
    """
    from kvlib.maps import DirectMap, ResidualMap, RidgeMap  # here: each of them imports this file

    kinds = {cls.kind: cls for cls in (DirectMap, RidgeMap, ResidualMap)}
    if pair is not None and not isinstance(pair, str):
        raise KvlibError(f"pair={type(pair).__name__} given, expected a fingerprint: pass pair.fingerprint")
    described, tensors = _read_map(path)
    if described.get("kind") not in [*kinds]:
        raise KvlibError(f"{path} is safetensors but no {FORMAT} map: give a file that kvlib.save_map wrote")
    made_for = str(described.get("pair"))
    if pair is not None and made_for != pair:
        raise KvlibError(
            f"{path} was made for the pair {made_for[:12]}, this pair is {pair[:12]}: use a map of this pair, "
            "or pass pair=None to load it all the same"
        )
    try:
        restored = kinds[described["kind"]].restore(described["settings"], tensors)
        if restored.geometry is not None:
            restored.check_shapes()
            restored.check_fits(restored.geometry)  # every tensor finite
    except KvlibError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise KvlibError(f"{path} is no whole {described['kind']} map ({error}): write it again") from error
    return restored


def map_provenance(path: str | Path) -> dict:
    """The provenance that was saved with a map. Raises KvlibError for a file that is none."""
    return _read_map(path)[0].get("provenance", {})
