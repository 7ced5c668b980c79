"""Where a step's time goes: parts that add up to the profiled wall clock, and nothing left on the model afterwards."""

import time

import pytest
import torch
from tiny import tiny_llama, tokens

from kvlib import DirectMap, ResidualMap, attaching, clocks, latency, prefill
from kvlib.attention import Affine
from kvlib.breakdown import ARGMAX, ATTACHING, ATTENTION, BODY, HEAD, MAP, PARTS, PYTHON, WEIGHTS, breakdown
from kvlib.folding import Folding
from kvlib.geometry import Geometry
from kvlib.kernels import attend
from kvlib.kernels.correct import Correction
from kvlib.latency import TargetPath
from kvlib.maps import CacheMap
from kvlib.reading import Handoff


def learned_map(residual: str = "quadratic") -> ResidualMap:
    """A residual that changes something, for `tiny_llama`."""
    shape, generator = Geometry.of(tiny_llama()), torch.Generator().manual_seed(0)
    one = torch.ones(shape.layers, shape.heads)
    initial = ResidualMap.initial(one, one, shape.head_dim, 4, residual=residual, generator=generator)
    tensors = {
        name: torch.randn(t.shape, generator=generator) * 0.3 if "right" in name else t
        for name, t in initial.tensors().items()
    }
    return ResidualMap.restore(initial.settings(), tensors)


def parts_of(path: TargetPath, length: int = 40, repetitions: int = 1) -> dict[str, float]:
    target, ids = tiny_llama(), tokens(1, length)
    prefix = None if path.way == "prefill" else prefill(target, ids[:, :-1])
    found = breakdown(target, path, ids, prefix, repetitions)
    assert [row["part"] for row in found] == list(PARTS)
    return {row["part"]: row["ms"] for row in found}


def test_the_parts_add_up_to_the_wall_clock_of_the_profiled_run(monkeypatch):
    walls, clock = [], clocks.clock

    def watched(device):
        began = clock(device)

        class Watch:
            def __enter__(self):
                read = began.__enter__()

                def remembered():
                    walls.append(read())
                    return walls[-1]

                return remembered

            def __exit__(self, *error):
                return began.__exit__(*error)

        return Watch()

    monkeypatch.setattr("kvlib.breakdown.clock", watched)
    parts = parts_of(TargetPath("direct", "handoff", DirectMap()), repetitions=3)
    assert sum(parts.values()) == pytest.approx(sorted(walls[1:])[1])  # the first run only warms up
    assert all(ms >= 0 for ms in parts.values())


@pytest.mark.usefixtures("compiled_code")
def test_what_compiled_code_takes_is_attention_and_not_python(monkeypatch):
    kernel = attend.kernel

    def slow(*tensors, **options):
        compiled = kernel(*tensors, **options)
        assert compiled is not None

        def step(*arguments, **maps):
            time.sleep(0.01)
            return compiled(*arguments, **maps)

        return step

    monkeypatch.setattr(attend, "kernel", slow)
    layers = Geometry.of(tiny_llama()).layers
    assert parts_of(TargetPath("direct", "handoff", DirectMap()))[ATTENTION] >= 10 * layers


def test_only_a_path_with_a_map_spends_time_on_one(monkeypatch):
    monkeypatch.setattr(
        attend, "kernel", lambda *_, **__: None
    )  # compiled attention applies an absorbed map itself
    direct = parts_of(TargetPath("direct", "handoff", DirectMap()))
    assert direct[MAP] == 0
    assert all(direct[part] > 0 for part in PARTS if part != MAP)
    for residual, mode in (
        ("linear", "absorbed"),
        ("linear", "in_place"),
        ("linear", "materialised"),
        ("quadratic", "auto"),
    ):
        learned = learned_map(residual)
        assert parts_of(TargetPath("learned", "handoff", learned, mode))[MAP] > 0, mode


@pytest.mark.parametrize("way", ["prefill", "stock"])
def test_paths_without_a_handoff_attach_nothing_and_have_all_other_parts(way):
    parts = parts_of(TargetPath("native", way))
    assert parts[MAP] == 0
    assert all(parts[part] > 0 for part in (WEIGHTS, HEAD, ATTENTION, BODY, ARGMAX, PYTHON))


def test_what_takes_long_shows_in_its_part(monkeypatch):
    attention = attaching.two_segment_attention

    def slow(*arguments, **options):
        end = time.perf_counter() + 2e-3
        while time.perf_counter() < end:
            torch.ones(1000).sum()
        return attention(*arguments, **options)

    monkeypatch.setattr(attaching, "two_segment_attention", slow)
    parts = parts_of(TargetPath("direct", "handoff", DirectMap()))
    assert parts[ATTENTION] > max(parts[part] for part in (WEIGHTS, HEAD, BODY, ATTACHING, ARGMAX))


def test_nothing_is_left_behind_not_even_by_a_run_that_fails(monkeypatch):
    target, ids = tiny_llama(), tokens(1, 12)
    prefix = prefill(target, ids[:, :-1])
    before = [
        attaching.two_segment_attention, latency.handoff, Handoff.__enter__, Handoff.__exit__, Affine.forward,
        Affine.transpose, Folding._fold, Correction.__call__, CacheMap.materialise,
    ]  # fmt: skip
    breakdown(target, TargetPath("direct", "handoff", DirectMap()), ids, prefix, 1)
    monkeypatch.setattr("kvlib.breakdown.first_token", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        breakdown(target, TargetPath("direct", "handoff", DirectMap()), ids, prefix, 1)
    after = [
        attaching.two_segment_attention, latency.handoff, Handoff.__enter__, Handoff.__exit__, Affine.forward,
        Affine.transpose, Folding._fold, Correction.__call__, CacheMap.materialise,
    ]  # fmt: skip
    assert before == after
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


def test_a_path_that_consumes_its_cache_leaves_the_given_one_as_it_was():
    target, ids = tiny_llama(), tokens(1, 12)
    prefix = prefill(target, ids[:, :-1])
    kept = [k.clone() for k in prefix.keys]
    path = TargetPath("learned", "handoff", learned_map())
    assert path.consumes_prefix
    breakdown(target, path, ids, prefix, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, prefix.keys, strict=True))
