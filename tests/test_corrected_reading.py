"""Attention in C that corrects the prefix as it reads it: against the correction first and attention after, both in float64."""

import pytest
import torch
from test_attend import exact, tensors
from test_kernels import KINDS, Case, case
from test_modes import decode, random_residual
from tiny import refused, tiny_llama, tokens

from kvlib import DirectMap, PrefixCache, attention, handoff, prefill
from kvlib.attention import IDENTITY, Affine, two_segment_attention
from kvlib.kernels import attend
from kvlib.kernels.correct import Correction, c_correction

pytestmark = pytest.mark.usefixtures("compiled_code")


def reading(given: Case, group=3, new=2, seed=3) -> list[torch.Tensor]:
    """Arguments of `two_segment_attention` over the case's keys and values."""
    batch, heads, length, dim = given.keys.shape
    q, _, _, *fresh = tensors(batch, heads, group, length, new, dim, given.keys.dtype, seed)
    return [q, given.keys, given.values, *fresh]


def wanted(given: Case, both=(IDENTITY, IDENTITY), valid=None, keys_only=False):
    """What attention over the corrected prefix comes to in float64."""
    (keys, _), (values, _) = given.exact()
    q, _, untouched, *fresh = reading(given)
    return exact([q, keys, untouched if keys_only else values, *fresh], both, valid)


def found(given: Case, both=(IDENTITY, IDENTITY), valid=None, **options):
    prefix = PrefixCache([given.keys] * 2, [given.values] * 2)
    correction = c_correction(given.cache_map, prefix, given.angles, **options).at(1)
    arguments = reading(given)
    assert attend.kernel(*arguments, correction=correction) is not None
    scaling = given.keys.shape[-1] ** -0.5
    return two_segment_attention(*arguments, scaling, *both, valid, correction)


@pytest.fixture
def never_apart(monkeypatch):
    """No correction runs by itself."""

    def alone(*_):
        raise AssertionError("the cache was corrected in a pass of its own")

    monkeypatch.setattr(Correction, "__call__", alone)


# As in `test_attend` and `test_kernels`: a few units in the last place of what is summed up.
TOLERANCE = 128 * 2**-24


@pytest.mark.parametrize(("residual", "features"), KINDS)
@pytest.mark.parametrize(
    "layout", [{"length": 300}, {"rank": 5, "dim": 48, "batch": 3, "heads": 2, "length": 1}]
)
def test_every_kind_reads_what_the_map_says_and_leaves_it_in_the_cache(
    residual, features, layout, never_apart
):
    given = case(residual, features, **layout)
    result, sure = wanted(given), [new for new, _ in given.exact()]
    assert float((found(given) - result).abs().max()) < TOLERANCE * float(result.abs().max())
    for ours, theirs in zip((given.keys, given.values), sure):
        assert torch.allclose(ours.double(), theirs, atol=1e-5)


@pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 255, 256, 257, 600])
def test_every_position_is_corrected_once_and_nothing_behind_it(length, never_apart):
    given, beyond = case(length=length, heads=2), torch.full((1, 2, length + 40, 64), 7.0)
    (keys, _), _ = given.exact()
    beyond[:, :, :length] = given.keys
    found(Case(given.cache_map, beyond[:, :, :length], given.values, given.angles))
    assert torch.allclose(beyond[:, :, :length].double(), keys, atol=1e-5)
    assert (beyond[:, :, length:] == 7).all()


def test_values_may_be_absorbed_while_keys_are_corrected(never_apart):
    given, dense = case(features="rope_stripped"), torch.eye(64) + 0.1 * torch.randn(3, 64, 64)
    both, before = (IDENTITY, Affine(dense, torch.randn(3, 64))), given.values.clone()
    result = wanted(given, both, keys_only=True)
    difference = (found(given, both, keys_only=True) - result).abs().max()
    assert float(difference) < TOLERANCE * float(result.abs().max())
    assert torch.equal(given.values, before)


def test_padding_has_no_weight_there_either(never_apart):
    given, valid = case(batch=2, length=300), torch.ones(2, 300, dtype=torch.bool)
    valid[1, :290] = False
    result = wanted(given, valid=valid)
    difference = (found(given, valid=valid) - result).abs().max()
    assert float(difference) < TOLERANCE * float(result.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_it_was_rounded_into_the_cache(dtype):
    given, apart = (case("quadratic", "rms", dtype=dtype, length=300) for _ in range(2))
    result, _ = found(given), apart.found()
    assert torch.equal(given.keys, apart.keys) and torch.equal(given.values, apart.values)
    exactly = exact(reading(apart))
    step = 2 * torch.finfo(dtype).eps * exactly.abs().clamp_min(1e-3)
    assert bool(((result - exactly).abs() <= step).all())


@pytest.mark.all_cores
def test_threads_do_not_change_a_bit(never_apart):
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            given = case(length=2000)
            results.append((found(given), given.keys, given.values))
    finally:
        torch.set_num_threads(before)
    for one in results[1:]:
        assert all(map(torch.equal, results[0], one))


def test_another_cache_than_it_was_made_for_is_refused_before_a_number_is_written():
    given, other = case(), case(heads=2)
    before = other.keys.clone()
    refused(
        lambda: found(Case(given.cache_map, other.keys, other.values, given.angles)),
        match="was compiled for 3 heads",
    )
    assert torch.equal(other.keys, before)


# --- within a handoff


@pytest.mark.parametrize("mode", ["in_place", "background"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_of_one_token_corrects_what_it_reads_in_no_pass_of_its_own(mode, batch, never_apart):
    model, ids, cache_map = tiny_llama(), tokens(batch, 41), random_residual()
    prefix = prefill(model, ids[:, :-1])
    _, wanted_logits, _ = decode(model, prefix.clone(), cache_map, "absorbed", ids[:, -1:], 4)
    _, logits, active = decode(model, prefix, cache_map, mode, ids[:, -1:], 4, compiled=True)
    assert active.folded == 3 and prefix.corrected_by == "residual"
    assert (logits - wanted_logits).abs().max() < 2e-4


def test_several_tokens_at_once_have_the_cache_corrected_before_they_read_it():
    model, ids, cache_map = tiny_llama(), tokens(2, 41), random_residual("quadratic")
    prefix = prefill(model, ids[:, :-4])
    with torch.no_grad(), handoff(model, prefix.clone(), cache_map, "materialised") as active:
        sure = active.logits(ids[:, -4:])
    with torch.no_grad(), handoff(model, prefix, cache_map, compiled=True) as active:
        assert (active.logits(ids[:, -4:]) - sure).abs().max() < 1e-4
    assert prefix.corrected_by == "residual"


def test_where_attention_cannot_be_compiled_the_correction_runs_before_it(monkeypatch):
    monkeypatch.setattr(attention.attend, "kernel", lambda *given, **options: None)
    model, ids, cache_map = tiny_llama(), tokens(2, 41), random_residual("quadratic")
    prefix = prefill(model, ids[:, :-1])
    _, wanted_logits, _ = decode(model, prefix.clone(), cache_map, "materialised", ids[:, -1:], 3)
    _, logits, active = decode(model, prefix, cache_map, "auto", ids[:, -1:], 3)
    assert active.compiled and (logits - wanted_logits).abs().max() < 1e-4


def test_a_cache_that_was_being_read_when_it_failed_is_nobodys_to_use(monkeypatch):
    model, ids, cache_map = tiny_llama(), tokens(1, 20), random_residual("quadratic")
    prefix, kernel, calls = prefill(model, ids[:, :-1]), attend.kernel, []

    def fails_on_the_second(*given, correction=None):
        calls.append(correction.layer)
        if len(calls) == 2:
            raise MemoryError
        return kernel(*given, correction=correction)

    monkeypatch.setattr(attention.attend, "kernel", fails_on_the_second)
    with pytest.raises(MemoryError), torch.no_grad(), handoff(model, prefix, cache_map) as active:
        active.logits(ids[:, -1:])
    assert calls == [0, 1] and active.folded == 1
    refused(lambda: handoff(model, prefix, cache_map), match="partly applied")
    refused(lambda: handoff(model, prefix, DirectMap()), match="partly applied")


def test_what_the_correction_makes_infinite_is_found(never_apart):
    model, ids = tiny_llama(), tokens(1, 20)
    cache_map, prefix = random_residual("quadratic"), prefill(model, ids[:, :-1])
    cache_map.value_right[1] = 3e38
    with torch.no_grad(), handoff(model, prefix, cache_map) as active:
        refused(lambda: active.logits(ids[:, -1:]), match="layer 1")
    assert prefix.corrected_by == "partly applied residual"


def test_a_call_on_another_cache_leaves_the_prefix_as_it_was():
    model, ids, cache_map = tiny_llama(), tokens(1, 20), random_residual("quadratic")
    prefix = prefill(model, ids[:, :-1])
    before = prefix.clone()
    with handoff(model, prefix, cache_map):
        refused(lambda: model(ids), match="another cache or on none")
        assert all(map(torch.equal, prefix.keys + prefix.values, before.keys + before.values))


def test_entering_has_compiled_what_the_first_step_runs(monkeypatch):
    model, ids, made = tiny_llama(), tokens(1, 20), []
    monkeypatch.setattr(attend, "library_or_none", lambda source, macros: made.append(macros))
    attend._compiled.cache_clear()
    try:
        with handoff(model, prefill(model, ids[:, :-1]), random_residual("quadratic"), compiled=True):
            assert [macros["RANK"] > 0 for macros in made] == [True]
    finally:
        attend._compiled.cache_clear()
