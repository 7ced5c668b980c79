"""A handoff used wrongly, or over numbers that are none: refused, and never answered with something else."""

import pytest
import torch
from tiny import refused, tiny_llama, tokens
from transformers import DynamicCache, GenerationConfig

from kvlib import DirectMap, KvlibError, ModelPair, PrefixCache, handoff, prefill


def test_a_model_called_past_its_handoff_is_refused_and_not_answered_with_the_handoffs_prefix():
    model, ids = tiny_llama(), tokens(1, 8)
    native, prefix = model(ids).logits[:, -1:], prefill(model, ids[:, :-1])
    with handoff(model, prefix, DirectMap()) as outer:
        refused(lambda: model(ids), match="on another cache or on none")
        refused(lambda: prefill(model, ids), match="on another cache or on none")
        with handoff(model, prefix, DirectMap()) as inner:
            refused(lambda: outer.logits(ids[:, -1:]), match="one at a time")
            assert torch.allclose(inner.logits(ids[:, -1:]), native, atol=1e-5)
        assert torch.allclose(outer.logits(ids[:, -1:]), native, atol=1e-5)
    with pytest.raises(KvlibError, match="entered a second time"):
        outer.__enter__()


def settings(**asked) -> dict:
    """The same asked by a generation configuration."""
    return {"generation_config": GenerationConfig(**asked)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_beams": 2}, "leave out beams"),
        ({"num_return_sequences": 2, "do_sample": True}, "leave out beams"),
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask= given"),
        ({"past_key_values": DynamicCache()}, "past_key_values= given"),
        ({"max_new_tokens": 506}, "506 new tokens asked after 7 positions"),
        ({"max_new_tokens": None, "max_length": 514}, "506 new tokens asked after 7 positions"),
        ({"max_new_tokens": None, "max_length": 8}, "max_length=8 asked of .* a prompt of 8 tokens"),
        (settings(max_new_tokens=506), "506 new tokens asked after 7 positions"),
        (settings(max_length=514), "506 new tokens asked after 7 positions"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 asked"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 asked"),
        ({"max_new_tokens": True}, "max_new_tokens=True asked"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5' asked"),
        ({"max_new_tokens": None, "max_length": 9.5}, "max_length=9.5 asked"),
        ({"use_cache": False}, "use_cache= given"),
        ({"inputs": torch.ones(1, 8)}, "inputs= given"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens asked"),
        (settings(prompt_lookup_num_tokens=2), "prompt_lookup_num_tokens asked"),
        ({"assistant_model": tiny_llama(1)}, "assistant_model asked"),
        ({"cache_implementation": "static"}, "cache_implementation asked"),
        (settings(cache_implementation="dynamic"), "cache_implementation asked"),
    ],
)
def test_what_generate_cannot_do_is_refused(arguments, sentence):
    model, ids = tiny_llama(), tokens(1, 8)
    length = {} if "generation_config" in arguments else {"max_new_tokens": 3}
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()) as active:
        refused(
            lambda: active.generate(ids, **{**length, "pad_token_id": 0, **arguments}),
            match=sentence,
        )
        assert active.seen == 7 or "beams" in sentence  # refused before anything was read


def test_a_length_that_the_model_says_itself_counts_as_well():
    model, ids = tiny_llama(), tokens(1, 8)
    model.generation_config.max_new_tokens = 600
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()) as active:
        refused(lambda: active.generate(ids), match="600 new tokens asked")
        assert active.generate(ids, max_new_tokens=2).shape == (1, 10)


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": 6, "max_length": None},
        {"max_length": 14},
        settings(max_new_tokens=6, use_cache=False, do_sample=False, pad_token_id=0),
        settings(max_length=14, do_sample=False, pad_token_id=0),
        "model's own",
    ],
)
def test_generate_gives_one_text_however_its_length_and_cache_are_asked_for(asked):
    model, ids = tiny_llama(), tokens(1, 8)
    plain = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    native = model.generate(ids, **plain)
    if asked == "model's own":
        model.generation_config.use_cache, asked = False, plain
    if "generation_config" not in asked:
        asked = {"do_sample": False, "pad_token_id": 0, **asked}
    with handoff(model, prefill(model, ids[:, :-1]), DirectMap()) as active:
        assert torch.equal(active.generate(ids, **asked), native)
    if "generation_config" in asked:  # theirs, and unchanged
        assert asked["generation_config"].use_cache in (None, False)


@pytest.mark.parametrize(
    "given",
    [torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), [[1]], None, torch.ones(1, 1, dtype=torch.int16)],
)
def test_tokens_that_are_no_token_ids_are_refused(given):
    model, ids = tiny_llama(), tokens(1, 5)
    with handoff(model, prefill(model, ids), DirectMap()) as active:
        refused(lambda: active.logits(given), match="whole numbers")
        refused(lambda: active.logits(ids[:, :1] + 100), match="vocabulary")
    refused(lambda: prefill(model, given), match="whole numbers")


def test_things_in_each_others_place_are_named():
    model, ids = tiny_llama(), tokens(1, 5)
    pair, prefix = ModelPair(model, model, None), prefill(model, ids)
    refused(lambda: handoff(pair, prefix, DirectMap()), match="a ModelPair given as the target")
    refused(lambda: handoff(prefix, model, DirectMap()), match="a PrefixCache given as the target")
    for source in (5, pair, ids):
        refused(lambda source=source: handoff(model, prefix, DirectMap(), source=source), match="source= ")
    for place in (None, 5, "  "):
        refused(lambda place=place: ModelPair.load(place, place), match="given as a model")


def test_layers_that_share_memory_are_not_corrected_twice_in_place():
    model, ids = tiny_llama(), tokens(2, 5)
    one = prefill(model, ids).keys[0]
    shared = PrefixCache([one] * 3, [one] * 3)
    refused(lambda: handoff(model, shared, DirectMap(), "in_place"), match="share memory")
    spread = PrefixCache([one[:1].expand(2, -1, -1, -1)] * 3, [one] * 3)
    refused(lambda: handoff(model, spread, DirectMap(), "in_place"), match="share memory")
    handoff(model, shared.clone(), DirectMap(), "in_place")
    with torch.inference_mode():
        made_there = prefill(model, ids)
    refused(lambda: handoff(model, made_there, DirectMap(), "in_place"), match="inference_mode")
    with torch.no_grad(), handoff(model, made_there, DirectMap(), "absorbed") as active:
        active.logits(ids[:, -1:])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "where", ["model.layers.1.mlp.up_proj", "model.norm", "lm_head", "model.embed_tokens"]
)
def test_weights_that_are_no_numbers_show_in_the_cache_or_in_the_logits(number, where):
    model, ids = tiny_llama(), tokens(1, 8)
    healthy = prefill(model, ids[:, :-1])
    weight = model.get_submodule(where).weight
    weight.view(-1)[:] = number
    with handoff(model, healthy, DirectMap()) as active:
        refused(lambda: active.logits(ids[:, -1:]), match="logits of a llama model .* NaN or infinity")
    with handoff(model, healthy, DirectMap()) as active:
        refused(lambda: active.generate(ids, max_new_tokens=3), match="NaN or infinity")
    assert not model.lm_head._forward_hooks
    if where in ("model.layers.1.mlp.up_proj", "model.embed_tokens"):
        refused(
            lambda: handoff(model, prefill(model, ids[:, :-1]), DirectMap()), match="of the source's cache"
        )


def test_half_precision_that_overflows_is_refused():
    model, ids = tiny_llama(), tokens(1, 8)
    model.model.layers[1].self_attn.v_proj.weight.mul_(1e6)
    wide = prefill(model, ids[:, :-1])
    handoff(model, wide, DirectMap())  # finite in float32
    narrow = wide.to(torch.float16)
    refused(lambda: narrow.check_finite("the source"), match="values of layer 1")
    bare = PrefixCache(narrow.keys, narrow.values)
    refused(lambda: handoff(model.half(), bare, DirectMap()), match="values of layer 1")


def test_rotary_frequencies_that_were_rounded_with_the_weights_are_named():
    ids = tokens(1, 8)
    narrow = prefill(tiny_llama(), ids).to(torch.bfloat16)
    refused(
        lambda: handoff(tiny_llama().bfloat16(), narrow, DirectMap()),
        match="load with dtype= rather than convert",
    )
