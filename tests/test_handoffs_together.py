"""Several handoffs into one target, in any order and from threads; what happens to the target within a block."""

import copy
import threading

import pytest
import torch
from tiny import refused, tiny_llama, tokens

from kvlib import DirectMap, handoff, prefill


def as_it_was(model, ids, native) -> bool:
    """Whether the model is its own again, and gives its own logits."""
    patched = [m for m in model.modules() if "forward" in vars(m)]
    ours = [name for name in vars(model) if "kvlib" in name]
    return (
        model.config._attn_implementation == "sdpa"
        and not patched
        and not ours
        and torch.equal(model(ids).logits, native)
    )


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 2, 1], [1, 0, 2], [2, 0, 1], [1, 2, 0]])
def test_handoffs_may_be_left_in_any_order(order):
    model, ids = tiny_llama(), tokens(1, 9)
    native = model(ids).logits
    begun = [handoff(model, prefill(model, ids[:, :-1]), DirectMap()) for _ in order]
    for one in begun:
        one.__enter__()
    left, read_by = set(), set()
    for number in order:
        begun[number].__exit__(None, None, None)
        left.add(number)
        at_work = max(set(order) - left, default=None)
        if at_work is not None and at_work not in read_by:  # the last one begun of those that are left
            read_by.add(at_work)
            found = begun[at_work].logits(ids[:, -1:])[:, -1]
            assert torch.allclose(found, native[:, -1], atol=1e-5)
            refused(lambda: model(ids), match="on another cache or on none")
    assert as_it_was(model, ids, native)


def test_a_second_thread_is_refused_before_anything_is_changed():
    model, ids, found = tiny_llama(), tokens(1, 9), []
    native, prefix = model(ids).logits, prefill(model, ids[:, :-1])

    def enter():
        with pytest.raises(Exception) as caught:  # noqa: PT011 - what it is, is looked at below
            handoff(model, prefix, DirectMap()).__enter__()
        found.append(caught.value)

    with handoff(model, prefix, DirectMap()) as active:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert torch.allclose(active.logits(ids[:, -1:])[:, -1], native[:, -1], atol=1e-5)

    def again():
        raise found[0]

    refused(again, match="another thread's is not left")
    assert as_it_was(model, ids, native)
    thread = threading.Thread(target=lambda: found.append(read(model, prefix, ids)))  # and after it, it may
    thread.start()
    thread.join()
    assert torch.allclose(found[1], native[:, -1], atol=1e-5)


def read(model, prefix, ids) -> torch.Tensor:
    with torch.no_grad(), handoff(model, prefix, DirectMap()) as active:
        return active.logits(ids[:, -1:])[:, -1]


def test_a_thread_that_is_refused_has_not_used_its_cache_up():
    from test_maps import random_residual

    model, ids, failed = tiny_llama(), tokens(1, 9), []
    prefix = prefill(model, ids[:, :-1])

    def enter():
        try:
            handoff(model, prefix, random_residual(), "in_place").__enter__()
        except Exception as error:
            failed.append(error)

    with handoff(model, prefix.clone(), DirectMap()):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert failed and prefix.corrected_by is None


def test_threads_that_share_a_target_are_answered_rightly_or_refused():
    model, ids, odd, answered = tiny_llama(), tokens(1, 9), [], []
    native = model(ids).logits
    prefix = prefill(model, ids[:, :-1])

    def work():
        for _ in range(20):
            try:
                gap = float((read(model, prefix, ids) - native[:, -1]).abs().max())
                (answered if gap < 1e-4 else odd).append(gap)
            except Exception as error:
                if "another thread's is not left" not in str(error):
                    odd.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert odd == [] and answered
    assert as_it_was(model, ids, native)


def test_attention_chosen_within_a_block_stops_the_handoff_and_stays_chosen():
    model, ids = tiny_llama(), tokens(1, 9)
    prefix = prefill(model, ids[:, :-1])
    with handoff(model, prefix, DirectMap()), handoff(model, prefix, DirectMap()) as active:
        model.set_attn_implementation("eager")
        refused(lambda: active.logits(ids[:, -1:]), match="set to 'eager' attention within a handoff")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert as_it_was(model, ids, model(ids).logits)


def test_a_model_is_not_copied_whole_within_a_block(tmp_path):
    model, ids = tiny_llama(), tokens(1, 9)
    native = model(ids).logits
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()):
        refused(lambda: copy.deepcopy(model), match="before or after the `with` block")
        refused(lambda: torch.save(model, tmp_path / "model"), match="before or after the `with` block")
        model.save_pretrained(tmp_path)  # its weights and settings are its own
    assert as_it_was(copy.deepcopy(model), ids, native)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.allclose(loaded(ids).logits, native, atol=1e-5)


def test_a_layer_that_somebody_replaced_within_a_block_stays_replaced():
    model, ids = tiny_llama(), tokens(1, 9)
    layer = model.model.layers[0].self_attn.q_proj
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()):
        theirs = layer.forward = lambda x: torch.zeros(*x.shape[:-1], layer.out_features)
    assert layer.forward is theirs
    del layer.forward
    assert [m for m in model.modules() if "forward" in vars(m)] == []
