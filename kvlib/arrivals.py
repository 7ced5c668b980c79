"""Who waits for whom when a target reads a cache that its source is still writing: one event per layer.

`Turns` is for a CPU: the source works in a thread of its own. `Streams` is for CUDA: it works in a stream of its own.
Both have start, written, wait and finish; `arrivals_for` chooses.
"""

import contextlib
import threading
from collections.abc import Callable

import torch

from kvlib.errors import KvlibError


class SourceStopped(Exception):
    """Raised in the source's thread when nobody waits for its layers any more."""


class Turns:
    """The source and the target in two threads that take turns, each with all cores while it works.

    Running at once would have two teams of threads on the same cores. So a source that has finished a layer rests as
    long as the target reads layers that are there, and works on when the target asks for one that is not.
    """

    def __init__(self, layers: int):
        self.layers, self.there = layers, set()
        self.asked: int | None = None  # the layer that the target waits for or reads, None between its passes
        self.failure: BaseException | None = None
        self._stopped, self._thread, self._change = False, None, threading.Condition()

    def start(self, work: Callable[[], None]) -> None:
        """Do the source's work in a thread, with the modes of torch that hold in this one."""
        modes = _modes_of_this_thread()

        def run():
            try:
                with contextlib.ExitStack() as stack:
                    for mode in modes:
                        stack.enter_context(mode)
                    work()
            except BaseException as error:  # whoever waits learns of it
                with self._change:
                    self.failure = error
                    self._change.notify_all()

        self._thread = threading.Thread(target=run, name="kvlib-source")
        self._thread.start()

    def written(self, layer: int, whole: bool) -> None:
        """The source has written to a layer, or all of it; returns when it is the source's turn again."""
        with self._change:
            if whole:
                self.there.add(layer)
                self._change.notify_all()
                self._change.wait_for(lambda: self._stopped or self.asked not in self.there)
            if self._stopped and not self.whole:
                raise SourceStopped

    def wait(self, layer: int) -> bool:
        """Returns true when a layer can be read, false when the source has failed before it; see `failure`."""
        if self.asked is None and self.whole:
            return True
        with self._change:
            self.asked = layer
            self._change.notify_all()
            self._change.wait_for(lambda: layer in self.there or self.failure is not None)
            found = layer in self.there
            if self.whole or not found:
                self.asked = None
                self._change.notify_all()
            return found

    @property
    def whole(self) -> bool:
        return len(self.there) == self.layers

    def finish(self, *, stop: bool) -> None:
        """Wait until the source's thread has ended: with its work, or, when `stop`, at its next layer."""
        with self._change:
            self._stopped = self._stopped or stop
            self.asked = None
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()


class Streams:
    """The source in a CUDA stream of its own, the target in the caller's; the host only ever queues work."""

    def __init__(self, layers: int, device: torch.device):
        self.layers, self.device, self.failure = layers, device, None
        self.stream = torch.cuda.Stream(device)
        self.events: dict[int, torch.cuda.Event] = {}

    def start(self, work: Callable[[], None]) -> None:
        # Tokens and the cache's memory are the caller's stream's: what it did with them comes first.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            try:
                work()
            except Exception as error:  # in queueing
                self.failure = error

    def written(self, layer: int, whole: bool) -> None:
        if not whole:
            return
        self.events[layer] = torch.cuda.Event()
        self.events[layer].record(self.stream)

    def wait(self, layer: int) -> bool:
        """Has the caller's stream wait for a layer, not the host; false when the source has failed before it."""
        if layer not in self.events:
            return False
        torch.cuda.current_stream(self.device).wait_event(self.events[layer])
        return True

    @property
    def whole(self) -> bool:
        return len(self.events) == self.layers

    def finish(self, *, stop: bool) -> None:
        # The cache is freed in the caller's stream, which must not reuse its memory while the source writes there.
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def arrivals_for(device: torch.device, layers: int) -> Turns | Streams:
    """What fits the device. Raises KvlibError where there is nothing."""
    if device.type not in ("cpu", "cuda"):
        raise KvlibError(
            f"a pipeline asked for on {device.type}, expected cpu or cuda: use kvlib.prefill and kvlib.handoff one after the other"
        )
    return Streams(layers, device) if device.type == "cuda" else Turns(layers)


def _modes_of_this_thread() -> list[contextlib.AbstractContextManager]:
    """What torch keeps per thread and a pass depends on: inference mode, autocast."""
    kind = "cpu"
    return [
        torch.inference_mode(torch.is_inference_mode_enabled()),
        torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)),
    ]
