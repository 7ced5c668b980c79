"""Corrections in place: each layer when it is read, or in the background; and the products that all modes share."""

import functools

import pytest
import torch
from test_maps import fitted_ridge, random_cache, random_residual
from tiny import refused, tiny_llama, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from kvlib import DirectMap, handoff, prefill, products
from kvlib.compiled import add_residual, torch_correction, why_not_compiled
from kvlib.errors import KvlibError
from kvlib.geometry import rotary_of
from kvlib.linear import fast_linears, has_onednn, linear

AFFINE = [fitted_ridge(), random_residual(), random_residual(base=fitted_ridge())]


def decode(model, prefix, cache_map, mode, last, steps, **options):
    """Greedy tokens and logits of every step, and the handoff after its block."""
    with torch.no_grad(), handoff(model, prefix, cache_map, mode, **options) as active:
        chosen, logits = [last], []
        for _ in range(steps):
            logits.append(active.logits(chosen[-1]))
            chosen.append(logits[-1].argmax(-1))
    return torch.cat(chosen[1:], 1), torch.cat(logits, 1), active


@pytest.mark.parametrize("cache_map", AFFINE, ids=["ridge", "linear", "both"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_background_cannot_be_seen_in_the_tokens(cache_map, batch):
    model, ids = tiny_llama(), tokens(batch, 41)
    prefix = prefill(model, ids[:, :-1])
    wanted, exact, _ = decode(model, prefix.clone(), cache_map, "absorbed", ids[:, -1:], 64)
    found, logits, active = decode(model, prefix, cache_map, "background", ids[:, -1:], 64)
    assert torch.equal(found, wanted)
    assert (logits - exact).abs().max() < 2e-4  # both forms are exact; orders of roundings differ
    assert active.folded == 3 and prefix.corrected_by == cache_map.kind
    copy = cache_map.materialise(prefill(model, ids[:, :-1]))
    for ours, theirs in zip(prefix.keys + prefix.values, copy.keys + copy.values):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_background_starts_with_the_second_call_and_takes_a_few_layers_each(monkeypatch):
    model, ids, cache_map = tiny_llama(), tokens(1, 20), random_residual()
    prefix = prefill(model, ids[:, :-1])
    before = [k.clone() for k in prefix.keys]
    with torch.no_grad(), handoff(model, prefix, cache_map, "background") as active:
        counts = []
        for step in range(5):
            active.logits(ids[:, step : step + 1])
            counts.append(active.folded)
            assert [not torch.equal(a, b) for a, b in zip(before, prefix.keys)] == [
                i < counts[-1] for i in range(3)
            ]
    assert counts == [0, 1, 2, 3, 3]


def test_a_background_that_never_began_leaves_the_cache_alone():
    model, ids, cache_map = tiny_llama(), tokens(1, 20), random_residual()
    prefix = prefill(model, ids[:, :-1])
    before = prefix.clone()
    decode(model, prefix, cache_map, "background", ids[:, -1:], 1)
    assert prefix.corrected_by is None and all(torch.equal(a, b) for a, b in zip(prefix.keys, before.keys))
    decode(model, prefix, cache_map, "background", ids[:, -1:], 2)  # begun: finished on leaving
    assert prefix.corrected_by == "residual"
    copy = cache_map.materialise(before)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(prefix.values, copy.values))


def test_in_place_corrects_a_layer_when_it_is_read_and_the_rest_on_leaving():
    model, ids, cache_map = tiny_llama(), tokens(1, 20), random_residual("quadratic")
    prefix = prefill(model, ids[:, :-1])
    before, copy = prefix.clone(), cache_map.materialise(prefix)
    with torch.no_grad(), handoff(model, prefix, cache_map) as active:
        assert active.mode == "in_place" and active.folded == 0
        assert all(torch.equal(a, b) for a, b in zip(prefix.keys, before.keys))
        refused(lambda: handoff(model, prefix, DirectMap()), match="partly applied residual")
    assert active.folded == 3 and prefix.corrected_by == "residual"  # nothing was read: all of it on leaving
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(prefix.keys, copy.keys))


def test_a_cache_whose_correction_failed_is_nobodys_to_use(monkeypatch):
    model, ids, cache_map = tiny_llama(), tokens(1, 20), random_residual("quadratic")
    prefix, calls = prefill(model, ids[:, :-1]), []
    correct_ = type(cache_map).correct_

    def fails_on_the_second(self, layer, *arguments):
        calls.append(layer)
        if layer == 1:
            raise MemoryError
        correct_(self, layer, *arguments)

    monkeypatch.setattr(type(cache_map), "correct_", fails_on_the_second)
    with (
        pytest.raises(MemoryError),
        torch.no_grad(),
        handoff(model, prefix, cache_map, compiled=False) as active,
    ):
        active.logits(ids[:, -1:])
    assert calls == [0, 1]  # not tried again on leaving, nor is the first corrected twice
    refused(lambda: handoff(model, prefix, cache_map), match="partly applied")
    refused(lambda: handoff(model, prefix, DirectMap()), match="partly applied")


def test_what_is_not_affine_cannot_go_to_the_background():
    model, ids = tiny_llama(), tokens(1, 20)
    refused(
        lambda: handoff(model, prefill(model, ids), random_residual(features="rms"), "background"),
        match="use mode='in_place'",
    )


KINDS = [
    ("linear", "own"),
    ("quadratic", "own"),
    ("linear", "rms"),
    ("quadratic", "rms"),
    ("linear", "rope_stripped"),
]


@pytest.mark.parametrize(("residual", "features"), KINDS)
@pytest.mark.parametrize("by", ["C", "torch"])
def test_what_is_compiled_says_what_the_map_says(residual, features, by, monkeypatch, compiled_code):
    """By torch: the function that is compiled, run as it is."""
    if by == "torch":
        monkeypatch.setattr("kvlib.compiled._compiled", lambda: add_residual)
        monkeypatch.setattr(
            "kvlib.reading.compiled_correction", lambda *given: (torch_correction(*given[:3]), 0.0)
        )
    model, ids = tiny_llama(), tokens(2, 31)
    cache_map, prefix = random_residual(residual, features), prefill(tiny_llama(1), ids[:, :-1])
    _, exact, _ = decode(model, prefix.clone(), cache_map, "materialised", ids[:, -1:], 3)
    _, logits, active = decode(model, prefix, cache_map, "in_place", ids[:, -1:], 3, compiled=True)
    assert active.compiled and active.compile_seconds >= 0
    assert (logits - exact).abs().max() < 1e-4


def test_compiling_where_nothing_is_to_be_had_by_it_is_refused_or_said():
    model, ids = tiny_llama(), tokens(1, 12)
    prefix = prefill(model, ids[:, :-1])
    for cache_map, mode, why in (
        (random_residual(), "absorbed", "corrects nothing in place"),
        (DirectMap(), "in_place", "a direct map is one dense product"),
        (fitted_ridge(), "in_place", "one dense product"),
        (random_residual(base=fitted_ridge()), "in_place", "ridge base"),
        (random_residual("quadratic", "rope_stripped"), "auto", "more than one pass"),
    ):
        refused(lambda: handoff(model, prefix, cache_map, mode, compiled=True), match=why)
    active = handoff(model, prefix, random_residual(), compiled=True)
    assert active.mode == "absorbed" and not active.compiled and "nothing was compiled" in active.reason
    assert why_not_compiled(random_residual()) is None


def test_what_cannot_be_absorbed_is_corrected_by_the_compiled_pass_and_says_so(compiled_code):
    model, ids = tiny_llama(), tokens(2, 31)
    cache_map, prefix = random_residual(features="rope_stripped"), prefill(tiny_llama(1), ids[:, :-1])
    _, exact, _ = decode(model, prefix.clone(), cache_map, "materialised", ids[:, -1:], 3)
    _, plain, by_hand = decode(model, prefix.clone(), cache_map, "auto", ids[:, -1:], 3, compiled=False)
    _, logits, active = decode(model, prefix, cache_map, "auto", ids[:, -1:], 3)
    assert active.mode == by_hand.mode == "in_place" and active.compiled and not by_hand.compiled
    assert active.compile_seconds > 0 and by_hand.compile_seconds is None
    said = "values absorbed, keys corrected in place by a pass compiled by the C compiler"
    assert active.reason.startswith(f"{cache_map.why_not_affine}; {said}")
    assert by_hand.reason == cache_map.why_not_affine
    assert (logits - exact).abs().max() < 1e-4 and (plain - exact).abs().max() < 1e-4


@pytest.mark.parametrize(("features", "residual"), [("rope_stripped", "linear"), ("own", "quadratic")])
def test_keys_are_corrected_alone_only_where_the_values_can_be_absorbed(features, residual, compiled_code):
    model, ids = tiny_llama(), tokens(2, 31)
    cache_map, prefix = random_residual(residual, features), prefill(tiny_llama(1), ids[:, :-1])
    source, copy = prefix.clone(), cache_map.materialise(prefix.clone(), rotary_of(model))
    decode(model, prefix, cache_map, "auto", ids[:, -1:], 2)
    absorbed = features == "rope_stripped"
    for found, wanted in zip(prefix.values, source.values if absorbed else copy.values):
        assert torch.equal(found, wanted) if absorbed else torch.allclose(found, wanted, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(prefix.keys, copy.keys))
    assert prefix.corrected_by == ("partly applied residual" if absorbed else "residual")
    refused(lambda: handoff(model, prefix, cache_map), match="has corrected already")
    if absorbed:  # its keys and values no longer belong together
        refused(lambda: handoff(model, prefix, DirectMap()), match="has corrected already")


@pytest.mark.parametrize("mode", ["in_place", "materialised"])
def test_a_mode_asked_for_by_name_is_not_compiled_unasked(mode):
    model, ids = tiny_llama(), tokens(1, 12)
    active = handoff(model, prefill(model, ids[:, :-1]), random_residual("quadratic"), mode)
    assert not active.compiled and active.reason == "asked for by name"


@pytest.mark.parametrize(
    ("features", "residual", "obstacle", "why"),
    [
        ("own", "quadratic", lambda patch: patch("kvlib.compiled.no_compiler", lambda device: "none here"), "none here"),
        ("own", "quadratic", lambda patch: patch("kvlib.compiled.made_of_c", lambda device: False), "most of a minute"),
        ("rope_stripped", "quadratic", lambda patch: None, "more than one pass"),
    ],
)  # fmt: skip
def test_where_nothing_can_be_compiled_the_plain_pass_corrects_and_says_why(
    features, residual, obstacle, why, monkeypatch
):
    obstacle(monkeypatch.setattr)
    model, ids = tiny_llama(), tokens(1, 12)
    prefix, cache_map = prefill(model, ids[:, :-1]), random_residual(residual, features)
    with torch.no_grad(), handoff(model, prefix, cache_map) as active:
        active.logits(ids[:, -1:])
    assert active.mode == "in_place" and not active.compiled and active.compile_seconds is None
    assert active.reason.startswith(f"{cache_map.why_not_affine}; corrected in place by the plain pass (")
    assert why in active.reason and prefix.corrected_by == "residual"


def test_a_compiler_that_refuses_is_tried_once_and_the_plain_pass_takes_over(monkeypatch):
    tried = []

    def refusing(*given, **options):
        tried.append(given)
        raise KvlibError("the C compiler refuses a name, expected code for this machine: name another")

    monkeypatch.setattr("kvlib.compiled.c_correction", refusing)
    monkeypatch.setattr("kvlib.compiled.no_compiler", lambda device: None)
    monkeypatch.setattr("kvlib.compiled._refusals", functools.cache(dict))
    model, ids = tiny_llama(), tokens(1, 12)
    cache_map = random_residual("quadratic")
    _, exact, _ = decode(model, prefill(model, ids[:, :-1]), cache_map, "materialised", ids[:, -1:], 3)
    for _ in range(2):
        _, logits, active = decode(model, prefill(model, ids[:, :-1]), cache_map, "auto", ids[:, -1:], 3)
        assert not active.compiled and "refuses a name" in active.reason and "plain pass" in active.reason
        assert (logits - exact).abs().max() < 1e-4
    assert len(tried) == 1
    refused(
        lambda: decode(model, prefill(model, ids[:, :-1]), cache_map, "auto", ids[:, -1:], 1, compiled=True),
        match="refuses a name",
    )
    assert len(tried) == 2


def test_without_a_compiler_there_is_one_sentence(monkeypatch):
    def without():
        raise RuntimeError("no compiler\nand much advice")

    monkeypatch.setattr("kvlib.compiled._compiled", without)
    monkeypatch.setattr("kvlib.compiled.made_of_c", lambda device: False)
    model, ids = tiny_llama(), tokens(1, 12)

    def enter():
        with handoff(model, prefill(model, ids[:, :-1]), random_residual("quadratic"), compiled=True):
            pass

    refused(enter, match="no compiler")
    assert model(ids).logits.isfinite().all() and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("heads", "length"), [(3, 701), (3, 702), (2, 40), (7, 299)])
def test_products_shared_out_among_cores_are_the_same_products(threads, heads, length):
    generator = torch.Generator().manual_seed(1)
    q, p = (
        torch.randn(heads, 3, 16, generator=generator),
        torch.rand(heads, 3, length + 2, generator=generator)[..., :length],
    )
    x = torch.randn(heads, length, 16, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        covered = torch.zeros(heads, length)
        for part in products.shares(heads, length, x.device):
            covered[part.heads, part.start : part.stop] += 1
        assert (covered == 1).all()
        assert torch.allclose(products.scores(q, x), q @ x.mT, atol=1e-5)
        assert torch.allclose(products.weighted_sum(p, x), p @ x, atol=1e-4)
    finally:
        torch.set_num_threads(before)


def test_linear_layers_are_faster_only_within_the_block():
    model, ids = tiny_llama(), tokens(2, 9)
    wanted = model(ids).logits
    with fast_linears(model), fast_linears(model):  # twice does no harm
        with torch.no_grad():
            assert torch.allclose(model(ids).logits, wanted, atol=1e-5)
        patched = [m for m in model.modules() if "forward" in vars(m)]
        assert len(patched) == 3 * 7 + 1
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_linear_layer_keeps_its_gradient_and_its_bias():
    x, layer = torch.randn(2, 3, 8, requires_grad=True), torch.nn.Linear(8, 5)
    assert torch.equal(linear(x, layer.weight, layer.bias), layer(x))
    (gradient,) = torch.autograd.grad(linear(x, layer.weight, layer.bias).sum(), x)
    assert torch.allclose(gradient, layer.weight.sum(0).expand(2, 3, 8))
    with torch.no_grad():
        for given in (x, x[:, -1:], x.transpose(0, 1)):
            assert torch.allclose(linear(given, layer.weight, layer.bias), layer(given), atol=1e-6)
        assert torch.equal(linear(x.double(), layer.weight.double()), x.double() @ layer.weight.double().T)
    assert has_onednn() in (True, False)


def test_a_cut_of_a_longer_cache_is_corrected_in_place_without_a_copy():
    whole, cache_map = random_cache(5, batch=2, length=600), random_residual()
    cut = whole.slice(301)
    copy = cache_map.materialise(cut)
    cache_map.apply_(cut)
    for ours, theirs in zip(whole.keys, copy.keys):
        assert torch.allclose(ours[:, :, :301], theirs, atol=1e-5)


class Watch(TorchDispatchMode):
    """Every tensor that is made and is no view of one that was there before."""

    def __init__(self, known):
        super().__init__()
        self.known, self.made = {t.untyped_storage().data_ptr() for t in known}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.made.append((str(func), tensor.numel(), tensor.dtype))
        return out


@pytest.mark.parametrize("cache_map", [DirectMap(), *AFFINE], ids=["direct", "ridge", "linear", "both"])
def test_one_token_copies_no_layer_of_the_cache_and_builds_no_mask(cache_map):
    model, ids = tiny_llama(), tokens(1, 500)
    prefix = prefill(model, ids[:, :-1])
    layer = prefix.keys[0].numel()
    watch = Watch([*model.parameters(), *prefix.keys, *prefix.values])
    with torch.no_grad(), handoff(model, prefix, cache_map, "absorbed", check=False) as active, watch:
        active.logits(ids[:, -1:], last=True)
    assert len(watch.made) > 50  # it has seen the step
    assert [entry for entry in watch.made if entry[1] >= layer] == []
    assert [entry for entry in watch.made if entry[2] == torch.bool and entry[1] >= 499] == []
