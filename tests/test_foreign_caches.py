"""Another model's cache, another prompt's, another rope's: of the right shape, and refused all the same."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import LLAMA3_ROPE, refused, tiny_llama, tokens
from transformers import DynamicCache, StaticCache

from kvlib import DirectMap, ModelPair, PrefixCache, handoff, prefill
from kvlib.cache import cache_argument
from kvlib.origin import Origin, identity_of

MODES = ("absorbed", "in_place", "materialised")


# --- another model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_another_models_cache_of_the_same_shape_is_refused_when_the_source_is_named(mode):
    target, source, stranger = tiny_llama(0), tiny_llama(1), tiny_llama(2)
    ids = tokens(2, 9)
    foreign = prefill(stranger, ids[:, :-1])
    refused(
        lambda: handoff(target, foreign, DirectMap(), mode, source=source), match="computed by a llama model"
    )
    refused(
        lambda: handoff(target, foreign, DirectMap(), mode, source=identity_of(source)),
        match="expected the source",
    )
    with handoff(
        target, prefill(source, ids[:, :-1]), DirectMap(), mode, source=identity_of(source)
    ) as active:
        active.logits(ids[:, -1:])


def test_a_pair_takes_its_own_sources_cache_and_no_other():
    pair = ModelPair(tiny_llama(0), tiny_llama(1), None)
    ids = tokens(1, 9)
    expected = pair.target(ids).logits[:, -1:]
    own = pair.prefill(ids[:, :-1])
    with pair.handoff(own, DirectMap()) as active:
        ours = active.logits(ids[:, -1:])
    with handoff(pair.target, own, DirectMap()) as active:
        assert torch.equal(active.logits(ids[:, -1:]), ours)
    refused(lambda: pair.handoff(prefill(tiny_llama(2), ids), DirectMap()), match="expected the source")
    native = prefill(pair.target, ids[:, :-1])
    refused(lambda: pair.handoff(native, DirectMap()), match="expected the source")
    with pair.handoff(
        native, DirectMap(), source=pair.target
    ) as active:  # native in, native out: asked for by name
        assert torch.allclose(active.logits(ids[:, -1:]), expected, atol=1e-5)
    bare = PrefixCache(own.keys, own.values)
    refused(lambda: pair.handoff(bare, DirectMap()), match="unknown origin")
    with handoff(pair.target, bare, DirectMap()) as active:  # nobody asked whose it is
        assert torch.equal(active.logits(ids[:, -1:]), ours)


def test_an_identity_is_of_weights_not_of_the_object_name_or_dtype():
    assert identity_of(tiny_llama(0)) == identity_of(tiny_llama(0))
    assert identity_of(tiny_llama(0).bfloat16()) == identity_of(tiny_llama(0).bfloat16().float())
    renamed = tiny_llama(0)
    renamed.config.name_or_path = "another/name"
    assert identity_of(renamed) == identity_of(tiny_llama(0)) != identity_of(tiny_llama(1))


@settings(max_examples=20)
@given(which=st.integers(0, 10**6), factor=st.floats(1.02, 3.0))
def test_an_identity_changes_when_any_one_weight_matrix_does(which, factor):
    model = tiny_llama(0)
    weights = [weight for weight in model.parameters() if weight.ndim > 1]
    before = identity_of(model)
    weights[which % len(weights)].mul_(factor)
    assert identity_of(model) != before


def test_a_cache_keeps_the_identity_its_model_had_when_it_was_computed():
    model, ids = tiny_llama(0), tokens(1, 5)
    prefix = prefill(model, ids)
    model.lm_head.weight.mul_(2)
    refused(lambda: handoff(model, prefix, DirectMap(), source=model), match="expected the source")


def test_a_source_is_a_check_and_cannot_be_named_without_checking():
    model, ids = tiny_llama(), tokens(1, 5)
    refused(
        lambda: handoff(model, prefill(model, ids), DirectMap(), check=False, source=model),
        match="check=False",
    )


# --- another rotary embedding or vocabulary --------------------------------------------------------------------


@st.composite
def ropes(draw) -> dict:
    theta = draw(st.floats(100.0, 1e6))
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    if kind == "default":
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "llama3":
        return {**LLAMA3_ROPE, "rope_theta": theta, "factor": draw(st.floats(1.5, 16))}
    return {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": draw(st.floats(1.5, 16)),
        "original_max_position_embeddings": 64,
    }


@settings(max_examples=40)
@given(one=ropes(), other=ropes(), mode=st.sampled_from(MODES))
def test_keys_rotated_otherwise_are_refused_and_the_same_rope_said_otherwise_is_not(one, other, mode):
    source, target = tiny_llama(1, rope_parameters=dict(one)), tiny_llama(0, rope_parameters=dict(other))
    ids = tokens(1, 6)
    positions = torch.arange(512).unsqueeze(0)
    angles = [model.model.rotary_emb(torch.zeros(()), positions) for model in (source, target)]
    gap = max(float((a - b).abs().max()) for a, b in zip(*angles))
    assume(gap == 0 or gap > 1e-2)  # in between, rounding and a difference cannot be told apart
    if gap == 0:
        handoff(target, prefill(source, ids), DirectMap(), mode)
    else:
        refused(lambda: handoff(target, prefill(source, ids), DirectMap(), mode), match="rotated by")


def test_a_rope_is_compared_by_what_it_computes():
    plain = tiny_llama(0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    same = tiny_llama(1, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.0})
    handoff(plain, prefill(same, tokens(1, 5)), DirectMap())
    tampered = tiny_llama(1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    tampered.model.rotary_emb.inv_freq.mul_(1.01)  # the settings still say 10000
    refused(lambda: handoff(plain, prefill(tampered, tokens(1, 5)), DirectMap()), match="rotated by")


def test_one_token_is_enough_to_tell_ropes_apart():
    source = tiny_llama(1, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    refused(lambda: handoff(tiny_llama(0), prefill(source, tokens(1, 1)), DirectMap()), match="rotated by")


@pytest.mark.parametrize("size", [100, 102, 128])
def test_another_vocabulary_is_refused(size):
    ids = tokens(1, 6, vocabulary=90)
    source = tiny_llama(1, vocab_size=size)
    refused(
        lambda: handoff(tiny_llama(0), prefill(source, ids), DirectMap()), match=f"a vocabulary of {size}"
    )


# --- another prompt ---------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    length=st.integers(2, 9),
    row=st.integers(0, 2),
    at=st.integers(0, 8),
    mode=st.sampled_from(MODES),
)
def test_another_prompts_cache_is_refused_wherever_the_prompts_part(batch, length, row, at, mode):
    row, at = row % batch, at % length
    model, ids = tiny_llama(), tokens(batch, length, seed=length)
    other = ids.clone()
    other[row, at] = other[row, at] % 100 + 1
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap(), mode) as active:
        if at == length - 1:  # the last token is the target's own to read
            assert active.generate(other, max_new_tokens=1, pad_token_id=0).shape == (batch, length + 1)
        else:
            refused(lambda: active.generate(other, max_new_tokens=1), match=f"at place {at} of row {row}")


def test_a_shifted_bos_and_swapped_prompts_are_refused():
    model, ids = tiny_llama(), tokens(2, 9)
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()) as active:
        shifted = torch.cat([torch.ones(2, 1, dtype=torch.long), ids[:, :-1]], 1)
        refused(lambda: active.generate(shifted), match="BOS")
        refused(lambda: active.generate(ids.flip(0)), match="at place 0 of row 0")
    with handoff(model, prefill(model, ids[:, :-1]).select([1, 0]), DirectMap()) as active:
        active.generate(ids.flip(0), max_new_tokens=1, pad_token_id=0)
    with handoff(model, prefill(model, ids[:, :-1]).slice(4), DirectMap()) as active:
        active.generate(ids[:, :5], max_new_tokens=1, pad_token_id=0)


def test_padding_is_not_compared():
    model, ids = tiny_llama(), tokens(1, 6)
    alone = prefill(model, ids[:, :-1])
    pad = lambda t: torch.cat([torch.zeros_like(t[:, :, :2]), t], 2)
    valid = torch.tensor([[False, False] + [True] * 5])
    seen = torch.cat([torch.tensor([[7, 7]]), ids[:, :-1]], 1)
    padded = PrefixCache(
        [pad(k) for k in alone.keys], [pad(v) for v in alone.values], valid, origin=alone.origin.over(seen)
    )
    prompt = torch.cat([torch.tensor([[0, 0]]), ids], 1)
    with handoff(model, padded, DirectMap()) as active:
        ours = active.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    native = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(ours[:, 2:], native)


def test_a_prompt_that_is_wholly_cached_or_of_one_token_has_a_sentence_of_its_own():
    model, ids = tiny_llama(), tokens(1, 6)
    with handoff(model, prefill(model, ids), DirectMap()) as active:
        refused(lambda: active.generate(ids), match=r"covers all 6 tokens of the prompt.*prefix.slice\(5\)")
    refused(lambda: prefill(model, ids[:, :0]), match="a prompt of one token leaves nothing to cache")
    native = model(ids[:, :2]).logits[:, -1:]
    with handoff(model, prefill(model, ids[:, :1]), DirectMap()) as active:  # two tokens, one of them cached
        assert torch.allclose(active.logits(ids[:, 1:2]), native, atol=1e-5)


# --- caches that transformers made ------------------------------------------------------------------------------


def test_a_cache_from_transformers_can_say_whose_it_is():
    model, ids = tiny_llama(), tokens(2, 7)
    cache = DynamicCache()
    model(ids[:, :-1], **{cache_argument(model): cache})
    bare, told = PrefixCache.from_dynamic(cache), PrefixCache.from_dynamic(cache, model, ids[:, :-1])
    assert bare.origin is None and told.origin.identity == identity_of(model)
    with handoff(model, told, DirectMap(), source=model) as active:
        refused(lambda: active.generate(ids.flip(1)), match="at place 0 of row 0")
    refused(lambda: PrefixCache.from_dynamic(cache, input_ids=ids), match="pass model= as well")
    refused(lambda: PrefixCache.from_dynamic(cache, model, ids), match=r"\(2, 6\) positions")
    refused(
        lambda: PrefixCache.from_dynamic(cache, tiny_llama(num_hidden_layers=2), ids[:, :-1]),
        match="layers=2",
    )
    refused(lambda: PrefixCache.from_dynamic(cache, model, ids[:, :-1] + 100), match="vocabulary")


def test_a_cache_with_room_to_spare_is_refused_since_the_rest_is_no_position():
    model, ids = tiny_llama(), tokens(1, 6)
    static = StaticCache(config=model.config, max_cache_len=16)
    model(ids, **{cache_argument(model): static})
    refused(lambda: PrefixCache.from_dynamic(static), match="has seen 6 positions and holds 16")
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()) as active:
        active.logits(ids[:, -1:])
        refused(lambda: PrefixCache.from_dynamic(active.cache), match="has seen 6 positions and holds 1")
    for thing in (None, [(torch.ones(1), torch.ones(1))], DynamicCache(), model):
        refused(lambda: PrefixCache.from_dynamic(thing), match="without layers given")


def test_an_origin_costs_no_more_than_a_look_at_the_weights():
    origin = Origin.of(tiny_llama())
    assert origin.weights.numel() <= 16 * len(list(tiny_llama().parameters())) and origin.input_ids is None
