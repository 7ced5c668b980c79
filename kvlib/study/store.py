"""Training windows computed once: both models' caches over them in memory-mapped files."""

import copy
import mmap
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from kvlib.cache import Geometry, PrefixCache, prefill
from kvlib.errors import KvlibError
from kvlib.maps import RidgeAccumulator, RidgeMap
from kvlib.ragged import RaggedPrefix
from kvlib.room import Room
from kvlib.streaming import ahead
from kvlib.study.progress import Progress
from kvlib.study.records import hash_json, read_record, write_json
from kvlib.training import Batch

WINDOWS_AT_ONCE = 4
MAPPED_SHARE = 0.25  # of the machine's memory: files within it stay mapped from batch to batch
SOURCE_SHARE = 0.4  # of the time that a window takes with both models
TOO_LONG = "lower partitions.window_tokens, set pair.dtype to bfloat16, or take a device with more memory"


def hash_ids(tokens: torch.Tensor) -> str:
    return hash_json(tokens.tolist())


def _crc(part: torch.Tensor) -> int:
    return zlib.crc32(part.reshape(-1).view(torch.uint8).numpy())


class WindowStore:
    """Both models' caches over N training windows, and the target's final hidden states.

    Files in `folder`: source.bin and target.bin (N, L, 2, H, T, D) with keys before values, hidden.bin (N, T, C).
    `windows.json` says of which windows they are, and holds checksums of each that is whole, of its source part alone
    until the target has been there: a killed run goes on from there, and a damaged window is filled anew. One model
    passes over all windows before the other is loaded.
    """

    def __init__(
        self, folder: Path, windows: torch.Tensor, geometry: Geometry, hidden_size: int, dtype: torch.dtype,
        room: Room | None = None,
    ):  # fmt: skip
        self.folder, self.windows, self.geometry, self.dtype = Path(folder), windows, geometry, dtype
        self.room = room or Room("windows", WINDOWS_AT_ONCE, TOO_LONG)
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
    def stays_mapped(self) -> bool:
        """Whether what batches read is kept in reach: finding a step's pages again takes longer than a warm-up's products.

        All of it lies in the operating system's file cache either way, once for all processes that train on it.
        """
        return sum(map(len, self._held)) <= MAPPED_SHARE * psutil.virtual_memory().total

    @property
    def complete(self) -> int:
        """How many windows, from the first on, are there as they were filled."""
        return len(self._whole("target"))

    @property
    def filled(self) -> bool:
        """Whether the record says that all windows are there; their bytes are not looked at."""
        return len(self._recorded("target")) == len(self.windows)

    def _recorded(self, role: str) -> list:
        """What `windows.json` states of one model's part: a checksum per window of the source's, three of the target's."""
        path = self.folder / "windows.json"
        if not path.exists():
            return []
        record = read_record(path, "windows", "checksums")
        stated, sources = record["checksums"], record.get("source", [])
        if record["windows"] != hash_ids(self.windows) or not all(
            isinstance(x, list) for x in (stated, sources)
        ):
            return []
        if (
            role == "source"
        ):  # a record of before both models passed one after the other has them in `checksums` alone
            stated = sources or [one[0] for one in stated if isinstance(one, list) and one]
        return stated[: len(self.windows)]

    def _whole(self, role: str, sources: list[int] | None = None) -> list:
        """The checksums of the windows that are there as they were filled, up to the first that is not.

        sources: of the source's part, where that was looked at just now.
        """
        whole = []
        for n, stated in enumerate(self._recorded(role)):
            if stated != self._checksums(n, role, sources):
                break
            whole.append(stated)
        self.release()
        return whole

    def _checksums(self, n: int, role: str, sources: list[int] | None = None):
        """Of window n in each file: what is damaged by a disk or a hand, zeros that stand for nothing included."""
        source = _crc(self.source[n]) if sources is None else sources[n]
        return source if role == "source" else [source, _crc(self.target[n]), _crc(self.hidden[n])]

    def fill(self, source, target, progress: Progress, units_per_window: float) -> "WindowStore":
        """Prefill the windows that are missing with both models, one after the other."""
        self.fill_with("source", lambda: source, progress, units_per_window)
        return self.fill_with("target", lambda: target, progress, units_per_window)

    @torch.no_grad()
    def fill_with(
        self, role: str, load: Callable[[], object], progress: Progress, units_per_window: float
    ) -> "WindowStore":
        """Prefill what is missing of one model's part; the source's comes first.

        load: gives the model, in the dtype that training computes in; called only where something is missing.
        """
        sources = self._whole("source") if role == "source" else self._recorded("source")
        whole, count = sources if role == "source" else self._whole(role, sources), len(self.windows)
        units = units_per_window * (SOURCE_SHARE if role == "source" else 1 - SOURCE_SHARE)
        # Whole batches only: what goes through a model together may differ by rounding from what goes through alone.
        del whole[len(whole) - len(whole) % WINDOWS_AT_ONCE if len(whole) < count else count :]
        progress.skip(len(whole) * units)
        model = load() if len(whole) < count else None
        for start in range(len(whole), count, WINDOWS_AT_ONCE):
            part = slice(start, min(start + WINDOWS_AT_ONCE, count))
            self.room.over(part.stop - start, lambda few, start=start: self._prefill(role, model, start, few))
            for held in self._held:
                held.flush()
            known = None if role == "source" else sources
            whole += [self._checksums(n, role, known) for n in range(start, part.stop)]
            record = {"windows": hash_ids(self.windows), "source": sources}
            write_json(
                self.folder / "windows.json", record | {"checksums": [] if role == "source" else whole}
            )
            self.release()
            what = "source over" if role == "source" else "caching"
            progress.advance((part.stop - start) * units, f"{what} window {part.stop} of {count}")
        return self

    def _prefill(self, role: str, model, start: int, few: slice) -> None:
        part = slice(start + few.start, start + few.stop)
        ids = self.windows[part].to(next(model.parameters()).device)
        if role == "source":
            self._keep(self.source, part, prefill(model, ids))
            return
        cache, hidden = prefill(model, ids, return_hidden=True)
        self._keep(self.target, part, cache)
        self.hidden[part] = hidden.float().cpu()

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

        The caches are views of the files: nothing is read before it is used. Files that are large for the machine's memory
        are let go of first.

        source_of: the windows whose source caches are used instead of the chosen windows' own (a control).
        """
        if not self.stays_mapped:
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

    def fit_ridge(self, penalty: float, device: torch.device | str = "cpu") -> RidgeMap:
        """The ridge map over every position of every window, window by window; the sums are made on the device."""
        sums, count = RidgeAccumulator(self.geometry, device), range(len(self.windows))
        with ahead(count, self.pair_of_caches, torch.device(device)) as stream:
            for source, target in stream:
                sums.add(source, target)
                self.release()
        return sums.solve(penalty).to("cpu")

    def source_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """σ of keys and of values, each (L, H): the RMS of the source's cache over all windows."""
        total = 0.0
        for n in range(len(self.windows)):
            total = total + self.source[n].double().pow(2).mean((-1, -2))  # (L, 2, H)
            self.release()
        scale = (total / len(self.windows)).sqrt().float()
        return scale[:, 0], scale[:, 1]

    def kept_scale(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `source_scale`, from `scale.json` where it is there: one more pass over the files is saved."""
        path, windows = self.folder / "scale.json", hash_ids(self.windows)
        if not path.exists() or read_record(path, "windows", "scale")["windows"] != windows:
            scale = torch.stack(
                self.source_scale()
            ).tolist()  # float32 numbers come back from JSON as they were
            write_json(path, {"windows": windows, "scale": scale})
        try:
            keys, values = found = torch.tensor(read_record(path, "scale")["scale"], dtype=torch.float32)
            whole = found.shape[1:] == (self.geometry.layers, self.geometry.heads) and bool((found > 0).all())
        except (TypeError, ValueError, IndexError):
            whole = False
        if not whole:
            raise KvlibError(
                f"{path} does not hold one scale per layer and KV head: delete it and run the stage again"
            )
        return keys, values
