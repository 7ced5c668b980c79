"""On CUDA the source works in a stream of its own: what is queued where, told by stand-ins for streams and events."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from tiny import refused

from kvlib.arrivals import Streams, arrivals_for


@pytest.fixture
def queued(monkeypatch):
    """What was queued, in order: (stream, what, for which)."""
    log, current = [], ["caller"]

    class Stream:
        def __init__(self, device=None, name="source"):
            self.name = name

        def wait_stream(self, other):
            log.append((self.name, "waits for stream", other.name))

        def wait_event(self, event):
            log.append((self.name, "waits for event", event.number))

    class Event:
        made = 0

        def __init__(self):
            self.number, Event.made = Event.made, Event.made + 1

        def record(self, stream):
            log.append((stream.name, "records event", self.number))

    @contextlib.contextmanager
    def stream(wanted):
        current.append(wanted.name)
        yield
        current.pop()

    stand_in = SimpleNamespace(
        Stream=Stream, Event=Event, stream=stream, current_stream=lambda device: Stream(name=current[-1])
    )
    monkeypatch.setattr(torch, "cuda", stand_in)
    return log, current


def test_the_source_follows_the_caller_and_the_caller_each_layer(queued):
    log, current = queued
    arrivals = arrivals_for(torch.device("cuda", 0), 2)
    assert isinstance(arrivals, Streams)

    def work():
        assert current[-1] == "source"
        arrivals.written(0, False)  # a chunk that is not the last
        for layer in range(2):
            arrivals.written(layer, True)

    arrivals.start(work)
    assert arrivals.whole and arrivals.wait(0) and arrivals.wait(1)
    arrivals.finish(stop=False)
    assert log == [
        ("source", "waits for stream", "caller"),
        ("source", "records event", 0),
        ("source", "records event", 1),
        ("caller", "waits for event", 0),
        ("caller", "waits for event", 1),
        ("caller", "waits for stream", "source"),
    ]


def test_a_source_that_fails_while_it_queues_is_told_of_at_the_layer_it_lacks(queued):
    arrivals = Streams(2, torch.device("cuda", 0))

    def work():
        arrivals.written(0, True)
        raise RuntimeError("on purpose")

    arrivals.start(work)
    assert arrivals.wait(0) and not arrivals.wait(1) and not arrivals.whole
    assert str(arrivals.failure) == "on purpose"


def test_other_devices_are_refused():
    refused(lambda: arrivals_for(torch.device("mps"), 2), match="expected cpu or cuda")
