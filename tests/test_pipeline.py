"""The pipeline: what a serial handoff says, said while the source still works; and nothing is left of it afterwards."""

import threading

import pytest
import torch
from test_maps import fitted_ridge, random_residual
from tiny import refused, tiny_llama, tokens

from kvlib import DirectMap, KvlibError, handoff, prefill
from kvlib.pipeline import cold_handoff, pipelined

MAPS = {
    "direct": DirectMap(),
    "learned": random_residual(),
    "ridge": fitted_ridge(),
    "quadratic": random_residual("quadratic"),
    "rope_stripped": random_residual("linear", "rope_stripped"),
}


@pytest.fixture
def pair():
    return tiny_llama(1), tiny_llama(0)


def is_restored(model) -> bool:
    own = all("forward" not in vars(module) for module in model.modules())
    return own and not model.config._attn_implementation.startswith("kvlib")


def nothing_is_left(*models) -> bool:
    threads = [thread.name for thread in threading.enumerate()]
    return "kvlib-source" not in threads and all(is_restored(model) for model in models)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 38, 39, 100])
@pytest.mark.parametrize("cache_map", MAPS.values(), ids=MAPS)
@torch.no_grad()
def test_pipelined_is_serial_bit_for_bit(pair, cache_map, chunk_tokens):
    source, target = pair
    ids = tokens(2, 40)
    prefix = prefill(source, ids[:, :-1], chunk_tokens=chunk_tokens)
    with handoff(target, prefix, cache_map) as serial:
        wanted = [
            serial.logits(ids[:, -1:], last=True),
            serial.logits(ids[:, :5]),
            serial.logits(ids[:, 5:6]),
        ]
    with pipelined(source, target, ids, cache_map, chunk_tokens=chunk_tokens) as active:
        assert active.seen == 39
        found = [active.logits(ids[:, -1:], last=True), active.logits(ids[:, :5]), active.logits(ids[:, 5:6])]
        assert active.seen == 39 + 7
    said = [one.reason.partition(" (in ")[0] for one in (active, serial)]  # without the seconds of compiling
    assert active.mode == serial.mode and active.compiled == serial.compiled and said[0] == said[1]
    # The same kernels on the same numbers with as many threads: nothing has a reason to differ.
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    assert all(torch.equal(a, b) for a, b in zip(active.prefix.keys, serial.prefix.keys))
    assert active.prefix.corrected_by == serial.prefix.corrected_by
    assert nothing_is_left(source, target)


@pytest.mark.parametrize(
    ("name", "mode"), [("learned", "auto"), ("learned", "background"), ("quadratic", "auto")]
)
def test_it_generates_what_serial_generates(pair, name, mode):
    source, target = pair
    ids, options = tokens(2, 30), {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with handoff(target, prefill(source, ids[:, :-1]), MAPS[name], mode) as serial:
        wanted = serial.generate(ids, **options)
    with pipelined(source, target, ids, MAPS[name], mode) as active:
        assert torch.equal(active.generate(ids, **options), wanted)


def test_the_target_reads_a_layer_before_the_source_has_the_next(pair):
    source, target = pair
    ids, read = tokens(1, 12), threading.Event()
    target.base_model.layers[0].register_forward_hook(lambda *_: read.set())
    in_time = []
    source.base_model.layers[1].register_forward_pre_hook(lambda *_: in_time.append(read.wait(60)))
    with torch.no_grad(), pipelined(source, target, ids, DirectMap()) as active:
        active.logits(ids[:, -1:])
    assert in_time == [True]


def test_leaving_unread_waits_for_the_source_and_corrects_what_is_left(pair):
    source, target = pair
    ids, cache_map = tokens(2, 12), MAPS["quadratic"]
    with handoff(target, prefill(source, ids[:, :-1]), cache_map) as serial:
        pass
    with pipelined(source, target, ids, cache_map) as active:
        pass
    assert all(torch.equal(a, b) for a, b in zip(active.prefix.values, serial.prefix.values))
    assert nothing_is_left(source, target)


def fail(*_):
    raise RuntimeError("on purpose")


@pytest.mark.parametrize("name", ["learned", "quadratic"])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_a_source_that_fails_in_the_middle_is_one_error_and_leaves_nothing(pair, name, chunk_tokens):
    source, target = pair
    ids = tokens(1, 12)
    native = target(ids).logits
    hook = source.base_model.layers[1].mlp.register_forward_hook(fail)
    with (
        pytest.raises(KvlibError, match=r"the source .* failed .*on purpose") as caught,
        pipelined(source, target, ids, MAPS[name], chunk_tokens=chunk_tokens) as active,
    ):
        active.logits(ids[:, -1:])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert nothing_is_left(source, target)
    # what was never written may be anything
    refused(
        lambda: handoff(target, active.prefix, DirectMap()), match="the source was stopped|NaN or infinity"
    )
    hook.remove()
    assert torch.equal(target(ids).logits, native)
    with pipelined(source, target, ids, MAPS[name]) as again:
        again.logits(ids[:, -1:])


def test_a_source_that_fails_is_heard_of_even_when_nobody_reads(pair):
    source, target = pair
    source.base_model.layers[2].self_attn.k_proj.register_forward_hook(fail)
    begun = pipelined(source, target, tokens(1, 12), DirectMap())

    def enter_and_leave():
        with begun:
            pass

    refused(enter_and_leave, match="on purpose")
    assert nothing_is_left(source, target)


def test_a_target_that_fails_stops_the_source_at_its_next_layer(pair):
    source, target = pair
    ids, read, passed = tokens(1, 12), threading.Event(), []
    target.base_model.layers[0].self_attn.register_forward_hook(lambda *_: read.set())
    target.base_model.layers[0].mlp.register_forward_hook(fail)
    source.base_model.layers[1].register_forward_pre_hook(lambda *_: passed.append(read.wait(60)))
    source.base_model.layers[2].register_forward_pre_hook(lambda *_: passed.append("further"))
    with (
        pytest.raises(RuntimeError, match="on purpose"),
        pipelined(source, target, ids, DirectMap()) as active,
    ):
        active.logits(ids[:, -1:])
    assert "further" not in passed  # when the target's turn ended, the source was told to stop
    assert nothing_is_left(source, target)


def test_the_callers_own_error_comes_out_as_it_is(pair):
    source, target = pair
    with pytest.raises(ZeroDivisionError), pipelined(source, target, tokens(1, 12), DirectMap()):
        raise ZeroDivisionError
    assert nothing_is_left(source, target)


def test_a_source_whose_cache_is_not_finite_is_refused_where_it_is_read(pair):
    source, target = pair
    ids = tokens(1, 12)
    source.base_model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with (
        pytest.raises(KvlibError, match="values of layer 1 of the source's cache hold NaN"),
        pipelined(source, target, ids, DirectMap()) as active,
    ):
        active.logits(ids[:, -1:])
    with torch.no_grad(), pipelined(source, target, ids, DirectMap(), check=False) as active:
        assert active.logits(ids[:, -1:]).isnan().any()


def test_the_sources_thread_computes_in_the_callers_modes(pair):
    source, target = pair
    ids = tokens(1, 12)
    with torch.inference_mode(), pipelined(source, target, ids, DirectMap()) as active:
        assert active.logits(ids[:, -1:]).is_inference()
        assert torch.equal(active.prefix.keys[2], prefill(source, ids[:, :-1]).keys[2])


def test_refusals_are_one_sentence(pair):
    source, target = pair
    ids = tokens(1, 12)
    refused(
        lambda: pipelined(source, source, ids, DirectMap()), match="one model given as source and as target"
    )
    refused(
        lambda: pipelined(source, target, ids, DirectMap(), "materialised"),
        match="no copy of the whole cache",
    )
    refused(
        lambda: pipelined(source, target, ids, MAPS["quadratic"], "absorbed"), match="use mode='in_place'"
    )
    refused(lambda: pipelined(source, target, ids[:, :1], DirectMap()), match="all but the last")
    refused(lambda: pipelined(source, target, ids, DirectMap(), chunk_tokens=0), match="chunk_tokens is 0")
    refused(lambda: pipelined(source, target, ids, None), match="expected a CacheMap")
    refused(lambda: pipelined(tiny_llama(head_dim=8), target, ids, DirectMap()), match="head")
    refused(
        lambda: cold_handoff(source, target, ids, DirectMap(), way="fast"),
        match="expected one of auto, serial",
    )
    with pipelined(source, target, ids, DirectMap()) as active:
        refused(active.__enter__, match="entered a second time")
        refused(lambda: active.generate(ids.flip(1)), match="the prompt has token")
    assert nothing_is_left(source, target)


@pytest.mark.parametrize("way", ["auto", "serial", "pipelined"])
@torch.no_grad()
def test_cold_says_which_way_it_took_and_why(pair, way):
    source, target = pair
    ids = tokens(2, 12)
    with handoff(target, prefill(source, ids[:, :-1]), MAPS["learned"]) as serial:
        wanted = serial.logits(ids[:, -1:])
    with cold_handoff(source, target, ids, MAPS["learned"], way=way) as active:
        assert torch.equal(active.logits(ids[:, -1:]), wanted)
    assert active.way == ("serial" if way == "auto" else way)  # on a CPU
    assert active.way_reason == (
        "on cpu source and target would compete for the same cores" if way == "auto" else "asked for by name"
    )
