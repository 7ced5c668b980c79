"""Stored batches on their way to a device: the next one is read and copied while this one is worked on."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch

from kvlib.cache import PrefixCache
from kvlib.errors import KvlibError
from kvlib.room import out_of_memory

Item, Loaded = TypeVar("Item"), TypeVar("Loaded")


def moved(value, device: torch.device):
    """The value with every tensor in it on the device: lists, tuples, dicts, dataclasses and caches are gone through.

    Towards a card tensors go by way of pinned memory, so that the copy waits for nobody. On the processor nothing is copied.
    """
    return _each(value, lambda tensor: _to(tensor, device))


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def _each(value, change: Callable[[torch.Tensor], torch.Tensor]):
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PrefixCache):
        keys, values = ([change(t) for t in tensors] for tensors in (value.keys, value.values))
        valid, ids = (None if t is None else change(t) for t in (value.valid, value.input_ids))
        return value.like(keys, values, valid, ids)
    if isinstance(value, dict):
        return {key: _each(one, change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(one, change) for one in value)
    if is_dataclass(value):
        return replace(
            value, **{field.name: _each(getattr(value, field.name), change) for field in fields(value)}
        )
    return value


@contextlib.contextmanager
def ahead(
    items: Iterable[Item], load: Callable[[Item], Loaded], device: torch.device, *, thread: bool | None = None
) -> Iterator[Iterator[Loaded]]:
    """Within the block, an iterator over `load` of each item, moved to the device.

    One item is loaded ahead, by one thread; what it raises comes up at its item. When the block is left, whatever
    for, no thread is left. thread: whether there is one; only for a card, when None: on the processor stored batches
    are views of files, and reading them ahead would take the cores from the work.
    """
    if not (device.type == "cuda" if thread is None else thread):
        yield (moved(load(item), device) for item in items)
        return
    with ThreadPoolExecutor(1, "kvlib-ahead") as pool:
        lane = _Lane(device)
        yield _one_ahead(iter(items), lambda item: pool.submit(lane.load, load, item), lane)


def _one_ahead(items: Iterator, submit, lane: "_Lane") -> Iterator:
    coming = [submit(item) for item in itertools.islice(items, 1)]
    while coming:
        ready = [lane.arrived(_result(coming.pop()))]
        coming += [submit(item) for item in itertools.islice(items, 1)]
        yield ready.pop()  # not held on to: two batches are on the device, the one that is worked on and the next


def _result(future: Future):
    """What was loaded; one sentence where the device has no room for two batches."""
    try:
        return future.result()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise KvlibError(
            "memory ran out while the next stored batch was loaded, expected room for two of them: lower evaluation.batch_prompts or "
            "training.prompts_per_step"
        ) from error


class _Lane:
    """Copies towards a card in a stream of their own; elsewhere plain copies."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(self, load: Callable, item):
        """In the loading thread: (the moved value, the event that says it is there or None)."""
        if self.stream is None:
            return moved(load(item), self.device), None
        with torch.cuda.stream(self.stream):
            value = moved(load(item), self.device)
            return value, self.stream.record_event()

    def arrived(self, loaded):
        """In the caller's thread: its stream waits for the copy, and the memory is kept until that stream is done with it."""
        value, event = loaded
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            _each(value, lambda tensor: (tensor.record_stream(current), tensor)[1])
        return value
