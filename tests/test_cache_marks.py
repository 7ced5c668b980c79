"""No memory is corrected twice: not through a view, not by handoffs prepared side by side, not after a failure."""

import copy

import pytest
import torch
from test_maps import random_residual
from tiny import refused, tiny_llama, tokens

from kvlib import DirectMap, PrefixCache, handoff, load_map, prefill, save_map
from kvlib.streaming import moved

VIEWS = {
    "slice": lambda whole: whole.slice(5),
    "select": lambda whole: whole.select(slice(0, 1)),
    "same dtype": lambda whole: whole.to(torch.float32),
    "same device": lambda whole: moved(whole, torch.device("cpu")),
    "copied object": copy.copy,
    "view of a view": lambda whole: whole.slice(6).select(slice(0, 2, 2)).slice(3),
}
COPIES = {
    "clone": lambda whole: whole.clone(),
    "other dtype": lambda whole: whole.to(torch.float64),
    "copy asked for": lambda whole: whole.to(torch.float32, copy=True),
    "listed prompts": lambda whole: whole.select([0]),
    "deep copy": copy.deepcopy,
}


def use_up(model, prefix, ids, mode="in_place"):
    with torch.no_grad(), handoff(model, prefix, random_residual(), mode) as active:
        active.logits(ids[: prefix.batch, -1:])


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("view_first", [True, False])
def test_what_shares_memory_with_a_corrected_cache_is_not_corrected_again(view, view_first):
    model, ids, cache_map = tiny_llama(), tokens(2, 9), random_residual()
    whole = prefill(tiny_llama(1), ids[:, :-1])
    part = view(whole)
    first, second = (part, whole) if view_first else (whole, part)
    use_up(model, first, ids)
    assert second.corrected_by == "residual"
    for mode in ("in_place", "absorbed", "materialised"):
        refused(lambda mode=mode: handoff(model, second, cache_map, mode), match="residual map has corrected")


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_made_before_is_still_the_sources_own(copied):
    model, ids, whole = tiny_llama(), tokens(2, 9), prefill(tiny_llama(1), tokens(2, 9)[:, :-1])
    other = copied(whole)
    use_up(model, whole, ids)
    assert other.corrected_by is None and whole.corrected_by == "residual"
    whole.corrected_by = None
    other.corrected_by = "residual"
    assert whole.corrected_by is None


def test_a_view_of_a_cache_whose_correction_failed_half_way_is_nobodys_to_use(monkeypatch):
    model, ids, cache_map = tiny_llama(), tokens(2, 9), random_residual("quadratic")
    whole, other = (prefill(tiny_llama(1), ids[:, :-1]) for _ in range(2))
    part, correct_ = whole.slice(5), type(cache_map).correct_

    def fails_on_the_second(self, layer, *arguments):
        if layer == 1:
            raise MemoryError
        correct_(self, layer, *arguments)

    monkeypatch.setattr(type(cache_map), "correct_", fails_on_the_second)
    with (
        pytest.raises(MemoryError),
        torch.no_grad(),
        handoff(model, part, cache_map, compiled=False) as active,
    ):
        active.logits(ids[:, 5:6])
    with pytest.raises(MemoryError):
        cache_map.apply_(other)
    for used in (whole, part, other, other.clone(), cache_map.materialise(whole)):
        refused(lambda used=used: handoff(model, used, DirectMap()), match="partly applied residual")


def test_an_applied_map_marks_all_views_and_a_direct_one_marks_none():
    whole = prefill(tiny_llama(), tokens(1, 8))
    part = whole.slice(4)
    DirectMap().apply_(part)
    assert whole.corrected_by is None
    random_residual().apply_(part)
    assert whole.corrected_by == "residual"


@pytest.mark.parametrize(("first", "then"), [("in_place", "in_place"), ("in_place", "absorbed")])
def test_a_handoff_prepared_before_another_used_the_cache_up_is_refused_on_entering(first, then):
    model, ids, cache_map = tiny_llama(), tokens(1, 9), random_residual()
    prefix = prefill(tiny_llama(1), ids[:, :-1])
    one, two = (handoff(model, prefix, cache_map, mode) for mode in (first, then))
    with torch.no_grad(), one:
        one.logits(ids[:, -1:])
        refused(two.__enter__, match="corrected already")
    refused(two.__enter__, match="residual map has corrected already")
    assert torch.isfinite(model(ids).logits).all()  # the target is as it was


def test_a_cache_corrected_under_a_handoff_that_reads_it_is_not_read_on():
    one, two, ids = tiny_llama(), tiny_llama(2), tokens(1, 9)
    for mode, cache_map in (("absorbed", random_residual()), ("absorbed", DirectMap())):
        prefix = prefill(tiny_llama(1), ids[:, :-1])
        with torch.no_grad(), handoff(one, prefix, cache_map, mode) as active:
            active.logits(ids[:, -1:])
            use_up(two, prefix.slice(6), ids)
            refused(lambda active=active: active.logits(ids[:, -1:]), match="since it was begun")


def test_two_background_handoffs_over_one_cache_correct_it_once():
    one, two, ids = tiny_llama(), tiny_llama(2), tokens(1, 9)
    prefix, cache_map = prefill(tiny_llama(1), ids[:, :-1]), random_residual()
    wanted = cache_map.materialise(prefix)
    with (
        torch.no_grad(),
        handoff(one, prefix, cache_map, "background") as a,
        handoff(two, prefix, cache_map, "background") as b,
    ):
        for active in (a, b, a):
            active.logits(ids[:, -1:])
        refused(lambda: b.logits(ids[:, -1:]), match="since it was begun")
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(prefix.keys, wanted.keys))


def test_what_moves_to_its_own_device_keeps_who_computed_it():
    prefix = prefill(tiny_llama(), tokens(1, 8))
    there = moved({"prefix": prefix}, torch.device("cpu"))["prefix"]
    assert there.origin.identity == prefix.origin.identity
    assert torch.equal(there.input_ids, prefix.input_ids)


def test_what_no_tensor_can_become_is_refused():
    prefix = prefill(tiny_llama(), tokens(1, 8))
    for given in ("nonsense", "cuda:99"):
        refused(lambda given=given: prefix.to(given), match="a device that is here or a dtype")


def test_a_padded_batch_is_not_prefilled_and_a_tokenizers_whole_mask_is_taken():
    model, ids = tiny_llama(), tokens(2, 8)
    mask = torch.ones_like(ids)
    assert torch.equal(prefill(model, ids, attention_mask=mask).keys[2], prefill(model, ids).keys[2])
    mask[0, :2] = 0
    refused(lambda: prefill(model, ids, attention_mask=mask), match="PrefixCache.keys, values, valid=")
    PrefixCache(prefill(model, ids).keys, prefill(model, ids).values, valid=mask.bool())  # as it says


def test_a_file_of_a_map_is_a_path_and_a_map_comes_before_it(tmp_path):
    refused(lambda: load_map(None, pair=None), match="a map's file")
    refused(lambda: load_map(3, pair=None), match="a map's file")
    refused(lambda: save_map("m", DirectMap(), pair="p"), match="pass the map first")
    refused(lambda: save_map(DirectMap(), None, pair="p"), match="a map's file")
    save_map(DirectMap(), tmp_path / "m", pair="p")
    assert load_map(str(tmp_path / "m"), pair="p").kind == "direct"
