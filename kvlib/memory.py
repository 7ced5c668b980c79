"""Peak extra memory of a path to the first token, each measured in a process of its own.

    python -m kvlib.memory TARGET native:8192 learned:8192 --map learned=MAP.safetensors

writes one JSON line per probe. Extra means above the state in which target, map and the source's cache are
resident. The source's weights are not loaded: they would lie below the baseline and above it alike.

On a CPU it is anonymous memory (RssAnon), read by a thread about every millisecond and once more at the end,
while everything that decoding would go on with is still held; null where /proc does not tell. Between two
looks a peak can be missed: where the kernel lets its high-water mark be reset, that one is read as well, and
the larger counts. On CUDA it is the allocator's peak.

What would blur it is dealt with before the baseline. Weights that safetensors maps from the file are copied,
so that they are anonymous memory already. The path runs once on a short prefix, so that thread pools and
scratch memory that libraries make on first use are not counted. glibc gives freed pages back at once. What is left is
some hundred kilobytes, up to a megabyte, of Python's own and glibc's heap, which they touch as they please: it only ever
adds, so every path but native, which takes a thousand times as much, is measured a few times and the least counts. How a
heap lies still differs from process to process, so that peaks of under a megabyte cannot be told apart. The
cache is random numbers in the pair's shape, the prompt random tokens: memory does not depend on values.

Every probe on a CPU is a fork of one process that has loaded the target on a single thread and run nothing:
importing and loading, most of a probe's time, happen once, and no probe sees what another left behind. Memory
is no timing: probes may run side by side.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import re
import sys
import threading
from pathlib import Path

import torch

from kvlib.cache import Geometry, PrefixCache
from kvlib.clocks import synchronise
from kvlib.errors import KvlibError
from kvlib.latency import TargetPath, first_token, standard_paths
from kvlib.maps import CacheMap, load_map
from kvlib.modes import MARK, WAYS, mode_paths, split_name
from kvlib.pair import load_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FIELDS = ("RssAnon", "RssFile", "RssShmem", "VmHWM")
SAMPLE_S = 1e-3
WARM_TOKENS = 64
MEASUREMENTS = 3  # of a path that reads a cache
M_MMAP_THRESHOLD = -3  # from glibc's malloc.h


def resident_bytes() -> dict[str, int] | None:
    """This process's resident memory by kind and its high-water mark; None where /proc does not tell."""
    try:
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE))
    except OSError:
        return None
    if not all(field in found for field in FIELDS):
        return None
    return {field: int(found[field]) * 1024 for field in FIELDS}


class PeakMemory:
    """Context manager: `extra_bytes` is the highest use within the block above that on entering it.

    Call `sample` at the end of the block, before letting go of what it made. None where nothing can tell.
    """

    def __init__(self, device: torch.device):
        self.device, self.extra_bytes, self._baseline = device, None, None
        self._done, self._lock = threading.Event(), threading.Lock()

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        synchronise(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._baseline = torch.cuda.memory_allocated(self.device)
        elif self.device.type == "cpu":
            try:
                CLEAR.write_text("5")  # the high-water mark starts from here
                self._marked = True
            except OSError:
                self._marked = False
            self._baseline = resident_bytes()
            if self._baseline is not None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self.sample()

    def sample(self) -> None:
        """Look now."""
        if self._baseline is None:
            return
        if self.device.type == "cuda":
            self.extra_bytes = torch.cuda.max_memory_allocated(self.device) - self._baseline
            return
        before, now = self._baseline, resident_bytes()
        found = [now["RssAnon"] - before["RssAnon"]]
        if self._marked:
            # The mark is of all memory. Pages of files may have come or gone: take off the larger count.
            files = max(seen["RssFile"] + seen["RssShmem"] for seen in (before, now))
            found.append(now["VmHWM"] - files - before["RssAnon"])
        with self._lock:
            self.extra_bytes = max(self.extra_bytes or 0, *found)

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self.sample()


def peak_extra_bytes(
    target, path: TargetPath, prefix_tokens: int, *, seed: int = 0
) -> tuple[int | None, str]:
    """(bytes, mode) of one path at one prefix length, after a warm-up on a short prefix.

    On a CPU, call it in a process of its own: memory that other calls left hides what this one takes.
    """
    weight, found = next(target.parameters()), []
    lengths = [min(WARM_TOKENS, prefix_tokens)]
    lengths += [prefix_tokens] * (1 if path.way == "prefill" else MEASUREMENTS)
    for tokens in lengths:
        prompt, prefix = random_prompt(target, tokens, seed)
        return_freed_pages()
        with PeakMemory(weight.device) as peak:
            result = first_token(target, path, prompt, None if path.way == "prefill" else prefix)
            peak.sample()
        mode = result.mode
        found.append(peak.extra_bytes)
        del result, prompt, prefix
    return min(found[1:], key=lambda taken: math.inf if taken is None else taken), mode


def random_prompt(model, prefix_tokens: int, seed: int) -> tuple[torch.Tensor, PrefixCache]:
    """Token ids (1, T) and a cache over T − 1 positions in the model's shape and dtype, of random values."""
    weight, shape = next(model.parameters()), Geometry.of(model)
    generator = torch.Generator(weight.device).manual_seed(seed)
    options = {"generator": generator, "device": weight.device}
    size = (1, shape.heads, prefix_tokens - 1, shape.head_dim)
    tensors = [torch.randn(size, dtype=weight.dtype, **options) for _ in range(2 * shape.layers)]
    prompt = torch.randint(model.config.vocab_size, (1, prefix_tokens), **options)
    return prompt, PrefixCache(tensors[::2], tensors[1::2])


@torch.no_grad()
def make_resident(model) -> None:
    """Copy weights off the file that they may be mapped from."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def keep_no_freed_pages() -> None:
    """Have glibc map every block of 64 KiB or more by itself, so that freeing one gives its pages back."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)


def return_freed_pages() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def run_probes(target, probes: list[tuple[TargetPath, int]], *, threads: int, jobs: int = 1):
    """Yield {"path", "prefix_tokens", "peak_extra_bytes", "mode"} as each probe ends.

    Args:
        probes: (path, prefix tokens). threads: torch's, within a probe. jobs: probes at a time (on a CPU).

    On a CPU, call it in a process that has run no parallel operation: a thread pool does not survive a fork.
    """
    if next(target.parameters()).device.type != "cpu":
        for path, tokens in probes:
            yield _report(path, tokens, *peak_extra_bytes(target, path, tokens))
        return
    gc.freeze()  # a child's collector would else touch, and so copy, every page of objects
    context, waiting, running = multiprocessing.get_context("fork"), list(probes), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                probe = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(sender, target, *probe, threads))
                process.start()
                sender.close()  # the child's copy is now the only one: its death ends the pipe
                running[receiver] = process, probe
            for receiver in multiprocessing.connection.wait(list(running)):
                process, (path, tokens) = running.pop(receiver)
                yield _report(path, tokens, *_receive(receiver, process, path, tokens))
    finally:
        for process, _ in running.values():
            process.terminate()


def _child(sender, target, path: TargetPath, tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    sender.send(peak_extra_bytes(target, path, tokens))


def _receive(receiver, process, path: TargetPath, tokens: int):
    try:
        return receiver.recv()
    except EOFError as error:
        process.join()
        raise KvlibError(
            f"the memory probe of {path.name} at {tokens} tokens ended with status {process.exitcode}, "
            "expected a figure: free some memory, or leave the probes out"
        ) from error
    finally:
        receiver.close()
        process.join()


def _report(path: TargetPath, tokens: int, extra_bytes: int | None, mode: str) -> dict:
    return {"path": path.name, "prefix_tokens": tokens, "peak_extra_bytes": extra_bytes, "mode": mode}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kvlib.memory", description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="folder or hub id of the target model")
    parser.add_argument(
        "probes",
        nargs="+",
        metavar="PATH:TOKENS",
        help="native, direct, direct_stock, a --map's name, or that name with @ and a way",
    )
    parser.add_argument(
        "--map", action="append", default=[], metavar="PATH=FILE", help="a path's map, as safetensors"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="within a probe")
    parser.add_argument("--jobs", type=int, default=1, help="probes at a time, on a CPU")
    given = parser.parse_args(arguments)
    files = dict(text.split("=", 1) for text in given.map)
    maps = {name: load_map(Path(file), pair=None).to(given.device) for name, file in files.items()}
    probes = [_parse(text, maps) for text in given.probes]
    torch.set_num_threads(1)  # no thread pool before the forks
    keep_no_freed_pages()
    target = load_model(given.target, dtype=getattr(torch, given.dtype), device=given.device)
    make_resident(target)
    for report in run_probes(target, probes, threads=given.threads, jobs=given.jobs):
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


def _parse(text: str, maps: dict[str, CacheMap]) -> tuple[TargetPath, int]:
    name, _, tokens = text.rpartition(":")
    paths = {path.name: path for path in standard_paths(maps)}
    base, way = split_name(name)
    if base in maps and way in WAYS:
        paths |= {path.name: path for path in mode_paths(base, maps[base], [way])[0]}
    if name not in paths or not tokens.isdigit() or int(tokens) < 2:
        raise KvlibError(
            f"probe {text!r} given, expected PATH:TOKENS with 2 tokens or more and a path of "
            f"{', '.join(paths)}, or a --map's name, {MARK} and a way of {', '.join(WAYS)}"
        )
    return paths[name], int(tokens)


if __name__ == "__main__":
    try:
        main()
    except KvlibError as error:
        sys.exit(f"kvlib.memory: {error}")
