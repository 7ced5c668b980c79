"""KL and agreement against float64, the oracle against generate, and broken logits refused."""

import pytest
import torch
from tiny import is_one_sentence, tiny_llama, tokens

from kvlib import DirectMap, KvlibError, prefill
from kvlib.divergence import (
    both_references,
    divergence,
    oracle_reference,
    path_divergence,
    text_reference,
)


def test_kl_equals_the_formula_in_float64():
    generator = torch.Generator().manual_seed(0)
    native, path = torch.randn(2, 3, 4, 500, generator=generator) * 5
    forced = torch.randint(500, (3, 4), generator=generator)
    found = divergence(native, path, forced)
    p, q = (x.double().log_softmax(-1) for x in (native, path))
    assert torch.allclose(found.kl.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4)
    assert torch.equal(found.agree, native.argmax(-1) == path.argmax(-1))
    picked = p.exp().gather(-1, forced.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(found.native_probability.double(), picked, rtol=1e-4)


def test_kl_of_a_distribution_with_itself_is_zero():
    logits = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0)) * 20
    found = divergence(logits, logits, torch.zeros(2, 3, dtype=torch.long))
    assert float(found.kl.abs().max()) <= 1e-6 and bool(found.agree.all())


def test_the_oracle_is_greedy_generation_that_no_end_of_text_stops():
    model, ids = tiny_llama(), tokens(2, 10)
    generated = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)[
        :, 10:
    ]
    reference = oracle_reference(model, ids, 8)
    assert torch.equal(reference.forced, generated)
    assert torch.equal(reference.inputs, torch.cat([ids[:, -1:], generated[:, :-1]], 1))


def test_one_pass_over_the_text_gives_the_decoding_oracles_states():
    model, ids = tiny_llama(), tokens(2, 10)
    oracle = oracle_reference(model, ids, 8)
    text = text_reference(model, ids, oracle.forced)
    assert torch.equal(text.inputs, oracle.inputs) and torch.allclose(text.hidden, oracle.hidden, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 8])
def test_both_references_from_one_reading_of_the_prompts_are_those_of_two(steps):
    model, ids = tiny_llama(), tokens(2, 10 + steps)
    head, tail = ids[:, :10], ids[:, 10:]
    both = both_references(model, head, tail)
    for name, alone in (
        ("oracle", oracle_reference(model, head, steps)),
        ("text", text_reference(model, head, tail)),
    ):
        assert torch.equal(both[name].inputs, alone.inputs) and torch.equal(both[name].forced, alone.forced)
        assert torch.allclose(both[name].hidden, alone.hidden, atol=1e-5)


def test_divergence_of_many_rows_is_that_of_each_alone():
    generator = torch.Generator().manual_seed(0)
    native, path = torch.randn(2, 3, 7, 50, generator=generator)
    forced = torch.randint(50, (3, 7), generator=generator)
    found = divergence(native, path, forced)
    for n, s in ((0, 0), (1, 0), (1, 1), (2, 6)):
        alone = divergence(*(x[n : n + 1, s : s + 1] for x in (native, path, forced)))
        for name in ("kl", "agree", "native_token", "path_token", "native_probability", "path_probability"):
            assert torch.allclose(getattr(found, name)[n, s].double(), getattr(alone, name).double())


def test_the_targets_own_cache_has_no_divergence_and_feeding_the_last_token_twice_has():
    model, ids = tiny_llama(), tokens(2, 10)
    reference = oracle_reference(model, ids, 6)
    right = path_divergence(model, prefill(model, ids[:, :-1]), DirectMap(), reference)
    wrong = path_divergence(model, prefill(model, ids), DirectMap(), reference)
    assert float(right.kl.abs().max()) < 1e-5 and bool(right.agree.all())
    assert float(wrong.kl.mean()) > 100 * float(right.kl.abs().max())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(broken):
    good = torch.zeros(1, 2, 5)
    bad = good.clone()
    bad[0, 1, 3] = broken
    for native, path, name in ((bad, good, "native"), (good, bad, "path")):
        with pytest.raises(KvlibError, match=f"{name} logits hold NaN"):
            divergence(native, path, torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("native", "path", "forced", "sentence"),
    [
        (torch.zeros(1, 2, 5), torch.zeros(1, 1, 5), torch.zeros(1, 2, dtype=torch.long), "of both"),
        (torch.zeros(1, 2, 5), torch.zeros(2, 2, 5), torch.zeros(1, 2, dtype=torch.long), "of both"),
        (torch.zeros(1, 2, 5), torch.zeros(1, 2, 6), torch.zeros(1, 2, dtype=torch.long), "of both"),
        (torch.zeros(2, 5), torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), "of both"),
        (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5), torch.zeros(1, 1, dtype=torch.long), "forced tokens"),
        (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5), torch.full((1, 2), 5), "below 5"),
        (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5), torch.full((1, 2), -1), "below 5"),
        (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5), torch.zeros(1, 2), "forced tokens"),
        (torch.zeros(1, 0, 5), torch.zeros(1, 0, 5), torch.zeros(1, 0, dtype=torch.long), "forced tokens"),
    ],
)
def test_logits_that_would_only_broadcast_are_refused(native, path, forced, sentence):
    with pytest.raises(KvlibError, match=sentence) as refusal:
        divergence(native, path, forced)
    assert is_one_sentence(refusal.value)


def test_references_are_of_one_step_at_least_and_within_the_positions():
    model, ids = tiny_llama(max_position_embeddings=12), tokens(2, 10)
    assert oracle_reference(model, ids, 3).forced.shape == (2, 3)
    assert text_reference(model, ids, ids[:, :3]).forced.shape == (2, 3)
    for call, sentence in (
        (
            lambda: oracle_reference(model, ids, 4),
            "4 steps asked after a prompt of 10 tokens, expected 1 to 3",
        ),
        (lambda: oracle_reference(model, ids, 0), "0 steps"),
        (lambda: text_reference(model, ids, ids[:, :4]), "4 steps"),
        (lambda: text_reference(model, ids, ids[:, :0]), "0 steps"),
        (lambda: text_reference(model, ids, ids[:1, :3]), "one row per prompt"),
        (lambda: text_reference(model, ids, ids[:, :3].float()), "whole numbers"),
        (lambda: text_reference(model, ids, ids[:, :3] + 100), "vocabulary"),
    ):
        with pytest.raises(KvlibError, match=sentence) as refusal:
            call()
        assert is_one_sentence(refusal.value)


def test_an_oracle_of_a_broken_target_is_refused():
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(KvlibError, match="native logits hold NaN"):
        oracle_reference(model, tokens(1, 5), 3)


def test_a_cache_and_a_reference_are_of_as_many_prompts():
    model, ids = tiny_llama(), tokens(2, 10)
    reference = oracle_reference(model, ids, 3)
    with pytest.raises(KvlibError, match="a cache of 1 prompts given with a reference of 2"):
        path_divergence(model, prefill(model, ids[:1, :-1]), DirectMap(), reference)
