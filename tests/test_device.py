"""Where a profile's models live, and one clear sentence where they cannot."""

import pytest
import torch
from tiny import refused

from kvlib.study.device import device_name, device_of, training_dtype
from kvlib.study.profile import load_profile


def profile(device: str, **changes):
    return load_profile("smoke", {"device": device, **changes})


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card of 2018")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)


def test_auto_takes_the_card_where_there_is_one(monkeypatch, card):
    assert device_of(profile("auto")) == torch.device("cuda", 0) and device_of(profile("cpu")).type == "cpu"
    assert device_name(torch.device("cuda", 0)) == "a card of 2018"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(profile("auto")).type == "cpu" and device_name(torch.device("cpu")) == "cpu"


def test_cuda_without_cuda_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    refused(
        lambda: device_of(profile("cuda")),
        match="build for processors alone.* install a CUDA build of torch, see requirements-gpu.txt",
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    refused(lambda: device_of(profile("cuda")), match="torch sees no card.* nvidia-smi")


@pytest.mark.parametrize("name", ["pair.dtype", "training.dtype"])
def test_a_card_without_bfloat16_is_refused_where_the_profile_names_it(card, name):
    refused(
        lambda: device_of(profile("cuda", **{name: "bfloat16"})),
        match=f"{name} is bfloat16.*set {name} to float32",
    )
    assert device_of(profile("cuda")).type == "cuda"


def test_auto_training_asks_the_device_that_trains(card):
    assert training_dtype("auto", torch.device("cuda", 0)) == torch.float32
    assert training_dtype("bfloat16", torch.device("cuda", 0)) == torch.bfloat16
    assert training_dtype("auto") == torch.float32  # the card's answer, not the processor's
