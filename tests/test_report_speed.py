"""The latency chapter's newer part on made-up records: what charts, tables and sentences say, whatever the numbers are."""

import copy
import json
import sys
import types
from pathlib import Path

import pytest
from fake_records import write_fake_run

from kvlib.breakdown import MAP, PARTS
from kvlib.errors import KvlibError
from kvlib.report import figures, gpu, prose, speed, tables
from kvlib.report.agreement import read_raw_tables
from kvlib.report.figures.speed import PART_STYLES, WRITTEN
from kvlib.report.prose.pages import front_facts
from kvlib.report.prose.speed import parts_sentence
from kvlib.study.run import read_summary

STAGES = ("pair", "screening", "confirmation", "frozen_evaluation", "latency")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("results") / "laptop")


@pytest.fixture
def records(run) -> dict[str, dict]:
    return {stage: copy.deepcopy(read_summary(run / stage)) for stage in STAGES}


@pytest.fixture
def final(records) -> dict:
    return records["frozen_evaluation"]


@pytest.fixture
def latency(records) -> dict:
    return records["latency"]


def reached(latency: dict) -> dict[str, speed.Target]:
    return {one.id: one for one in speed.targets(latency, speed.read_targets())}


def facts(final: dict, latency: dict) -> dict[str, str]:
    return prose.speed_facts(final, latency, speed.targets(latency, speed.read_targets()))


def set_ms(latency: dict, path: str, ms: float, residency: str = "resident") -> None:
    for row in latency["rows"]:
        if (row["path"], row["residency"]) == (path, residency):
            row["p50_ms"] = ms


def test_the_frontier_has_the_learned_map_twice_at_one_fidelity_with_an_arrow_between(final, latency):
    figure = figures.moved_frontier(final, latency)
    traces = {trace.name: trace for trace in figure.data}
    written, handed = traces[WRITTEN], traces["learned correction, absorbed"]
    assert written.y == handed.y and written.x[0] > handed.x[0]
    arrow = traces["the same fidelity, moved"]
    assert list(arrow.x) == [written.x[0], handed.x[0]] and list(arrow.y) == [written.y[0], handed.y[0]]
    assert arrow.marker.symbol == "arrow" and list(arrow.marker.size) == [0, 13]


def test_the_slider_moves_every_point_to_the_times_of_its_length(final, latency):
    figure = figures.moved_frontier(final, latency)
    steps = {step.label: step.args[0]["x"] for step in figure.layout.sliders[0].steps}
    assert list(steps) == [f"{t:,}" for t in sorted({r["prefix_tokens"] for r in latency["rows"]})]
    learned = [trace.name for trace in figure.data].index("learned correction, absorbed")
    for label, moved in steps.items():
        assert len(moved) == len(figure.data)
        row = speed.row_of(latency, int(label.replace(",", "")), "learned")
        assert moved[learned] == [row["p50_ms"]] and moved[-1][1] == row["p50_ms"]


def test_a_run_that_did_not_write_the_map_out_still_draws_and_says_so(final, latency):
    latency["modes"] = []
    assert figures.moved_frontier(final, latency).data[-1].x[0] is None
    said = facts(final, latency)
    assert "was not written out" in said["moved"] and "No other way" in said["ways"]
    assert "written out" not in tables.moved_frontier(final, latency).to_string()


def test_what_the_moved_point_means_depends_on_where_it_came_to(final, latency):
    for row in latency["modes"]:
        row["p50_ms"] = 200.0
    set_ms(latency, "direct", 100.0)
    set_ms(latency, "learned", 101.0)
    said = facts(final, latency)["moved"]
    assert "has moved: the same fidelity, at direct's latency" in said and "1.01 times direct reuse" in said
    assert "is 2 times direct reuse's" in said
    set_ms(latency, "learned", 150.0)
    assert (
        "not as far as direct's latency: the limit set beforehand was 1.05 times"
        in facts(final, latency)["moved"]
    )
    set_ms(latency, "learned", 250.0)
    assert "has not moved" in facts(final, latency)["moved"]


def test_the_front_page_names_a_price_only_where_there_is_one(run, records):
    set_ms(records["latency"], "direct", 100.0)
    set_ms(records["latency"], "learned", 102.0)
    assert "costs next to no time" in front_facts(records, 256, read_raw_tables(run))["time"]
    set_ms(records["latency"], "learned", 140.0)
    assert "has its price, 1.4 times the time" in front_facts(records, 256, read_raw_tables(run))["time"]


def test_each_figure_to_be_reached_is_judged_by_the_length_furthest_from_its_limit(latency):
    for row in latency["rows"]:
        row["p50_ms"] = 100.0
    speed.row_of(latency, 2048, "learned")["p50_ms"] = 104.0
    speed.row_of(latency, 8192, "native")["p50_ms"] = 12_000.0
    found = reached(latency)
    one = found["learned_direct"]
    assert (one.value, one.tokens, one.result) == (1.04, 2048, "met")
    speed.row_of(latency, 128, "learned")["p50_ms"] = 106.0
    assert reached(latency)["learned_direct"].result == "not met"
    assert (found["native_learned"].value, found["native_learned"].result) == (120.0, "met")
    speed.row_of(latency, 8192, "native")["p50_ms"] = 15_000.0
    assert reached(latency)["native_learned"].result == "met, the aim too"
    speed.row_of(latency, 8192, "native")["p50_ms"] = 9_000.0
    assert reached(latency)["native_learned"].result == "not met"


def test_the_figures_to_be_reached_are_the_ratios_that_their_names_say(latency):
    t = 8192
    rows = {(r["path"], r["residency"]): r for r in latency["rows"] if r["prefix_tokens"] == t}
    modes = {r["mode"]: r for r in latency["modes"] if r["prefix_tokens"] == t}
    floor = next(r for r in latency["floor"] if r["prefix_tokens"] == t)
    learned, direct = rows["learned", "resident"], rows["direct", "resident"]
    wanted = {
        "learned_direct": learned["p50_ms"] / direct["p50_ms"],
        "learned_stock": learned["p50_ms"] / rows["direct_stock", "resident"]["p50_ms"],
        "native_learned": rows["native", "resident"]["p50_ms"] / learned["p50_ms"],
        "written_direct": modes["materialised"]["p50_ms"] / direct["p50_ms"],
        "in_place_direct": modes["in_place"]["p50_ms"] / direct["p50_ms"],
        "learned_direct_peak": learned["peak_extra_bytes"] / direct["peak_extra_bytes"],
        "learned_native_peak": learned["peak_extra_bytes"] / rows["native", "resident"]["peak_extra_bytes"],
        "direct_floor": direct["p50_ms"] / floor["floor_ms"],
        "cold_resident": rows["learned", "cold"]["handoff_p50_ms"] / learned["p50_ms"],
    }
    assert {name: speed.ratio_at(latency, name, t) for name in speed.RATIOS} == wanted
    assert {entry["id"] for entry in speed.read_targets()} <= set(speed.RATIOS)


def test_a_figure_that_a_run_does_not_measure_is_neither_met_nor_missed(final, latency):
    for key in ("rows", "modes", "floor"):
        latency[key] = [row for row in latency[key] if row["prefix_tokens"] < 8192]
    latency["breakdown"] = latency["pipeline"] = []
    found = reached(latency)
    assert found["direct_floor"].result == "not measured at this length" and found["direct_floor"].met is None
    said = facts(final, latency)
    assert "this run measures three" in said["reached"] and "memory floor" not in said["reached"]
    assert "No step was taken apart" in said["parts"] and "was not measured" in said["pipeline"]
    figures.step_parts(latency)
    assert tables.step_parts(latency).part.tolist() == ["the profiled step"]
    assert tables.pipeline(latency).empty


def test_a_missed_figure_is_named_and_its_limit_stands_in_the_table(final, latency):
    set_ms(latency, "direct", 10.0)
    set_ms(latency, "learned", 100.0)
    assert "not met: learned ÷ direct" in facts(final, latency)["reached"]
    table = tables.targets(speed.targets(latency, speed.read_targets()))
    first = table.iloc[0]
    assert (first["this run"], first["must hold"], first["aim"], first["result"]) == (
        10.0,
        "≤ 1.05",
        "≤ 1.02",
        "not met",
    )
    assert table["record"].str.startswith("latency/").all()


def test_the_parts_of_a_step_are_stacked_to_the_profiled_step(latency):
    figure = figures.step_parts(latency)
    assert [trace.name for trace in figure.data] == list(PARTS) == list(PART_STYLES)
    table = tables.step_parts(latency).set_index("part")
    stacked = [sum(trace.x[bar] for trace in figure.data) for bar in range(4)]
    assert stacked == pytest.approx(table.loc["the profiled step"].tolist())
    assert len({(t.marker.color, t.marker.pattern.shape) for t in figure.data}) == len(PARTS)


def test_the_profiler_s_own_cost_and_the_map_s_share_are_told(final, latency):
    said = facts(final, latency)
    whole = sum(speed.parts_of(latency, 8192, "learned").values())
    assert speed.parts_of(latency, 8192, "direct")[MAP] == 0
    assert f"{whole:,.1f}" in said["profiler"] and "4.0\u00a0%" in said["parts"]


def test_a_map_that_compiled_attention_applies_has_no_part_of_its_own(latency):
    for row in latency["breakdown"]:
        row["ms"] *= row["part"] != MAP
    assert parts_sentence(latency).endswith("is applied within attention, and takes no part of its own.")


def test_ways_that_were_left_out_have_their_reason(final, latency):
    assert facts(final, latency)["left_out"] == "No way that was asked for was left out."
    latency["left_out"] = [{"path": "learned", "mode": "absorbed", "reason": "its features are quadratic"}]
    assert facts(final, latency)["left_out"] == "Left out: absorbed (its features are quadratic)."


def test_a_map_that_runs_in_place_is_told_by_that_name(final, latency):
    latency["modes"] = [row for row in latency["modes"] if row["mode"] == "materialised"]
    for row in latency["rows"]:
        if row["path"] == "learned":
            row["mode"] = "in_place"
    assert "in place, as it is handed over" in facts(final, latency)["moved"]
    assert reached(latency)["in_place_direct"].value == speed.ratio_at(latency, "learned_direct", 8192)
    assert tables.modes(latency)["mode"].tolist()[:2] == ["in place", "materialised"]


def test_compile_time_has_a_column_where_it_was_recorded(latency):
    assert "compiled, or found compiled, in (s)" not in tables.modes(latency)
    row = latency["modes"][0] | {"mode": "absorbed", "compiled": True, "compile_seconds": 41.5}
    latency["modes"].append(row)
    table = tables.modes(latency)
    assert table[table["mode"] == "absorbed, compiled"]["compiled, or found compiled, in (s)"].tolist() == [
        41.5
    ]


def test_the_pipeline_says_what_it_saves_and_what_it_costs(final, latency):
    assert "the pipeline saves" in facts(final, latency)["pipeline"]
    for row in latency["pipeline"]:
        row["pipelined_p50_ms"] = row["serial_p50_ms"] * 1.1
    assert "the pipeline costs" in facts(final, latency)["pipeline"]
    assert tables.pipeline(latency)["saved (%)"].tolist() == pytest.approx([-10] * 3)


def test_the_floor_is_a_line_below_every_step_and_a_table(latency):
    figure = figures.time_to_first_token(latency)
    floors = [trace for trace in figure.data if trace.name == "memory floor of one step"]
    assert len(floors) == 1 and list(floors[0].y) == [row["floor_ms"] for row in latency["floor"]]
    table = tables.floor(latency)
    assert (table["direct ÷ floor"] == table["direct (ms, p50)"] / table["floor (ms)"]).all()


GPU = {
    "label": "true shapes, random weights",
    "machine": {"name": "a card", "memory_bandwidth_gb_s": 3000.0},
    "pair": {"target": "Llama 3.1 8B"},
    "rows": [
        {"prefix_tokens": 8192, "path": "learned", "mode": "absorbed", "compiled": False, "p50_ms": 9.5, "repetitions": 50}
    ],
    "memory": [{"path": "learned", "prefix_tokens": 8192, "peak_extra_bytes": 2**21}],
    "correctness": {"max_abs_difference": 0.01, "by_length": {"128": 0.01}},
    "floor": [{"prefix_tokens": 8192, "weight_bytes": 2**30, "cache_bytes": 2**20, "floor_ms": 5.0}],
    "seconds": 200.0,
}  # fmt: skip


def test_without_gpu_results_the_chapter_says_how_to_make_them():
    assert gpu.read_results(None) is None and gpu.gpu_tables(None) == {}
    assert "“python benchmarks/gpu.py”" in gpu.gpu_facts(None)["gpu"]


def test_gpu_results_are_shown_under_their_label(tmp_path, monkeypatch):
    reader = types.ModuleType("kvlib.study.gpu_results")
    reader.read_gpu = lambda path: json.loads(path.read_text())
    monkeypatch.setitem(sys.modules, "kvlib.study.gpu_results", reader)
    (tmp_path / "gpu.json").write_text(json.dumps(GPU))
    found = gpu.read_results(str(tmp_path / "gpu.json"))
    said = gpu.gpu_facts(found)["gpu"]
    assert (
        said.startswith("True shapes, random weights: ") and "a card" in said and "3000.0\u00a0GB/s" in said
    )
    shown = gpu.gpu_tables(found)
    assert len(shown) == 4 and all("(true shapes, random weights)" in caption for caption in shown)
    times, memory, correctness, floor = shown.values()
    assert times["p50 (ms)"].tolist() == [9.5] and memory["peak extra (MiB)"].tolist() == [2.0]
    assert floor["weight (MiB)"].tolist() == [1024.0]
    assert correctness["by length"].tolist() == ["128 0.01"]


def test_missing_limits_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(KvlibError, match="expected the figures to be reached: restore it"):
        speed.read_targets(tmp_path / "targets.yaml")


def test_a_way_that_was_faster_than_the_chosen_one_is_named_with_its_lengths(latency):
    for row in latency["modes"]:
        row["p50_ms"] = 200.0
    set_ms(latency, "learned", 150.0)
    assert prose.ways_facts(latency)["chosen"].startswith("At no length")
    speed.mode_of(latency, 128, "materialised")["p50_ms"] = 75.0
    said = prose.ways_facts(latency)["chosen"]
    assert (
        "sooner was materialised at 128 tokens (75.0\u00a0ms, 0.5 times the chosen way's 150.0\u00a0ms)."
        in said
    )


def test_the_chosen_way_timed_twice_shows_how_far_medians_can_differ(latency):
    assert "asked for by name" in prose.ways_facts(latency)["twice"]
    for row in latency["rows"]:
        if row["path"] == "learned":
            row |= {"mode": "in_place", "p50_ms": 100.0}
    for row in latency["modes"]:
        row["p50_ms"] = 102.0
    assert "the same work, 2.0\u00a0% apart" in prose.ways_facts(latency)["twice"]


def test_a_crossover_is_said_to_lie_between_two_lengths_that_were_measured(latency):
    latency["crossover"]["cold"] = {"learned": 786.2, "below": False}
    assert "between 512 and 1,024 tokens" in prose.latency_facts(latency)["cold_crossover"]
