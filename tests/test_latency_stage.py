"""The latency stage's tables: other ways of the learned map beside the paths, a step's parts, the floor, and what resumes."""

import pandas as pd
import pytest
import torch
from test_latency import latency_config, maps_for, run_stage, tokens, wide_target
from tiny import tiny_llama

from kvlib import KvlibError, latency, save_map
from kvlib import memory as probing
from kvlib.breakdown import PARTS
from kvlib.compiled import NO_COMPILER, no_compiler
from kvlib.floor import cache_bytes, floor_ms, step_bytes
from kvlib.geometry import Geometry
from kvlib.latency import MadeCaches, standard_paths
from kvlib.memory import resident_bytes
from kvlib.modes import ITSELF, mode_paths, split_name
from kvlib.study import timing
from kvlib.study.latency_tables import floor_rows, mode_rows, summarise
from kvlib.study.pipelining import pipeline_medians
from kvlib.study.probing import MEMORY_COLUMNS
from kvlib.study.timing import other_ways


def test_ways_that_a_map_cannot_take_are_left_out_with_the_reason():
    maps = maps_for(tiny_llama(), "quadratic")
    paths, left_out = mode_paths(
        "learned", maps["learned"], ("materialised", "absorbed", "background", "in_place")
    )
    assert [path.name for path in paths] == ["learned@materialised", "learned@in_place"]
    assert [(entry["path"], entry["mode"]) for entry in left_out] == [
        ("learned", "absorbed"),
        ("learned", "background"),
    ]
    assert {entry["reason"] for entry in left_out} == {maps["learned"].why_not_affine}
    affine = maps_for(tiny_llama(), "linear")["learned"]
    paths, left_out = mode_paths("learned", affine, ("absorbed", "in_place", "background", "compiled"))
    assert [path.mode for path in paths] == [
        "absorbed",
        "in_place",
        "background",
        "in_place",
    ] and not left_out
    assert [path.compiled for path in paths] == [False, False, False, True]
    assert [path.consumes_prefix for path in paths] == [
        False,
        True,
        False,
        True,
    ]  # one call folds nothing yet
    assert mode_paths("ridge", maps["ridge"], ("compiled",))[1][0]["reason"].startswith("a ridge map is one")
    assert split_name("learned@in_place") == ("learned", "in_place") and split_name("direct") == (
        "direct",
        "",
    )


def test_caches_made_before_the_target_was_loaded_are_timed_as_the_sources_own(tmp_path):
    """For a device that holds one model at a time: the same tokens, and no source is ever asked for."""
    settings = {"repetitions": [3, 2], "cold_repetitions": [0, 0], "pipeline_repetitions": []}
    config, source = latency_config(**settings), tiny_llama()
    assert not timing.times_the_source(config)
    assert timing.times_the_source(latency_config(**settings | {"cold_repetitions": [0, 1]}))
    made = MadeCaches.of(source, tokens(3, 30)[:, :24])
    ours = run_stage(tmp_path / "ours", config, source=source).raw
    theirs = run_stage(tmp_path / "theirs", config, source=made).raw
    which = ["prefix_tokens", "path", "repetition", "prompt", "token"]
    assert ours[which].equals(theirs[which]) and set(ours["residency"]) == {"resident"}
    cold = latency_config(**settings | {"cold_repetitions": [1, 0]})
    with pytest.raises(KvlibError, match="cold rounds and caches made beforehand"):
        run_stage(tmp_path / "cold", cold, source=made)


def test_other_ways_run_in_the_rounds_of_the_paths_and_read_no_source_again(tmp_path):
    config = latency_config(modes=["materialised", "in_place"], repetitions=[4, 2], cold_repetitions=[2, 1])
    raw = run_stage(tmp_path, config, maps=maps_for(tiny_llama(), "linear")).raw
    counts = raw.groupby(["prefix_tokens", "path", "residency"]).size()
    for way in ("materialised", "in_place"):
        assert counts[8, f"learned@{way}", "resident"] == 4 and counts[24, f"learned@{way}", "resident"] == 2
        assert (8, f"learned@{way}", "cold") not in counts
    assert counts[8, "learned", "cold"] == 2
    # Interleaved: within each round every path and way has come once.
    short = raw[(raw["prefix_tokens"] == 8) & (raw["residency"] == "resident")].sort_values("order")
    for repetition, group in short.groupby("repetition"):
        assert len(group) == 7 and group["path"].nunique() == 7, repetition
    found = raw.groupby("path")["mode"].unique().map(list)
    assert found["learned@materialised"] == ["materialised"] and found["learned@in_place"] == ["in_place"]
    for length, group in raw[raw["path"].str.startswith("learned")].groupby(["prefix_tokens", "prompt"]):
        assert group["token"].nunique() == 1, length  # the same map gives the same token, whichever way


def test_rows_are_of_paths_alone_and_modes_of_other_ways_alone(tmp_path):
    config = latency_config(modes=["in_place", "materialised"])
    measured = run_stage(tmp_path, config)
    memory = pd.DataFrame(
        [[8, "learned@in_place", 77, "in_place"], [8, "learned", 99, "in_place"]],
        columns=MEMORY_COLUMNS,
    )
    rows, modes = summarise(measured.raw, memory), mode_rows(measured.raw, memory)
    assert {row["path"] for row in rows} == {"native", "direct", "direct_stock", "ridge", "learned"}
    assert [(m["prefix_tokens"], m["path"], m["mode"], m["peak_extra_bytes"]) for m in modes] == [
        (8, "learned", "materialised", None),
        (8, "learned", "in_place", 77),
        (24, "learned", "materialised", None),
        (24, "learned", "in_place", None),
    ]
    assert all(m["p95_ms"] is None and m["repetitions"] == 2 and not m["compiled"] for m in modes)
    assert next(r for r in rows if r["path"] == "learned")["peak_extra_bytes"] == 99


def test_the_shortest_and_the_longest_step_are_taken_apart_once(tmp_path, monkeypatch):
    config = latency_config(
        prefix_tokens=[8, 12, 24], warmups=[1] * 3, repetitions=[1] * 3, cold_repetitions=[1] * 3
    )
    config = config.model_copy(update={"breakdown": True})
    table = run_stage(tmp_path, config).breakdown
    assert list(table.columns) == list(timing.BREAKDOWN_COLUMNS)
    assert table[["prefix_tokens", "path", "part"]].to_numpy().tolist() == [
        [tokens, path, part] for tokens in (8, 24) for path in ("direct", "learned") for part in PARTS
    ]
    monkeypatch.setattr(timing, "breakdown", lambda *_: pytest.fail("taken apart again"))
    pd.testing.assert_frame_equal(run_stage(tmp_path, config).breakdown, table)


def test_a_run_killed_between_a_steps_parts_and_its_times_measures_that_length_again(tmp_path, monkeypatch):
    config = latency_config(breakdown=True)
    written, whole = [], timing.write_table

    def killed(path, table):
        written.append(path.name)
        if path.name.startswith("00024"):
            raise KeyboardInterrupt
        return whole(path, table)

    monkeypatch.setattr(timing, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path, config)
    assert [name.rsplit("-", 1)[0] for name in written] == [
        "breakdown-00008",
        "00008",
        "breakdown-00024",
        "00024",
    ]
    monkeypatch.setattr(timing, "write_table", whole)
    measured = run_stage(tmp_path, config)
    assert sorted(measured.breakdown["prefix_tokens"].unique()) == sorted(
        measured.raw["prefix_tokens"].unique()
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_weight_once_and_one_row_of_an_embedding_of_its_own(tied):
    target = tiny_llama(tie_word_embeddings=tied)
    embedding = target.get_input_embeddings().weight
    distinct = {p.data_ptr(): p.numel() for p in target.parameters()}
    everything = 4 * sum(distinct.values())
    unread = 0 if tied else 4 * (embedding.numel() - embedding.shape[1])
    assert step_bytes(target) == everything - unread
    assert step_bytes(target.to(torch.bfloat16)) == (everything - unread) // 2


def test_the_floor_is_weights_and_cache_over_the_bandwidth():
    shape = Geometry.of(tiny_llama())
    held = cache_bytes(shape, 9, torch.float32)
    assert held == 3 * 2 * 2 * 8 * 16 * 4  # layers, keys and values, heads, positions, dimensions, bytes
    assert floor_ms(3_000_000, 1.5) == pytest.approx(2.0)
    assert floor_rows([9], 1000, shape, torch.float32, 2.0) == [
        {"prefix_tokens": 9, "weight_bytes": 1000, "cache_bytes": held, "floor_ms": (1000 + held) / 2e6}
    ]


def test_the_pipeline_is_asked_for_where_it_has_repetitions(tmp_path, monkeypatch):
    config = latency_config(pipeline_repetitions=[2, 0])
    table = run_stage(tmp_path, config).pipeline
    assert set(table["prefix_tokens"]) == {8} and set(table["path"]) == {"learned"}
    assert table.groupby("way").size().to_dict() == {"serial": 2, "pipelined": 2, "resident": 2}
    monkeypatch.setattr(timing, "time_pipeline", lambda *_: pytest.fail("timed a second time"))
    pd.testing.assert_frame_equal(run_stage(tmp_path, config).pipeline, table)
    (row,) = pipeline_medians(table)
    assert row["repetitions"] == 2 and row["serial_p50_ms"] == table[table.way == "serial"].ms.median()
    assert run_stage(tmp_path, latency_config()).pipeline.empty


def test_memory_is_probed_for_other_ways_too(tmp_path):
    """The probe's own process learns a way from the path's name; a second cache shows in its peak."""
    target = wide_target(tmp_path / "target")
    maps = maps_for(target, "linear")
    files = {name: tmp_path / f"{name}.safetensors" for name in maps}
    for name, cache_map in maps.items():
        save_map(cache_map, files[name], pair="p")
    config = latency_config(
        memory=True,
        prefix_tokens=[1024],
        repetitions=[1],
        warmups=[0],
        cold_repetitions=[0],
        modes=["materialised", "in_place"],
    )
    memory = run_stage(tmp_path, config, target=target, maps=maps, map_files=files, length=1024).memory
    found = memory.set_index("path")
    assert len(found) == 7 and found.loc["learned@in_place", "mode"] in ("in_place", None)
    if resident_bytes() is None:
        assert found["peak_extra_bytes"].isna().all()
        return
    cache = 4 * 2 * 8 * 1023 * 32 * 4
    assert found.loc["learned@materialised", "peak_extra_bytes"] >= cache
    assert found.loc["learned@in_place", "peak_extra_bytes"] < cache
    assert found.loc["learned", "peak_extra_bytes"] < 0.15 * cache


def test_the_source_reads_each_prompt_once_for_all_resident_clocks(tmp_path, monkeypatch):
    read, whole = [], latency.prefill

    def counting(model, ids, **options):
        read.append(ids.shape[1])
        return whole(model, ids, **options)

    monkeypatch.setattr(latency, "prefill", counting)
    config = latency_config(prefix_tokens=[8, 24], repetitions=[3, 3], cold_repetitions=[1, 0])
    first = run_stage(tmp_path, config).raw
    assert sorted(read) == [7] * 3 + [23] * 3  # three cold clocks; three prompts, over the longest prefix
    run_stage(tmp_path, config)
    assert len(read) == 6  # nothing is left to time
    # a prefix of its own, prefilled where it is timed, gives the same tokens
    monkeypatch.setattr(
        timing.MadeCaches, "over", lambda self, n, tokens, device: whole(model, ids[n : n + 1, :tokens])
    )
    model, ids = tiny_llama(), tokens(3, 30)
    again = run_stage(tmp_path / "again", config, target=model).raw
    assert (
        first.groupby(["prefix_tokens", "path", "prompt"])["token"]
        .unique()
        .map(list)
        .equals(again.groupby(["prefix_tokens", "path", "prompt"])["token"].unique().map(list))
    )


def test_the_gates_pass_over_the_longest_prefix_is_one_of_natives_warm_ups():
    maps, config = maps_for(tiny_llama()), latency_config(prefix_tokens=[8, 24], warmups=[2, 2])
    for index, wanted in ((0, 2), (1, 1)):
        rounds = timing._rounds(config, index, standard_paths(maps), [], 3, seed=0)
        warm = [path.name for one in rounds for path, _, repetition in one.clocks if repetition is None]
        assert warm.count("native") == wanted and warm.count("direct") == 2


def test_a_probe_of_a_way_that_does_not_exist_is_refused():
    for probe in ("learned@sideways:128", "direct@in_place:128"):
        with pytest.raises(KvlibError, match=f"probe '{probe}' given, expected PATH:TOKENS"):
            probing.main(["no-such-folder", probe])


def test_progress_counts_everything_that_is_measured(tmp_path):
    config = latency_config(modes=["in_place"], breakdown=True)
    run_stage(tmp_path, config)  # asserts that all units were counted
    assert other_ways(config, maps_for(tiny_llama()), None)[1] == []


def test_without_a_compiler_the_compiled_way_is_left_out_and_says_so():
    config, maps = latency_config(modes=["in_place", "compiled"]), maps_for(tiny_llama())
    paths, left_out = other_ways(config, maps, NO_COMPILER)
    assert [path.name for path in paths] == ["learned@in_place"]
    assert left_out == [{"path": "learned", "mode": "compiled", "reason": NO_COMPILER}]
    compiled = other_ways(config, maps, None)[0]
    assert [path.name for path in timing.probed(compiled)] == [
        "learned@in_place"
    ]  # no memory of a compiler at work


def test_a_learned_path_that_is_compiled_itself_is_not_timed_a_second_time(tmp_path, compiled_code):
    config, maps = latency_config(modes=["in_place", "compiled"]), maps_for(tiny_llama(), "quadratic")
    assert timing.learned_is_compiled(maps, torch.device("cpu"))
    assert not timing.learned_is_compiled(maps_for(tiny_llama(), "linear"), torch.device("cpu"))
    paths, left_out = other_ways(config, maps, None, chosen_compiled=True)
    assert [(path.name, path.compiled) for path in paths] == [("learned@in_place", False)]
    assert left_out == [{"path": "learned", "mode": "compiled", "reason": ITSELF}]
    measured = run_stage(tmp_path, config, maps=maps)
    rows = {row["path"]: row for row in summarise(measured.raw, measured.memory, 0.9)}
    assert (rows["learned"]["mode"], rows["learned"]["compiled"]) == ("in_place", True)
    assert rows["learned"]["compile_seconds"] == 0.9
    assert not rows["ridge"]["compiled"] and rows["ridge"]["compile_seconds"] is None
    (way,) = {(row["mode"], row["compiled"]) for row in mode_rows(measured.raw, measured.memory, 0.9)}
    assert way == ("in_place", False)


def test_a_compiler_is_looked_for_before_it_is_needed(monkeypatch, tmp_path):
    assert no_compiler(torch.device("cpu")) is None
    (tmp_path / "without").write_text("#!/bin/sh\n")  # runs, and knows of no OpenMP
    (tmp_path / "without").chmod(0o755)
    for name in ("none", "without"):
        monkeypatch.setenv("CC", str(tmp_path / name))
        assert no_compiler(torch.device("cpu")) == NO_COMPILER
