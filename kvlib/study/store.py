"""Caches computed once: training windows in memory-mapped files, prompts with their references in safetensors."""

import copy
import mmap
import os
import zlib
from pathlib import Path

import torch

from kvlib.cache import Geometry, PrefixCache, prefill
from kvlib.divergence import Reference, oracle_reference, text_reference
from kvlib.errors import KvlibError
from kvlib.maps import RidgeAccumulator, RidgeMap
from kvlib.ragged import RaggedPrefix
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_record, read_tensors, write_json, write_tensors
from kvlib.training import Batch

WINDOWS_AT_ONCE = 4


def hash_ids(tokens: torch.Tensor) -> str:
    return hash_json(tokens.tolist())


class WindowStore:
    """Both models' caches over N training windows, and the target's final hidden states.

    Files in `folder`: source.bin and target.bin (N, L, 2, H, T, D) with keys before values, hidden.bin (N, T, C).
    `windows.json` says of which windows they are, and holds a checksum of each that is whole: a killed run goes on
    from there, and a damaged window is filled anew.
    """

    def __init__(
        self, folder: Path, windows: torch.Tensor, geometry: Geometry, hidden_size: int, dtype: torch.dtype
    ):
        self.folder, self.windows, self.geometry, self.dtype = Path(folder), windows, geometry, dtype
        count, tokens = windows.shape
        self._held: list[mmap.mmap] = []
        shape = (count, geometry.layers, 2, geometry.heads, tokens, geometry.head_dim)
        self.source = self._map("source.bin", shape, dtype)
        self.target = self._map("target.bin", shape, dtype)
        self.hidden = self._map("hidden.bin", (count, tokens, hidden_size), torch.float32)

    def _map(self, name: str, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
        size = 1
        for axis in shape:
            size *= axis
        path, needed = self.folder / name, size * torch.empty(0, dtype=dtype).element_size()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "r+b" if path.exists() else "w+b") as file:
                # Taken from the disk now: a hole that cannot be filled later would kill the process without a word.
                os.posix_fallocate(file.fileno(), 0, needed)
                file.truncate(needed)
                held = mmap.mmap(file.fileno(), needed)
        except (OSError, ValueError) as error:
            raise KvlibError(
                f"{path} could not be mapped ({getattr(error, 'strerror', None) or error}), expected a writable folder with "
                f"room for {needed / 2**30:.1f} GiB: free some disk space and run the same command again; finished work is kept"
            ) from error
        self._held.append(held)
        return torch.frombuffer(held, dtype=dtype).view(shape)

    def release(self) -> None:
        """Let the operating system take the pages back; they stay in its file cache, outside this process."""
        for held in self._held:
            held.madvise(mmap.MADV_DONTNEED)

    @property
    def complete(self) -> int:
        """How many windows, from the first on, are there as they were filled."""
        return len(self._whole())

    def _whole(self) -> list[list[int]]:
        """The checksums of the windows that are there as they were filled, up to the first that is not."""
        path = self.folder / "windows.json"
        if not path.exists():
            return []
        record = read_record(path, "windows", "checksums")
        if record["windows"] != hash_ids(self.windows) or not isinstance(record["checksums"], list):
            return []
        whole = []
        for n, stated in enumerate(record["checksums"][: len(self.windows)]):
            if stated != self._checksums(n):
                break
            whole.append(stated)
        self.release()
        return whole

    def _checksums(self, n: int) -> list[int]:
        """Of window n in each file: what is damaged by a disk or a hand, zeros that stand for nothing included."""
        parts = (self.source[n], self.target[n], self.hidden[n])
        return [zlib.crc32(part.reshape(-1).view(torch.uint8).numpy()) for part in parts]

    @torch.no_grad()
    def fill(self, source, target, progress: Progress, units_per_window: float) -> "WindowStore":
        """Prefill the windows that are missing, with models in the dtype that training computes in."""
        whole, count = self._whole(), len(self.windows)
        # Whole batches only: what goes through a model together may differ by rounding from what goes through alone.
        del whole[len(whole) - len(whole) % WINDOWS_AT_ONCE if len(whole) < count else count :]
        progress.skip(len(whole) * units_per_window)
        for start in range(len(whole), count, WINDOWS_AT_ONCE):
            part = slice(start, min(start + WINDOWS_AT_ONCE, count))
            ids = self.windows[part].to(next(target.parameters()).device)
            self._keep(self.source, part, prefill(source, ids))
            cache, hidden = prefill(target, ids, return_hidden=True)
            self._keep(self.target, part, cache)
            self.hidden[part] = hidden.float().cpu()
            for held in self._held:
                held.flush()
            whole += [self._checksums(n) for n in range(start, part.stop)]
            write_json(self.folder / "windows.json", {"windows": hash_ids(self.windows), "checksums": whole})
            self.release()
            progress.advance(
                (part.stop - part.start) * units_per_window, f"caching window {part.stop} of {count}"
            )
        return self

    @staticmethod
    def _keep(place: torch.Tensor, part: slice, cache: PrefixCache) -> None:
        cache.check_finite("a model")
        for layer, (k, v) in enumerate(zip(cache.keys, cache.values)):
            place[part, layer, 0], place[part, layer, 1] = k.cpu(), v.cpu()

    def first(self, count: int) -> "WindowStore":
        """The first `count` windows as a store of their own, over the same files: for reading, not to be filled."""
        if not 1 <= count <= len(self.windows):
            raise KvlibError(
                f"the first {count} windows asked of {len(self.windows)}: ask for 1 to {len(self.windows)}"
            )
        view = copy.copy(self)
        for name in ("windows", "source", "target", "hidden"):
            setattr(view, name, getattr(self, name)[:count])
        return view

    def batch(
        self,
        chosen: list[int],
        cuts: list[int],
        steps: int,
        *,
        with_target: bool,
        source_of: list[int] | None = None,
    ) -> Batch:
        """Windows cut at positions of their own: prompts of `cuts` tokens, the last held back, then `steps` forced.

        The caches are views of the files: nothing is read before it is used.

        source_of: the windows whose source caches are used instead of the chosen windows' own (a control).
        """
        self.release()  # what the last batch read
        inputs, hidden = (
            torch.stack([of[n, cut - 1 : cut - 1 + steps] for n, cut in zip(chosen, cuts)])
            for of in (self.windows, self.hidden)
        )
        source = self._cut(self.source, source_of or chosen, cuts)
        return Batch(source, self._cut(self.target, chosen, cuts) if with_target else None, inputs, hidden)

    @staticmethod
    def _cut(place: torch.Tensor, chosen: list[int], cuts: list[int]) -> RaggedPrefix:
        return RaggedPrefix([place[n, ..., : cut - 1, :] for n, cut in zip(chosen, cuts)])

    def pair_of_caches(self, n: int) -> tuple[PrefixCache, PrefixCache]:
        """(source, target) cache of window n, each with one prompt."""
        rows = (place[n].unsqueeze(2) for place in (self.source, self.target))  # (L, 2, 1, H, T, D)
        return tuple(PrefixCache(list(row[:, 0]), list(row[:, 1])) for row in rows)

    def fit_ridge(self, penalty: float) -> RidgeMap:
        """The ridge map over every position of every window, window by window."""
        sums = RidgeAccumulator(self.geometry)
        for n in range(len(self.windows)):
            sums.add(*self.pair_of_caches(n))
            self.release()
        return sums.solve(penalty)

    def source_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """σ of keys and of values, each (L, H): the RMS of the source's cache over all windows."""
        total = 0.0
        for n in range(len(self.windows)):
            total = total + self.source[n].double().pow(2).mean((-1, -2))  # (L, 2, H)
            self.release()
        scale = (total / len(self.windows)).sqrt().float()
        return scale[:, 0], scale[:, 1]


class PromptStore:
    """Prompts in batches, each with the source's cache, native's references and the tokens; one file per batch."""

    def __init__(
        self, folder: Path, tokens: torch.Tensor, prefix_tokens: int, forcings: list[str], batch_prompts: int
    ):
        self.folder, self.tokens, self.prefix_tokens = Path(folder), tokens, prefix_tokens
        self.forcings, self.batch_prompts = forcings, batch_prompts

    @property
    def starts(self) -> range:
        return range(0, len(self.tokens), self.batch_prompts)

    def path(self, start: int) -> Path:
        return (
            self.folder
            / f"prompts-{start:04d}-{min(start + self.batch_prompts, len(self.tokens)):04d}.safetensors"
        )

    @torch.no_grad()
    def fill(self, source, target, progress: Progress, units_per_prompt: float) -> "PromptStore":
        for start in self.starts:
            prompts = self.tokens[start : start + self.batch_prompts]
            units = len(prompts) * units_per_prompt
            if self.path(start).exists():
                progress.skip(units)
                continue
            cut, steps = self.prefix_tokens, prompts.shape[1] - self.prefix_tokens
            head, tail = prompts[:, :cut], prompts[:, cut:]
            cache = prefill(source, head[:, :-1]).check_finite("the source")
            tensors = {"keys": torch.stack(cache.keys), "values": torch.stack(cache.values)}
            for forcing in self.forcings:
                reference = (
                    oracle_reference(target, head, steps)
                    if forcing == "oracle"
                    else text_reference(target, head, tail)
                )
                tensors |= {
                    f"{forcing}.{name}": getattr(reference, name) for name in ("inputs", "forced", "hidden")
                }
            write_tensors(self.path(start), tensors, {"prompts": hash_ids(prompts)})
            progress.advance(
                units, f"native and source over prompt {start + len(prompts)} of {len(self.tokens)}"
            )
        return self

    def batch(self, start: int) -> tuple[PrefixCache, dict[str, Reference]]:
        """(the source's cache, forcing -> reference) of the batch that begins at prompt `start`."""
        tensors, metadata = read_tensors(self.path(start))
        prompts = self.tokens[start : start + self.batch_prompts]
        if metadata.get("prompts") != hash_ids(prompts) or not self._fits(tensors, *prompts.shape):
            raise KvlibError(
                f"{self.path(start)} is of other prompts than these: delete it and run its stage again"
            )
        prefix = PrefixCache(list(tensors["keys"]), list(tensors["values"]))
        names = ("inputs", "forced", "hidden")
        return prefix, {f: Reference(*(tensors[f"{f}.{name}"] for name in names)) for f in self.forcings}

    def caches(self, prompts: list[int]) -> PrefixCache:
        """The source's caches of these prompts, whatever batches they are in; one batch is in memory at a time."""
        rows: dict[int, tuple[list, list]] = {}
        for start in self.starts:
            wanted = [n for n in prompts if start <= n < start + self.batch_prompts]
            if wanted:
                prefix, _ = self.batch(start)
                for n in wanted:
                    one = prefix.select(slice(n - start, n - start + 1)).clone()
                    rows[n] = one.keys, one.values
        join = [[torch.cat(layers) for layers in zip(*(rows[n][kind] for n in prompts))] for kind in (0, 1)]
        return PrefixCache(*join)

    def _fits(self, tensors: dict[str, torch.Tensor], count: int, tokens: int) -> bool:
        """Whether these are the tensors of `count` prompts, and every number of them is finite."""
        cached, steps = self.prefix_tokens - 1, tokens - self.prefix_tokens
        names = [f"{forcing}.{name}" for forcing in self.forcings for name in ("inputs", "forced", "hidden")]
        if set(tensors) != {"keys", "values", *names}:
            return False
        keys, values = tensors["keys"], tensors["values"]  # (L, B, H, T, D)
        fit = (
            keys.ndim == 5
            and keys.shape == values.shape
            and (keys.shape[1], keys.shape[3]) == (count, cached)
        )
        fit = fit and all(tensors[name].shape[:2] == (count, steps) for name in names)
        return fit and all(tensor.isfinite().all() for tensor in tensors.values())
