"""Stored batches stream in one ahead, errors arrive where they belong, and no thread is left."""

import threading

import pytest
import torch
from tiny import refused, tokens

from kvlib.divergence import Reference
from kvlib.streaming import ahead, moved

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvlib-ahead")]


def test_one_is_loaded_ahead_and_never_two():
    loaded, seen, there = [], [], threading.Event()

    def load(number):
        loaded.append(number)
        there.set()
        return number

    with ahead(range(5), load, CPU, thread=True) as stream:
        for number in stream:
            seen.append(number)
            assert there.wait(60)
            there.clear()
            assert len(loaded) <= number + 2  # this one and the next
    assert seen == loaded == [0, 1, 2, 3, 4] and threads() == []


@pytest.mark.parametrize("thread", [True, False])
def test_an_error_comes_up_at_its_own_batch_and_leaves_no_thread(thread):
    def load(number):
        if number == 2:
            raise ValueError("batch 2 is broken")
        return number

    seen = []
    with (
        pytest.raises(ValueError, match="batch 2 is broken"),
        ahead(range(5), load, CPU, thread=thread) as stream,
    ):
        seen += stream
    with pytest.raises(KeyError), ahead(range(5), load, CPU, thread=thread) as stream:
        for number in stream:
            seen.append(number)
            raise KeyError(number)
    assert seen[-1] == 0 and threads() == []


def test_on_the_processor_nothing_is_read_before_it_is_asked_for():
    loaded = []
    with ahead(range(3), loaded.append, CPU) as stream:
        next(stream)
    assert loaded == [0] and threads() == []


def test_every_tensor_of_a_batch_is_moved():
    reference = Reference(tokens(1, 2), tokens(1, 2), torch.ones(1, 2, 3))
    whole = moved([7, {"oracle": reference, "steps": 2}], torch.device("meta"))[1]["oracle"]
    assert all(t.device.type == "meta" for t in (whole.inputs, whole.forced, whole.hidden))


def test_no_room_for_a_second_batch_is_one_sentence():
    def load(number):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def read():
        with ahead(range(2), load, CPU, thread=True) as stream:
            next(stream)

    refused(read, match="lower evaluation.batch_prompts or training.prompts_per_step")
