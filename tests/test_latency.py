"""Time to first token: shuffled but complete rounds, resumed measuring, memory in processes of its own."""

import copy
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import tiny_llama, tokens

from kvlib import DirectMap, KvlibError, ResidualMap, RidgeMap, prefill, save_map
from kvlib import memory as probing
from kvlib.cache import Geometry
from kvlib.clocks import memory_bandwidth_gb_s, percentiles
from kvlib.latency import TargetPath, first_token, measure, schedule, standard_paths
from kvlib.memory import resident_bytes
from kvlib.study import latency_tables, timing
from kvlib.study.latency_tables import crossover
from kvlib.study.probing import MEMORY_COLUMNS
from kvlib.study.profile import Latency
from kvlib.study.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
NO_PROC = resident_bytes() is None
COUNTS = {"warmups": 2, "repetitions": 6, "cold_repetitions": 3}


def maps_for(model, residual: str = "quadratic", seed: int = 0) -> dict:
    shape, generator = Geometry.of(model), torch.Generator().manual_seed(seed)
    size = (shape.layers, shape.heads)
    eyes = [torch.eye(shape.head_dim).expand(*size, -1, -1).clone() for _ in range(2)]
    zeros = [torch.zeros(*size, shape.head_dim) for _ in range(2)]
    learned = ResidualMap.initial(
        torch.ones(size), torch.ones(size), shape.head_dim, 4, residual=residual, generator=generator
    )
    tensors = {
        n: torch.randn(t.shape, generator=generator) * 0.3 if "right" in n else t
        for n, t in learned.tensors().items()
    }
    return {
        "ridge": RidgeMap(eyes[0], zeros[0], eyes[1], zeros[1], 1e-3),
        "learned": ResidualMap.restore(learned.settings(), tensors),
    }


def rounds_for(maps, prompts: int = 3, seed: int = 1, **counts):
    return schedule(standard_paths(maps), prompts, **{**COUNTS, **counts}, seed=seed)


def test_every_round_is_complete_and_in_an_order_of_its_own():
    rounds = rounds_for(maps_for(tiny_llama()))
    orders = [[(path.name, residency) for path, residency, _ in one.clocks] for one in rounds]
    everything = ["native", "direct", "direct_stock", "ridge", "learned"]
    for order in orders:
        assert sorted(name for name, residency in order if residency == "resident") == sorted(everything)
    assert len({tuple(order) for order in orders}) > len(orders) // 2
    assert len({order.index(("native", "resident")) for order in orders}) > 2
    kept = Counter(
        (p.name, residency)
        for one in rounds
        for p, residency, repetition in one.clocks
        if repetition is not None
    )
    assert kept == {(n, "resident"): 6 for n in everything} | {
        (n, "cold"): 3 for n in ("direct", "ridge", "learned")
    }


def test_the_same_seed_draws_the_same_order():
    def names(seed):
        return [[(p.name, r, i) for p, r, i in one.clocks] for one in rounds_for({}, seed=seed)]

    state = random.getstate()
    assert names(3) == names(3) != names(4)
    assert random.getstate() == state


def test_native_can_be_timed_less_often_than_the_handoffs():
    rounds = rounds_for({}, warmups=1, repetitions=6, cold_repetitions=0, native_repetitions=2)
    timed = [(path.name, i) for one in rounds for path, _, i in one.clocks if i is not None]
    assert [i for name, i in timed if name == "native"] == [0, 1]
    assert [i for name, i in timed if name == "direct"] == [*range(6)]
    places = [
        n
        for n, one in enumerate(rounds)
        if any(p.name == "native" for p, _, i in one.clocks if i is not None)
    ]
    assert places == [1, 4]  # one warm-up, then evenly over six rounds


@pytest.mark.parametrize("repetitions, cold_repetitions", [(6, 3), (3, 2), (2, 3), (1, 0), (20, 10)])
def test_repetitions_rotate_over_the_prefixes_and_hold_one_cache_at_a_time(repetitions, cold_repetitions):
    rounds = rounds_for({}, warmups=1, repetitions=repetitions, cold_repetitions=cold_repetitions)
    prompts = [one.prompt for one in rounds]
    assert prompts == sorted(prompts) and set(prompts) == set(
        range(min(3, max(repetitions, cold_repetitions)))
    )
    assert max(Counter(prompts[1:]).values()) - min(Counter(prompts[1:]).values()) <= 1
    for residency, count in (("resident", repetitions), ("cold", cold_repetitions)):
        found = [i for one in rounds[1:] for p, r, i in one.clocks if r == residency and p.name == "direct"]
        assert found == list(range(count))


def test_samples_tell_what_was_timed():
    target, source = tiny_llama(), tiny_llama(seed=1)
    seen = []
    rounds = rounds_for(maps_for(target))
    samples = measure(
        target, source, rounds, tokens(3, 24), lambda name, residency: seen.append((name, residency))
    )
    assert len(samples) == 6 * 5 + 3 * 3 and [s.order for s in samples] == list(range(len(samples)))
    assert len(seen) == len(samples) + 2 * 5 + 3 and seen.count(("source", "prefill")) == 3
    modes = {(s.path, s.mode) for s in samples}
    assert modes == {
        ("native", "prefill"), ("direct", "absorbed"), ("direct_stock", "materialised"),
        ("ridge", "absorbed"), ("learned", "in_place"),
    }  # fmt: skip
    for s in samples:
        assert s.prefix_tokens == 24 and s.ms > 0
        assert (s.handoff_ms is None) == (s.residency == "resident")
        assert s.residency == "resident" or 0 < s.handoff_ms < s.ms


def test_repetitions_of_a_path_agree_on_the_token_even_where_a_map_consumes_its_cache():
    target, source = tiny_llama(), tiny_llama(seed=1)
    ids = tokens(1, 24)
    maps = maps_for(target)
    samples = measure(target, source, rounds_for(maps, prompts=1), ids)
    found = {path: {s.token for s in samples if s.path == path} for path in {s.path for s in samples}}
    assert all(len(ids) == 1 for ids in found.values())
    assert found["direct"] == found["direct_stock"] == found["ridge"]  # this ridge is the identity
    with torch.no_grad():
        corrected = maps["learned"].materialise(prefill(source, ids[:, :-1]))
        token = first_token(target, TargetPath("stock", "stock"), ids, corrected).token
    assert found["learned"] == {token}


def test_native_and_the_targets_own_cache_agree():
    target, ids = tiny_llama(), tokens(4, 40)
    samples = measure(target, target, rounds_for({}, prompts=4), ids)
    wanted = target(ids).logits[:, -1].argmax(-1).tolist()
    assert len({s.prompt for s in samples}) == 4
    assert all(s.token == wanted[s.prompt] for s in samples)


def test_a_map_in_place_gets_a_copy_made_before_its_clock(monkeypatch):
    target, ids = tiny_llama(), tokens(1, 24)
    path = TargetPath("learned", "handoff", maps_for(target)["learned"])
    assert path.consumes_prefix and not TargetPath("direct", "handoff", DirectMap()).consumes_prefix
    assert TargetPath("direct", "handoff", DirectMap(), "in_place").consumes_prefix
    prefix = prefill(target, ids[:, :-1])
    before = [k.clone() for k in prefix.keys]
    handed = []
    monkeypatch.setattr("kvlib.latency.prefill", lambda *_: prefix)
    monkeypatch.setattr(
        "kvlib.latency.first_token", lambda t, p, i, c: handed.append(c) or first_token(t, p, i, c)
    )
    measure(target, target, schedule([path], 1, warmups=0, repetitions=2, cold_repetitions=0, seed=0), ids)
    assert len({id(c) for c in [prefix, *handed]}) == 3
    assert all(torch.equal(a, b) for a, b in zip(before, prefix.keys, strict=True))


def test_a_broken_source_is_named_before_anything_is_timed():
    target, source = tiny_llama(), tiny_llama(seed=1)
    with torch.no_grad():
        source.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(KvlibError, match="layer 1 of the source's cache hold NaN"):
        measure(target, source, rounds_for({}), tokens(3, 24))
    with pytest.raises(KvlibError, match="expected at least 2"):
        measure(target, target, rounds_for({}), tokens(3, 1))
    with pytest.raises(KvlibError, match="with a map for 'handoff' only"):
        TargetPath("direct", "handoff")


def test_p95_needs_twenty_repetitions():
    assert percentiles(range(1, 20)) == (10, None)
    p50_ms, p95_ms = percentiles(range(1, 21))
    assert p50_ms == 10.5 and p95_ms == pytest.approx(np.percentile(range(1, 21), 95))


LENGTHS = [128, 512, 2048, 8192]


@pytest.mark.parametrize(
    "native_ms, path_ms, tokens, below",
    [
        ([10, 40, 160, 640], [80, 80, 80, 80], 1024, False),  # both are straight lines in log-log
        ([10, 40, 160, 640], [5, 5, 5, 5], None, True),
        ([10, 40, 160, 640], [20, 80, 320, 1280], None, False),
        ([10, 40, 160, 640], [40, 40, 40, 40], 512, False),  # equal is not yet faster
        (
            [10, 40, 160, 640],
            [5, 80, 80, 80],
            1024,
            False,
        ),  # faster once, slower again: from where it stays so
        ([10, 40, 160, 640], [5, 5, 5, 700], None, False),
    ],
)
def test_crossover(native_ms, path_ms, tokens, below):
    wanted = None if tokens is None else pytest.approx(tokens)
    assert crossover(LENGTHS, native_ms, path_ms) == (wanted, below)


def test_summary_rows_and_crossovers():
    columns = ("prefix_tokens", "path", "residency", "ms", "handoff_ms", "mode", "compiled")
    raw = pd.DataFrame(
        dict(zip(columns, (n, *values, False), strict=True))
        for n, count in ((128, 20), (512, 3))
        for values in [
            ("learned", "cold", n / 2, 9.0, "absorbed"), ("learned", "resident", 200.0, None, "absorbed"),
            ("ridge", "resident", 300.0, None, "absorbed"), ("native", "resident", float(n), None, "prefill"),
        ]
        for _ in range(count)
    )  # fmt: skip
    memory = pd.DataFrame(
        [[128, "native", 7, "prefill"], [128, "learned", None, "absorbed"]], columns=MEMORY_COLUMNS
    )
    rows = latency_tables.summarise(raw, memory)
    assert [(r["prefix_tokens"], r["path"], r["residency"]) for r in rows[:4]] == [
        (128, "native", "resident"), (128, "ridge", "resident"),
        (128, "learned", "resident"), (128, "learned", "cold"),
    ]  # fmt: skip
    native, _, resident, cold = rows[:4]
    assert (
        native["peak_extra_bytes"] == 7
        and resident["peak_extra_bytes"] is None
        and cold["peak_extra_bytes"] is None
    )
    assert (native["p50_ms"], native["p95_ms"], native["repetitions"], native["mode"]) == (
        128,
        128,
        20,
        "prefill",
    )
    assert rows[4]["p95_ms"] is None and rows[4]["repetitions"] == 3
    assert cold["handoff_p50_ms"] == 9 and resident["handoff_p50_ms"] is None
    json.dumps(rows, allow_nan=False)
    found = latency_tables.crossovers(rows)
    assert found["resident"] == {"learned": pytest.approx(200), "ridge": pytest.approx(300), "below": False}
    assert found["cold"] == {"learned": None, "below": True}


def latency_config(**changes) -> Latency:
    settings = {
        "prefix_tokens": [8, 24],
        "warmups": [1, 1],
        "repetitions": [2, 2],
        "cold_repetitions": [1, 1],
        "memory": False,
        "modes": [],
        "breakdown": False,
    }
    return Latency.model_validate({**settings, **changes})


def wide_target(folder):
    """A model of next to no weights with a wide cache, saved, so that its 8 MiB stand out from all else."""
    target = tiny_llama(
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=1024,
    )
    target.save_pretrained(folder)
    return target


def run_stage(folder, config, *, key="k", target=None, maps=None, map_files=None, length=30, source=None):
    target = target or tiny_llama()
    maps = maps or maps_for(target)
    by_itself = timing.learned_is_compiled(maps, torch.device("cpu"))
    modes = timing.other_ways(config, maps, None, by_itself)[0]
    progress = Progress("latency", timing.latency_units(config, maps, modes, 3))
    places = {"target_folder": folder / "target", "map_files": map_files or {}}
    result = timing.measure_latency(
        target,
        source or copy.deepcopy(target),
        maps,
        modes,
        tokens(3, length),
        config,
        folder,
        seed=5,
        key=key,
        progress=progress,
        **places,
    )
    assert progress.done == pytest.approx(progress.total)
    return result


def test_a_length_that_was_measured_is_not_measured_again(tmp_path, monkeypatch):
    config, calls = latency_config(), []

    def counted(target, source, rounds, prompts, *more):
        calls.append(prompts.shape[1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(target, source, rounds, prompts, *more)

    monkeypatch.setattr(timing, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path, config)
    measured = run_stage(tmp_path, config)
    raw, memory = measured.raw, measured.memory
    assert measured.breakdown.empty and measured.pipeline.empty
    assert calls == [8, 24, 24]
    assert list(raw.columns) == list(
        asdict(measure(tiny_llama(), tiny_llama(), rounds_for({}), tokens(3, 8))[0])
    )
    assert len(raw) == 2 * (2 * 5 + 3) and sorted(raw["prefix_tokens"].unique()) == [8, 24]
    assert memory.empty
    pd.testing.assert_frame_equal(run_stage(tmp_path, config).raw, raw)
    assert calls == [8, 24, 24]
    run_stage(tmp_path, config, key="another")
    assert calls == [8, 24, 24, 8, 24]


def test_prefixes_that_are_too_short_are_refused(tmp_path):
    with pytest.raises(KvlibError, match=r"prefixes \(3, 30\) given, expected \(N, 40 or more\)"):
        run_stage(tmp_path, latency_config(prefix_tokens=[8, 40]))


def test_bandwidth_is_positive():
    assert 0.1 < memory_bandwidth_gb_s(size_bytes=2**24, repetitions=2) < 10_000


def test_peak_memory_sees_what_is_held_and_what_is_gone():
    """In a fresh process, as probes are: pages that earlier work freed would be used again and hide what is taken."""
    script = (
        "import torch\nfrom kvlib.memory import PeakMemory\n"
        "with PeakMemory(torch.device('cpu')) as peak:\n"
        "    held = torch.ones(2**22)\n    torch.ones(2**24)\n    peak.sample()\nprint(peak.extra_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if NO_PROC:
        assert done.stdout.strip() == "None"
    else:
        assert int(done.stdout) == pytest.approx(4 * (2**22 + 2**24), abs=2**22)


def test_memory_is_probed_in_processes_of_their_own(tmp_path, monkeypatch):
    """A wide cache on a thin model, so that its 8 MiB stand out from all else."""
    target = wide_target(tmp_path / "target")
    maps, files = (
        maps_for(target, "linear"),
        {name: tmp_path / f"{name}.safetensors" for name in ("ridge", "learned")},
    )
    for name, cache_map in maps.items():
        save_map(cache_map, files[name], pair="p")
    config = latency_config(
        memory=True, prefix_tokens=[1024], repetitions=[1], warmups=[0], cold_repetitions=[0]
    )
    settings = {"target": target, "maps": maps, "map_files": files, "length": 1024}
    table = run_stage(tmp_path, config, **settings).memory
    monkeypatch.setattr("kvlib.study.probing._lines", lambda command: pytest.fail("probed again"))
    pd.testing.assert_frame_equal(run_stage(tmp_path, config, **settings).memory, table)

    assert sorted(zip(table["prefix_tokens"], table["path"], strict=True)) == [
        (1024, path) for path in ("direct", "direct_stock", "learned", "native", "ridge")
    ]
    if NO_PROC:
        assert table["peak_extra_bytes"].isna().all()
        return
    peak = table.set_index("path")["peak_extra_bytes"]
    cache_bytes = 4 * 2 * 8 * 1023 * 32 * 4
    assert cache_bytes <= peak["direct_stock"] < 1.5 * cache_bytes
    assert cache_bytes <= peak["native"] < 4 * cache_bytes
    for name in ("direct", "ridge", "learned"):
        assert 0 < peak[name] < 0.15 * cache_bytes, name


def test_a_probe_that_is_not_one_is_refused():
    for probe in ("sideways:128", "native:1", "native", "native:many"):
        with pytest.raises(
            KvlibError,
            match=f"probe '{probe}' given, expected PATH:TOKENS with 2 tokens or more and a path of native,",
        ):
            probing.main(["no-such-folder", probe])
