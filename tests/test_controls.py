"""Controls are what they say: wrong content, wrong positions, random content, no content, wrong weights."""

import pytest
import torch
from tiny import tiny_llama, tokens

from kvlib import DirectMap, PrefixCache, ResidualMap, prefill
from kvlib.divergence import oracle_reference, path_divergence
from kvlib.pair import rotary_of
from kvlib.study.controls import (
    CONTROLS,
    Content,
    control_maps,
    donors_of,
    permuted_heads,
    random_like,
    shuffled,
)


@pytest.fixture(scope="module")
def target():
    return tiny_llama()


@pytest.fixture(scope="module")
def prompts():
    return tokens(3, 20)


@pytest.fixture(scope="module")
def own(target, prompts):
    return prefill(target, prompts[:, :-1])


def kl(target, cache, prompts):
    return path_divergence(target, cache, DirectMap(), oracle_reference(target, prompts, 6)).kl.mean()


def content(own, target, first=0, donors=None):
    return Content(own, donors or own, rotary_of(target), seed=3, first=first)


def test_rows_stored_in_another_order_change_nothing_but_turned_keys_do(target, own, prompts):
    order = torch.randperm(own.tokens, generator=torch.Generator().manual_seed(1))
    rows = PrefixCache([k[:, :, order] for k in own.keys], [v[:, :, order] for v in own.values])
    assert kl(target, rows, prompts) < 1e-5
    turned = shuffled(own, rotary_of(target), torch.Generator().manual_seed(1))
    assert kl(target, turned, prompts) > 0.01
    for before, after in zip(own.keys, turned.keys):  # a rotation keeps lengths
        assert torch.allclose(before.norm(dim=-1), after.norm(dim=-1), atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(own.values, turned.values))


def test_shuffling_by_the_order_as_it_is_gives_the_cache_back(own, target, monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))
    same = shuffled(own, rotary_of(target), torch.Generator())
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(own.keys, same.keys))


def test_random_caches_have_each_heads_mean_and_covariance(target):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 2, 1500, 4, generator=generator) @ torch.randn(4, 4, generator=generator) + 3.0
    cache = PrefixCache([x], [x * 2])
    drawn = random_like(cache, None, torch.Generator().manual_seed(5))
    for before, after in ((cache.keys[0], drawn.keys[0]), (cache.values[0], drawn.values[0])):
        assert not torch.equal(before, after)
        for head in range(2):
            a, b = before[0, head].double(), after[0, head].double()
            spread = a.T.cov().diagonal().sqrt().max()
            assert (a.mean(0) - b.mean(0)).abs().max() < 0.15 * spread
            assert (a.T.cov() - b.T.cov()).abs().max() < 0.2 * spread**2


def test_a_prompts_control_does_not_depend_on_its_batch(target, own):
    together = {kind: content(own, target).cache(kind) for kind in ("shuffled_positions", "random_moments")}
    for kind, whole in together.items():
        alone = content(own.select(slice(2, 3)), target, first=2).cache(kind)
        assert all(torch.equal(a[2:], b) for a, b in zip(whole.keys, alone.keys))


def test_the_zero_cache_is_zero_and_every_control_has_its_cache_and_map(target, own):
    learned = residual()
    maps = control_maps({"learned": learned, "wrong_trained": learned})
    for kind, of, said in CONTROLS.values():
        cache = content(own, target).cache(kind)
        assert cache.geometry == own.geometry and cache.tokens == own.tokens and of in maps and said
    assert all(not k.any() and not v.any() for k, v in zip(*_zero(own, target)))


def _zero(own, target):
    cache = content(own, target).cache("zeros")
    return cache.keys, cache.values


def residual(heads=2):
    made = ResidualMap.initial(
        torch.ones(3, heads), torch.ones(3, heads), 16, 4, generator=torch.Generator().manual_seed(0)
    )
    made.key_right.normal_(generator=torch.Generator().manual_seed(1))
    return made


def test_permuted_heads_moves_every_correction_to_another_head():
    learned = residual()
    moved = permuted_heads(learned)
    assert torch.equal(moved.key_left[:, 0], learned.key_left[:, 1])
    assert torch.equal(moved.key_right[:, 1], learned.key_right[:, 0])
    assert torch.equal(moved.key_scale, learned.key_scale)
    single = residual(heads=1)
    assert torch.equal(permuted_heads(single).key_left[1], single.key_left[0])  # the next layer's instead


def test_donors_come_from_another_article_where_there_is_one():
    assert donors_of(["a", "a", "b", "a"]) == [2, 2, 3, 2]
    assert donors_of(["a", "a"]) == [1, 0]


def test_another_prompts_cache_is_worse_than_the_right_one(target, own, prompts):
    donors = prefill(target, tokens(3, 19, seed=9))
    wrong = content(own, target, donors=donors).cache("other_prompt")
    assert kl(target, own, prompts) < 1e-5 < kl(target, wrong, prompts)
