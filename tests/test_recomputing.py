"""Layers computed again in the backward pass: the same loss and gradients, to the last bit, out of less memory."""

from dataclasses import replace

import pytest
import torch
from test_maps import KINDS, random_residual
from test_training_step import largest_error, loss_and_gradients, ridge, setting
from tiny import refused

from kvlib.training import Frozen


def ways(target):
    """(kept, computed again): one padded batch, as a card takes it, with and without checkpointing."""
    head = target.lm_head.weight.detach()
    return Frozen.of(target, head, None), Frozen.of(target, head, None, recompute=True)


@pytest.mark.parametrize("base", ["direct", "ridge"])
@pytest.mark.parametrize(("residual", "features"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_the_same_bits(tmp_path, residual, features, base, dtype):
    target, batch = setting(tmp_path, dtype)
    batch = replace(batch, hidden=batch.hidden.float())
    cache_map = replace(
        random_residual(residual, features), base=ridge(torch.float32) if base == "ridge" else None
    )
    head = target.lm_head.weight.detach().float()
    kept, again = (
        loss_and_gradients(Frozen.of(target, head, None, recompute), cache_map, batch)
        for recompute in (False, True)
    )
    assert kept[0] == again[0] > 0
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(kept[1], again[1]))


def test_on_the_processor_it_takes_the_padded_way_and_differs_by_rounding(tmp_path):
    target, batch = setting(tmp_path, torch.float32)
    head, rows = target.lm_head.weight.detach(), batch.inputs.numel()
    cache_map = random_residual("linear", "own")
    fast, again = (Frozen.of(target, head, rows, recompute) for recompute in (False, True))
    assert fast.body is not None and again.body is None
    (loss, ours), (wanted, theirs) = (
        loss_and_gradients(frozen, cache_map, batch) for frozen in (again, fast)
    )
    assert loss == pytest.approx(wanted, rel=1e-4) and largest_error(ours, theirs) < 1e-3


def kept_bytes(frozen, cache_map, batch) -> int:
    """What autograd keeps for the backward pass, each piece of memory once."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_and_gradients(frozen, cache_map, batch)
    return sum(held.values())


def test_what_layers_compute_is_not_kept(tmp_path):
    target, batch = setting(tmp_path, torch.float32)
    for residual, features in KINDS:
        kept, again = (
            kept_bytes(frozen, random_residual(residual, features), batch) for frozen in ways(target)
        )
        assert again < 0.5 * kept, (residual, features)


def test_the_model_is_left_as_it_was(tmp_path):
    target, batch = setting(tmp_path, torch.float32)
    before = target.config._attn_implementation
    loss_and_gradients(ways(target)[1], random_residual("quadratic", "rms"), batch)
    assert target.config._attn_implementation == before
    assert all("forward" not in vars(module) for module in target.modules())


def test_a_model_that_does_not_list_its_layers_is_refused(tmp_path):
    target, batch = setting(tmp_path, torch.float32)
    layers, target.model.layers = target.model.layers, target.model.layers[:2]
    refused(
        lambda: loss_and_gradients(ways(target)[1], random_residual("linear", "own"), batch),
        match="does not list its 3 layers.* training.checkpoint_activations",
    )
    target.model.layers = layers
