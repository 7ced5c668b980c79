"""The gate passes for the target's own cache through every map kind and mode, and only for it."""

from dataclasses import replace

import pytest
import torch
from tiny import LLAMA3_ROPE, tiny_llama, tokens

from kvlib import KvlibError
from kvlib.cache import Geometry, prefill
from kvlib.maps import DirectMap, ResidualMap
from kvlib.maps.residual import WEIGHTS
from kvlib.study import gate as gate_module
from kvlib.study.gate import MODES, Native, agreement, gate, gates, identity_maps, worst


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": LLAMA3_ROPE}, {"num_key_value_heads": 6}])
def test_every_mode_and_map_kind_gives_natives_logits_back(changes):
    target = tiny_llama(**changes)
    found = gate(target, Native.of(target, tokens(6, 40)), 30, tolerance=1e-3)
    assert found["passed"] and set(found["max_abs_difference"]) == set(MODES)
    assert set(found["by_map"]) == set(identity_maps(Geometry.of(target)))
    # 4 prompts, 11 tokens read, 5 maps of which 3 can be absorbed
    assert found["prompts"] == 4 and found["comparisons"] == 4 * 11 * 101 * (5 * 2 + 3)


def test_a_prefix_of_all_there_is_reads_one_token():
    target = tiny_llama()
    assert gate(target, Native.of(target, tokens(1, 40)), 40, 1e-3)["comparisons"] == 101 * 13


def test_a_cache_that_is_not_the_targets_own_fails_the_gate(monkeypatch):
    target, other = tiny_llama(), tiny_llama(seed=1)

    def of_another(model, ids, **options):
        _, hidden = prefill(target, ids, **options)
        return prefill(other, ids), hidden

    monkeypatch.setattr(gate_module, "prefill", of_another)
    with pytest.raises(
        KvlibError, match="the gate failed: the target's own cache handed back over 30 tokens"
    ):
        gate(target, Native.of(target, tokens(2, 40)), 30, 1e-3)


def learned_maps():
    """A map that can be absorbed and one that cannot, each with weights that change the cache."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, features in (("learned", "own"), ("ridge", "rms")):
        made = ResidualMap.initial(
            torch.ones(3, 2), torch.ones(3, 2), 16, 4, features=features, generator=generator
        )
        found[name] = replace(made, **{w: torch.randn_like(getattr(made, w)) * 0.2 for w in WEIGHTS})
    return found


def test_the_ways_of_applying_a_map_agree_and_the_record_says_how_much_it_changes():
    target, prompts = tiny_llama(), tokens(6, 40)
    prefix = prefill(tiny_llama(seed=1), prompts[:, :29])
    kept = prefix.clone()
    learned, other = agreement(target, prefix, prompts[:, 29:], learned_maps(), 1e-3)
    assert set(learned["max_abs_difference"]) == {"in_place", "absorbed"}
    assert set(other["max_abs_difference"]) == {"in_place"}
    assert learned["prompts"] == 4 and learned["comparisons"] == 2 * 4 * 11 * 101
    for found in (learned, other):
        assert found["passed"] and found["moved"] > 100 * max(found["max_abs_difference"].values())
    assert all(torch.equal(a, b) for a, b in zip(prefix.keys, kept.keys))  # the cache is still the source's


def test_a_way_that_gives_other_logits_fails(monkeypatch):
    target, prompts = tiny_llama(), tokens(2, 40)
    prefix = prefill(tiny_llama(seed=1), prompts[:, :29])

    def forgetful(target, prefix, cache_map, mode, inputs):
        return through(target, prefix, DirectMap() if mode == "absorbed" else cache_map, mode, inputs)

    through = gate_module._through
    monkeypatch.setattr(gate_module, "_through", forgetful)
    with pytest.raises(KvlibError, match="the learned map gives logits that differ by .* between two ways"):
        agreement(target, prefix, prompts[:, 29:], learned_maps(), 1e-3)


def test_gates_are_one_per_length_that_the_prompts_have():
    found = gates(tiny_llama(), tokens(2, 40), [30, 8, 400], 4, 1e-3)
    assert [record["prefix_tokens"] for record in found] == [8, 30, 40]
    assert [record["comparisons"] for record in found] == [2 * 101 * 13 * read for read in (5, 5, 1)]
    found[1]["max_abs_difference"]["absorbed"] = 1.0
    assert worst(found) is found[1]


def test_identity_maps_change_no_vector():
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    angles = (torch.ones(1, 5, 16), torch.zeros(1, 5, 16))
    for cache_map in identity_maps(Geometry(3, 2, 16)).values():
        keys, values = cache_map.correct(1, x, x, angles)
        assert torch.equal(keys, x) and torch.equal(values, x)
