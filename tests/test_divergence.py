"""KL and agreement against float64, the oracle against generate, and broken logits refused."""

import pytest
import torch
from tiny import tiny_llama, tokens

from kvlib import DirectMap, KvlibError, prefill
from kvlib.divergence import divergence, oracle_reference, path_divergence, text_reference


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
