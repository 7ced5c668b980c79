"""Prompts computed once: the source's cache and native's references, in safetensors, a batch a file."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from kvlib.cache import PrefixCache, prefill
from kvlib.divergence import Reference, both_references, oracle_reference, text_reference
from kvlib.errors import KvlibError
from kvlib.room import Room
from kvlib.streaming import ahead, moved
from kvlib.study.progress import Progress
from kvlib.study.records import read_tensors, write_tensors
from kvlib.study.store import hash_ids

SOURCE_SHARE = 0.3  # of the time that a prompt takes with both models
FIELDS = ("inputs", "forced", "hidden")  # of a reference
ROLES = ("source", "native")
TOO_MANY = "lower prompt.prefix_tokens, set pair.dtype to bfloat16, or take a device with more memory"


class PromptStore:
    """Prompts in batches of `batch_prompts`, each in two files: the source's cache, and native's references.

    room: how many prompts go through a model at once; files hold `batch_prompts` whatever that is.
    """

    def __init__(
        self, folder: Path, tokens: torch.Tensor, prefix_tokens: int, forcings: list[str], batch_prompts: int,
        room: Room | None = None,
    ):  # fmt: skip
        self.folder, self.tokens, self.prefix_tokens = Path(folder), tokens, prefix_tokens
        self.forcings, self.batch_prompts = forcings, batch_prompts
        self.room = room or Room("prompts", batch_prompts, TOO_MANY)

    @property
    def starts(self) -> range:
        return range(0, len(self.tokens), self.batch_prompts)

    def prompts(self, start: int) -> torch.Tensor:
        """The tokens (B, T) of the batch that begins at prompt `start`."""
        return self.tokens[start : start + self.batch_prompts]

    def path(self, start: int, role: str) -> Path:
        """role: "source" for its cache, "native" for the target's references."""
        stop = start + len(self.prompts(start))
        return self.folder / f"prompts-{start:04d}-{stop:04d}-{role}.safetensors"

    @property
    def filled(self) -> bool:
        """Whether every file is there; what is in them is looked at when they are read."""
        return all(self.path(start, role).exists() for role in ROLES for start in self.starts)

    def fill(self, source, target, progress: Progress, units_per_prompt: float) -> "PromptStore":
        """Compute what is missing with both models, one after the other."""
        self.fill_with("source", lambda: source, progress, units_per_prompt)
        return self.fill_with("native", lambda: target, progress, units_per_prompt)

    @torch.no_grad()
    def fill_with(
        self, role: str, load: Callable[[], object], progress: Progress, units_per_prompt: float
    ) -> "PromptStore":
        """Compute what is missing of one model's part. load: gives the model; called only where something is missing."""
        compute, model = (self._cache if role == "source" else self._references), None
        units_per_prompt *= SOURCE_SHARE if role == "source" else 1 - SOURCE_SHARE
        for start in self.starts:
            prompts, path = self.prompts(start), self.path(start, role)
            units = len(prompts) * units_per_prompt
            if path.exists():
                progress.skip(units)
                continue
            model = model or load()
            ids = prompts.to(next(model.parameters()).device)
            parts = self.room.over(
                len(ids),
                lambda few, ids=ids, model=model: moved(compute(model, ids[few]), torch.device("cpu")),
            )
            axes = {"keys": 1, "values": 1}  # (L, B, H, T, D)
            tensors = {
                name: torch.cat([part[name] for part in parts], axes.get(name, 0)) for name in parts[0]
            }
            write_tensors(path, tensors, {"prompts": hash_ids(prompts)})
            progress.advance(units, f"{role} over prompt {start + len(prompts)} of {len(self.tokens)}")
        return self

    def _cache(self, source, prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = prefill(source, prompts[:, : self.prefix_tokens - 1]).check_finite("the source")
        return {"keys": torch.stack(cache.keys), "values": torch.stack(cache.values)}

    def _references(self, target, prompts: torch.Tensor) -> dict[str, torch.Tensor]:
        cut, steps = self.prefix_tokens, prompts.shape[1] - self.prefix_tokens
        head, tail, tensors = prompts[:, :cut], prompts[:, cut:], {}
        if len(self.forcings) > 1:
            found = both_references(target, head, tail)
        elif self.forcings == ["oracle"]:
            found = {"oracle": oracle_reference(target, head, steps)}
        else:
            found = {"text": text_reference(target, head, tail)}
        for forcing in self.forcings:
            tensors |= {f"{forcing}.{name}": getattr(found[forcing], name) for name in FIELDS}
        return tensors

    def batch(self, start: int) -> tuple[PrefixCache, dict[str, Reference]]:
        """(the source's cache, forcing -> reference) of the batch that begins at prompt `start`, in this machine's memory."""
        tensors = self._read(start, "source") | self._read(start, "native")
        prefix = PrefixCache(list(tensors["keys"]), list(tensors["values"]))
        return prefix, {f: Reference(*(tensors[f"{f}.{name}"] for name in FIELDS)) for f in self.forcings}

    def stream(self, starts: Iterable[int], device: torch.device) -> AbstractContextManager[Iterator]:
        """`batch` of each start on the device, the next one read while this one is worked on."""
        return ahead(starts, self.batch, device)

    def caches(self, prompts: list[int]) -> PrefixCache:
        """The source's caches of these prompts, whatever batches they are in; one batch is in memory at a time."""
        rows: dict[int, tuple[list, list]] = {}
        for start in self.starts:
            wanted = [n for n in prompts if start <= n < start + self.batch_prompts]
            if wanted:
                tensors = self._read(start, "source")
                prefix = PrefixCache(list(tensors["keys"]), list(tensors["values"]))
                for n in wanted:
                    one = prefix.select(slice(n - start, n - start + 1)).clone()
                    rows[n] = one.keys, one.values
        join = [[torch.cat(layers) for layers in zip(*(rows[n][kind] for n in prompts))] for kind in (0, 1)]
        return PrefixCache(*join)

    def _read(self, start: int, role: str) -> dict[str, torch.Tensor]:
        path, prompts = self.path(start, role), self.prompts(start)
        tensors, metadata = read_tensors(path)
        fits = self._fits_source if role == "source" else self._fits_native
        if metadata.get("prompts") != hash_ids(prompts) or not (
            fits(tensors, *prompts.shape) and all(tensor.isfinite().all() for tensor in tensors.values())
        ):
            raise KvlibError(f"{path} is of other prompts than these: delete it and run its stage again")
        return tensors

    def _fits_source(self, tensors: dict[str, torch.Tensor], count: int, tokens: int) -> bool:
        """Whether these are the tensors of `count` prompts."""
        if set(tensors) != {"keys", "values"}:
            return False
        keys, values = tensors["keys"], tensors["values"]  # (L, B, H, T, D)
        cached = (count, self.prefix_tokens - 1)
        return keys.ndim == 5 and keys.shape == values.shape and (keys.shape[1], keys.shape[3]) == cached

    def _fits_native(self, tensors: dict[str, torch.Tensor], count: int, tokens: int) -> bool:
        names = {f"{forcing}.{name}" for forcing in self.forcings for name in FIELDS}
        wanted = (count, tokens - self.prefix_tokens)
        return set(tensors) == names and all(tensor.shape[:2] == wanted for tensor in tensors.values())
