"""Every benchmark's tiny version, the random models that they run on, and what they leave when they fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import refused

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common  # noqa: E402
import gpu  # noqa: E402
import gpu_measures  # noqa: E402
import map as map_benchmark  # noqa: E402
import scale  # noqa: E402
import shapes  # noqa: E402
import ttft  # noqa: E402
from paths import NATIVE, NaiveMap, chosen_entry, entry, kind_of  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from kvlib import prefill  # noqa: E402
from kvlib.geometry import rotary_of  # noqa: E402
from kvlib.study.gpu_results import read_gpu  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_code")

MACHINE = {
    "device", "name", "cores", "threads", "python", "torch", "transformers", "memory_bandwidth_gb_s", "date",
}  # fmt: skip
KINDS = ("ridge", "linear", "quadratic", "rms", "rope_stripped")
GPU = ["--device", "cpu", "--tiny", "--lengths", "16", "32"]


@pytest.fixture(scope="module")
def tiny_pair():
    return shapes.random_model(shapes.TINY_TARGET), shapes.random_model(shapes.TINY_SOURCE, seed=1)


@pytest.fixture(scope="module")
def gpu_file(tmp_path_factory, compiled_code):
    file = tmp_path_factory.mktemp("gpu") / "gpu.json"
    gpu.main([*GPU, "--out", str(file)])
    return file


def read(path: Path, name: str) -> dict:
    record = json.loads(path.read_text())
    assert record["benchmark"] == name and set(record["machine"]) == MACHINE and record["rows"]
    assert record["machine"]["memory_bandwidth_gb_s"] > 0
    return record


# --- the scripts


def test_ttft_writes_every_path_and_mode_with_its_ratios(tmp_path, capsys):
    file = tmp_path / "ttft.json"
    ttft.main(["--tiny", "--lengths", "16", "32", "--out", str(file)])
    record = read(file, "ttft")
    assert "learned" in capsys.readouterr().out
    for tokens in (16, 32):
        rows = {(r["path"], r["mode"]): r for r in record["rows"] if r["prefix_tokens"] == tokens}
        assert set(rows) >= {
            ("native", "prefill"), ("direct", "absorbed"), ("direct_stock", "materialised"), ("ridge", "absorbed"),
            ("learned", "absorbed"), ("learned", "in_place"), ("learned", "background"), ("learned", "materialised"),
            ("learned", "naive"), ("ridge", "naive"),
        }  # fmt: skip
        direct = rows["direct", "absorbed"]
        assert direct["over_direct"] == 1 and rows["native", "prefill"]["native_over"] == 1
        for row in rows.values():
            assert row["over_direct"] == pytest.approx(row["p50_ms"] / direct["p50_ms"])
            assert row["repetitions"] == (3 if row["path"] == "native" else 20)
            assert (row["p95_ms"] is None) == (row["path"] == "native")
            assert (row["over_floor"] is None) == (row["path"] == "native")
    assert [f["prefix_tokens"] for f in record["floor"]] == [16, 32]


def test_ttft_takes_a_run_with_a_learned_map_that_cannot_be_absorbed():
    maps = shapes.random_maps(shapes.TINY_TARGET.geometry)
    entries = ttft.entries_for(maps["ridge"], maps["quadratic"], torch.device("cpu"), compiled=True)
    modes = [(e.mode, e.compiled) for e in entries if e.path == "learned"]
    # as it is handed over, once; and in place by the plain pass
    assert modes.count(("in_place", True)) == modes.count(("in_place", False)) == 1
    assert not {"absorbed", "background"} & {mode for mode, _ in modes}
    dense = ttft.entries_for(maps["ridge"], maps["rope_stripped"], torch.device("meta"))
    assert [(e.mode, e.compiled) for e in dense if e.chosen and e.path == "learned"] == [("in_place", False)]
    assert [e.mode for e in dense if e.path == "learned"].count("in_place") == 1


def test_map_sets_each_way_against_a_copy(tmp_path):
    file = tmp_path / "map.json"
    map_benchmark.main(["--tiny", "--prefix-tokens", "32", "--compiled", "--out", str(file)])
    rows = read(file, "map")["rows"]
    ways = {(r["kind"], r["way"], r["compiled"]) for r in rows}
    for kind in KINDS:
        for way in ("naive", "materialised", "in_place"):
            assert (kind, way, False) in ways
        assert ((kind, "in_place", True) in ways) == (kind != "ridge")
        assert ((kind, "absorbed", False) in ways) == (kind in ("ridge", "linear"))
    whole = {r["bytes_moved"] for r in rows if r["way"] != "absorbed"}
    shape = shapes.TINY_TARGET
    assert whole == {2 * 2 * shape.layers * shape.kv_heads * 31 * shape.head_dim * 4}
    assert next(r for r in rows if r["way"] == "copy")["over_copy"] == 1


def test_scale_writes_every_axis_with_what_was_expected_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        scale, "TINY_VALUES", {**scale.TINY_VALUES, "layers": (3,), "arms": (1,), "prompts": (1, 2)}
    )
    file = tmp_path / "scale.json"
    scale.main(["--tiny", "--no-memory", "--out", str(file)])
    record = read(file, "scale")
    found = {(r["axis"], r["value"], r["mode"]) for r in record["rows"]}
    assert found == {
        (axis, value, mode)
        for axis, values in scale.TINY_VALUES.items()
        for value in values
        for mode in scale.MODES
    }
    assert all(r["verdict"] for r in record["growth"] if r["expected"] is not None)
    assert "absorbed: what the map adds does not depend on the prefix" in capsys.readouterr().out


def test_scale_measures_memory_in_a_process_of_its_own():
    shape = shapes.TINY_TARGET
    at = {"prefix_tokens": 4096, "prompts": 1, "arms": 1, "layers": 3}
    peaks = {
        mode: scale._peak(shape, at, mode, "cpu", torch.float32) for mode in ("absorbed", "materialised")
    }
    if None in peaks.values():
        assert set(peaks.values()) == {None}  # where the system does not tell
        return
    cache = 2 * shape.layers * shape.kv_heads * 4095 * shape.head_dim * 4
    assert peaks["materialised"] > 0.9 * cache and peaks["absorbed"] < 0.3 * cache


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_an_exponent_is_found_from_a_power_law(power):
    values = [1, 2, 4, 8]
    assert scale.exponent(values, [3 * v**power for v in values]) == pytest.approx(power, abs=1e-9)
    assert scale.exponent(values, [None, 0, -1, 5]) is None


def test_a_growth_that_is_otherwise_is_said_and_not_raised():
    rows = [
        {
            "axis": "layers",
            "value": v,
            "mode": "direct",
            "p50_ms": v**p,
            "extra_ms": None,
            "peak_extra_bytes": None,
        }
        for p, v in ((2, 2), (2, 4))
    ]
    assert [r["verdict"] for r in scale.growth(rows)] == ["otherwise"]
    rows = [{**row, "p50_ms": 3.0 * row["value"]} for row in rows]
    assert [r["verdict"] for r in scale.growth(rows)] == ["as expected"]


# --- the GPU script


def test_gpu_runs_here_and_is_read_back(gpu_file):
    record = read_gpu(gpu_file)
    assert record["label"] == "tiny shapes, random weights"
    assert record["left_out"] == []
    rows = {(r["prefix_tokens"], r["residency"], r["path"], r["mode"], r["kind"]) for r in record["rows"]}
    for tokens in (16, 32):
        for which in (
            ("native", "prefill", None), ("direct", "absorbed", "direct"), ("direct_stock", "materialised", "direct"),
            ("ridge", "absorbed", "ridge"), ("learned", "absorbed", "linear"), ("learned", "materialised", "linear"),
            ("learned", "naive", "linear"), ("learned", "background", "linear"), *(("learned", "in_place", kind) for kind in KINDS[1:]),
        ):  # fmt: skip
            assert (tokens, "resident", *which) in rows
        for which in (
            ("direct", "absorbed", "direct"),
            ("ridge", "absorbed", "ridge"),
            ("learned", "absorbed", "linear"),
        ):
            assert (tokens, "cold", *which) in rows
    for row in record["rows"]:
        assert (row["handoff_p50_ms"] is None) == (row["residency"] == "resident")
    assert {r["kind"] for r in record["correctness"]} == set(KINDS)
    assert (
        len(record["ratios"]) == len(record["floor"]) == 2 and record["ratios"][0]["learned_over_direct"] > 0
    )


def test_what_is_compiled_stands_beside_what_is_not(gpu_file):
    rows = [(r["path"], r["mode"], r["kind"], r["compiled"]) for r in read_gpu(gpu_file)["compiled"]]
    assert set(rows) == {
        ("direct", "absorbed", "direct", False), ("learned", "in_place", "linear", False),
        *(("learned", "in_place", kind, True) for kind in KINDS[1:]),
    }  # fmt: skip


def test_parts_that_are_not_asked_for_are_named(tmp_path):
    gpu.main([*GPU, "--parts", "memory", "correctness", "--out", str(tmp_path / "gpu.json")])
    record = read_gpu(tmp_path / "gpu.json")
    assert record["left_out"] == [f"{part}: not asked for" for part in ("resident", "cold", "compiled")]
    assert record["rows"] == record["compiled"] == [] and record["memory"] and record["correctness"]


def test_absorbed_agrees_with_the_materialised_cache_and_the_map_can_be_seen(tiny_pair):
    maps = shapes.random_maps(shapes.TINY_TARGET.geometry)
    rows = gpu_measures.correctness(gpu_measures.Models(*tiny_pair, maps), 32, reference=True)
    modes = ("absorbed", "in_place", "background")
    assert {(r["kind"], r["mode"]) for r in rows} >= {(k, m) for k in ("linear", "ridge") for m in modes}
    for row in rows:
        assert row["relative_difference"] < 1e-5 and row["argmax_agreement"] == 1
        assert row["map_effect"] > 0.02 * row["logit_scale"]
        assert row["error"] < 1e-4


def test_a_difference_in_half_precision_is_no_more_than_rounding(gpu_file):
    for row in read_gpu(gpu_file)["correctness"]:
        assert row["max_difference"] < 0.25 * row["map_effect"]
        assert row["error"] < 3 * max(row["materialised_error"], row["noise"])


def test_a_model_comes_back_from_float32_as_it_was():
    model = shapes.random_model(shapes.TINY_TARGET, dtype=torch.bfloat16)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    frequencies = model.model.rotary_emb.inv_freq.clone()
    with gpu_measures.in_float32(model):
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(
        torch.equal(t, before[name]) and t.dtype == before[name].dtype
        for name, t in model.state_dict().items()
    )
    assert frequencies.dtype == torch.float32 and torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_a_part_that_fails_is_named_and_the_others_are_there(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(gpu, "correctness", fail)
    gpu.main([*GPU, "--lengths", "16", "--out", str(tmp_path / "gpu.json")])
    record = read_gpu(tmp_path / "gpu.json")
    assert "correctness at 16 tokens: RuntimeError: out of memory" in record["left_out"]
    assert record["correctness"] == [] and {r["residency"] for r in record["rows"]} == {"resident", "cold"}


def test_what_there_is_no_time_for_is_named(tmp_path):
    gpu.main([*GPU, "--seconds", "0", "--out", str(tmp_path / "gpu.json")])
    record = read_gpu(tmp_path / "gpu.json")
    assert record["rows"] == []
    for part in gpu.PARTS:
        for tokens in (16, 32):
            assert f"{part} at {tokens} tokens: no time left" in record["left_out"]


def test_a_part_stops_between_rounds_when_its_share_is_over(tmp_path):
    gpu.main(
        [
            *GPU,
            "--lengths",
            "16",
            "--repetitions",
            "100000",
            "--seconds",
            "3",
            "--out",
            str(tmp_path / "gpu.json"),
        ]
    )
    record = read_gpu(tmp_path / "gpu.json")
    cut = [
        said for said in record["left_out"] if said.startswith("resident") and "of 100000 repetitions" in said
    ]
    counts = {r["repetitions"] for r in record["rows"] if r["residency"] == "resident"}
    assert len(cut) == 1 and len(counts) == 1 and 1 <= min(counts) < 100000


BLOCKER = """
import importlib.util, sys
REFUSED = {"pandas", "pyarrow", "pydantic", "scipy", "statsmodels", "typer", "psutil", "accelerate", "gguf", "datasets",
           "papermill", "jupytext", "nbformat", "plotly", "mwparserfromhell", "kvlib.study", "kvlib.report"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in REFUSED:
            raise ModuleNotFoundError(f"{name} is not on the library floor", name=name)
sys.meta_path.insert(0, Blocker())
find_spec = importlib.util.find_spec  # transformers asks it what there is: nothing of these
importlib.util.find_spec = lambda name, package=None: None if name in REFUSED else find_spec(name, package)
sys.path.insert(0, "benchmarks")
"""


def run_code(code: str, *arguments: str) -> str:
    """Of a new process without network, on one thread; its standard output."""
    command = [sys.executable, "-c", BLOCKER + code, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_gpu_needs_the_library_floor_and_nothing_else(tmp_path):
    file = tmp_path / "gpu.json"
    arguments = [*GPU, "--lengths", "16", "--parts", *gpu.PARTS[:-1], "--out", str(file)]
    run_code("import gpu; gpu.main(sys.argv[1:])", *arguments)
    assert read_gpu(file)["rows"]
    with pytest.raises(AssertionError, match="pandas is not on the library floor"):
        run_code("import pandas")


# --- files, whole or not at all


def test_a_benchmark_that_is_killed_leaves_a_whole_file_or_none(tmp_path):
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *GPU, "--repetitions", "20", "--out", str(file)]
    command += ["--parts", *gpu.PARTS[:-1]]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        for line in process.stdout:
            if "memory at 16 tokens" in line:
                break
        process.send_signal(signal.SIGKILL)
    record = read_gpu(file)
    assert record["rows"] and any("not reached" in said for said in record["left_out"])


@pytest.mark.parametrize("broken", ["figure", "disk"])
def test_a_table_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch, broken):
    file = tmp_path / "table.json"
    here = common.machine(tiny=True)
    common.write_table(file, "some", [{"a": 1}], machine=here)
    before = file.read_text()
    if broken == "disk":
        monkeypatch.setattr(common.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    rows = [{"a": float("nan") if broken == "figure" else 2}]
    refused(lambda: common.write_table(file, "some", rows, machine=here), match="could not be written")
    assert file.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_benchmark_that_fails_writes_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(ttft, "interleave", fail)
    with pytest.raises(RuntimeError, match="broken"):
        ttft.main(["--tiny", "--out", str(tmp_path / "ttft.json")])
    assert list(tmp_path.iterdir()) == []


def spoil(record: dict, where: str):
    match where:
        case "benchmark":
            record["benchmark"] = "ttft"
        case "label":
            record["label"] = "real weights"
        case "machine":
            record["machine"]["memory_bandwidth_gb_s"] = None
        case "pair":
            del record["pair"]["source"]
        case "seconds":
            record["seconds"] = "many"
        case "rows":
            record["rows"] = {}
        case "a row":
            record["rows"][1]["p50_ms"] = None
        case "a column":
            del record["correctness"][0]["noise"]
        case "a flag":
            record["rows"][0]["compiled"] = 0
    return record


@pytest.mark.parametrize(
    "where", ["benchmark", "label", "machine", "pair", "seconds", "rows", "a row", "a column", "a flag"]
)
def test_a_file_that_is_no_gpu_result_is_refused(tmp_path, gpu_file, where):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(spoil(json.loads(gpu_file.read_text()), where)))
    refused(lambda: read_gpu(file), match="expected a file that benchmarks/gpu.py wrote")


def test_a_missing_or_cut_gpu_result_is_refused(tmp_path, gpu_file):
    refused(lambda: read_gpu(tmp_path / "none.json"), match="is missing")
    (tmp_path / "cut.json").write_text(gpu_file.read_text()[:-200])
    refused(lambda: read_gpu(tmp_path / "cut.json"), match="is no readable JSON")


# --- what they are made of


def test_every_call_runs_once_in_every_round_in_an_order_that_changes():
    seen = []
    calls = [common.Clocked(name, lambda name=name: seen.append(name)) for name in "abc"]
    calls.append(common.Clocked("rare", lambda: seen.append("rare"), every=3))
    found = common.interleave(calls, warmups=2, repetitions=7, seed=0)
    assert {name: len(t.ms) for name, t in found.items()} == {"a": 7, "b": 7, "c": 7, "rare": 3}
    assert {name: seen.count(name) for name in found} == {"a": 9, "b": 9, "c": 9, "rare": 5}
    plain = [name for name in seen if name != "rare"]
    orders = {tuple(plain[i : i + 3]) for i in range(0, len(plain), 3)}
    assert all(sorted(order) == ["a", "b", "c"] for order in orders) and len(orders) > 2


def test_what_a_call_prepares_is_its_own_and_what_it_reports_is_kept():
    given = []
    call = common.Clocked("x", lambda fresh: given.append(fresh) or (None, 1.5), lambda: object())
    found = common.interleave([call], warmups=1, repetitions=3, seed=0)["x"]
    assert len({id(one) for one in given}) == 4 and found.part_ms == [1.5] * 3


def test_rounds_end_when_it_is_enough_but_never_before_one_is_kept():
    call = common.Clocked("x", lambda: None)
    enough = lambda done: done >= 2 or done < 0
    found = common.interleave([call], warmups=9, repetitions=9, seed=0, enough=enough)["x"]
    assert len(found.ms) == 2
    assert (
        len(common.interleave([call], warmups=9, repetitions=9, seed=0, enough=lambda done: True)["x"].ms)
        == 1
    )


def test_a_table_is_aligned_and_knows_what_is_missing():
    lines = common.aligned(
        [{"name": "a", "ms": 1.25}, {"name": "long", "ms": 100.0, "note": "x"}]
    ).splitlines()
    assert lines == ["name     ms  note", "a      1.25  -", "long  100.0  x"]
    assert common.aligned([]) == "(no rows)"


@pytest.mark.parametrize("kind", KINDS)
def test_the_naive_way_gives_the_cache_that_the_map_gives(tiny_pair, kind):
    target, source = tiny_pair
    cache_map = shapes.random_maps(shapes.TINY_TARGET.geometry)[kind]
    assert kind_of(cache_map) == kind
    ids = torch.randint(211, (1, 20), generator=torch.Generator().manual_seed(0))
    prefix = prefill(source, ids)
    wanted = cache_map.materialise(prefix, rotary_of(target))
    found = NaiveMap(cache_map, target).write_out(prefix)
    for a, b, old in zip(found.keys + found.values, wanted.keys + wanted.values, prefix.keys + prefix.values):
        assert torch.allclose(a, b, atol=1e-5) and not torch.allclose(a, old, atol=1e-2)


def test_the_true_shapes_have_the_true_numbers_of_parameters():
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in AutoModelForCausalLM.from_config(shapes.config_of(shape)).parameters())
            for shape in (shapes.LLAMA_31_8B, shapes.MINITRON_4B_WIDTH, shapes.SMOLLM2_135M)
        ]
    assert counts == [8_030_261_248, 4_512_746_496, 134_515_008]
    assert shapes.LLAMA_31_8B.geometry == shapes.MINITRON_4B_WIDTH.geometry


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_model_is_neither_degenerate_nor_denormal(dtype):
    model = shapes.random_model(shapes.TINY_TARGET, dtype=dtype)
    ids = torch.randint(211, (1, 64), generator=torch.Generator().manual_seed(0))
    logits = model(ids).logits.float()
    assert logits.isfinite().all() and 0.3 < logits.std() < 3
    cache = prefill(model, ids)
    assert all(0.3 < k.float().std() < 3 for k in cache.keys + cache.values)
    moved = ids.clone()
    moved[0, :32] = moved[0, :32].flip(0)
    assert (model(moved).logits.float()[0, -1] - logits[0, -1]).abs().max() > 0.05  # the prefix is heard
    smallest = torch.finfo(dtype).tiny
    assert all(((p == 0) | (p.abs() > smallest)).all() for p in model.parameters())


def test_a_floor_counts_what_one_step_reads():
    model = shapes.random_model(shapes.TINY_TARGET)
    row = common.floor_row(model, 33, 2.0)
    shape = shapes.TINY_TARGET
    assert row["cache_bytes"] == 2 * shape.layers * shape.kv_heads * 32 * shape.head_dim * 4
    every = sum(p.numel() for p in model.parameters())
    assert row["weight_bytes"] == (every - shape.vocabulary * shape.hidden + shape.hidden) * 4
    assert row["floor_ms"] == pytest.approx((row["weight_bytes"] + row["cache_bytes"]) / 2e6)


def test_entries_say_what_is_asked_of_the_handoff():
    maps = shapes.random_maps(shapes.TINY_TARGET.geometry)
    chosen = {kind: chosen_entry("learned", maps[kind], torch.device("cpu")) for kind in ("linear", "rms")}
    assert [(one.mode, one.compiled) for one in chosen.values()] == [("absorbed", False), ("in_place", True)]
    assert {one.target_path().mode for one in chosen.values()} == {"auto"}
    by_name = entry("learned", maps["rms"], "in_place")
    assert by_name.target_path().mode == "in_place" and by_name.target_path().compiled is False
    assert NATIVE.target_path().way == "prefill" and NATIVE.label["kind"] is None
