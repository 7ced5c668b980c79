"""The plan of a run: what it says of disk, memory and time, what is done already, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tiny import is_one_sentence, refused, tiny_llama, tokens

from kvlib.cache import Geometry
from kvlib.errors import KvlibError
from kvlib.maps import ResidualMap, RidgeMap, save_map
from kvlib.report import tables
from kvlib.report.prose import plan_facts
from kvlib.study.plan import device_for, device_named, make_plan, plan_run, shape_of
from kvlib.study.plan.bench import Bench
from kvlib.study.plan.devices import GIB, device_names, measured_device
from kvlib.study.plan.operations import Cost
from kvlib.study.plan.shapes import known_shapes
from kvlib.study.plan.storage import checkpoint_bytes, is_cached, prompts_bytes, ridge_bytes, windows_bytes
from kvlib.study.profile import DATA, HubModel, load_profile, profile_names
from kvlib.study.progress import Progress
from kvlib.study.run import STAGES
from kvlib.study.screening import PromptStore, WindowStore
from kvlib.study.stages import open_run, run_pair

LLAMA, MINITRON = "meta-llama/Llama-3.1-8B", "nvidia/Llama-3.1-Minitron-4B-Width-Base"


@pytest.fixture
def study(tmp_path) -> Path:
    """A profile of the study's own pair with the laptop's counts and text."""
    values = yaml.safe_load((DATA / "profiles" / "laptop.yaml").read_text())
    values |= {"name": "own", "label": "the study's pair", "device": "auto"}
    values["pair"] = {
        "target": {"kind": "hub", "id": LLAMA}, "source": {"kind": "hub", "id": MINITRON}, "dtype": "bfloat16",
    }  # fmt: skip
    values["training"] |= {"prompts_per_step": 8}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def planned(study: Path, device: str, overrides: dict | None = None):
    return make_plan(load_profile(str(study), overrides), device_named(device))


# --- shapes


def test_the_studys_models_have_as_many_parameters_as_their_names_say():
    known = known_shapes()
    assert known[LLAMA].parameters == 8_030_261_248
    assert known[MINITRON].parameters == 4_512_746_496
    # 256 tokens of Llama 3.1 8B are 32 MiB a prompt
    assert known[LLAMA].cache_bytes(1, 256, "bfloat16") == 32 * 2**20


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_is_planned_without_network_or_access(name):
    profile = load_profile(name)
    made = make_plan(profile, device_named("h100"))
    assert made.fits and [stage.stage for stage in made.stages] == list(STAGES)
    assert all(stage.flop > 0 and stage.seconds > 0 and stage.peak.total > 0 for stage in made.stages)
    assert {
        m.id for m in (profile.pair.target, profile.pair.source) if isinstance(m, HubModel)
    } <= known_shapes().keys()


def test_a_folder_is_read_instead_of_the_list(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    pair = load_profile("smoke").pair.model_copy(
        update={"target": HubModel(kind="hub", id=str(tmp_path / "model"))}
    )
    shape = shape_of(pair, "target")
    assert (shape.hidden, shape.head_dim, shape.vocabulary) == (48, 16, 101)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_an_unknown_hub_id_is_refused_with_what_to_do(tmp_path):
    pair = load_profile("smoke").pair
    for name, remedy in (("nobody/nothing", "download it first"), (str(tmp_path), "config.json is missing")):
        given = pair.model_copy(update={"target": HubModel(kind="hub", id=name)})
        refused(lambda given=given: shape_of(given, "target"), match=remedy)


# --- bytes on disk


def test_stores_and_maps_have_the_bytes_that_the_plan_says(tmp_path):
    profile = load_profile("smoke")
    bench, steps = Bench.of(profile, "float32", True), profile.prompt.forced_steps
    wanted, target = profile.pair.target, bench.target
    shape = {
        "num_attention_heads": wanted.heads,
        "num_key_value_heads": wanted.kv_heads,
        "head_dim": wanted.head_dim,
    }
    model = tiny_llama(hidden_size=wanted.hidden_size, num_hidden_layers=wanted.layers, **shape)
    geometry = Geometry.of(model)
    windows = tokens(4, profile.partitions.window_tokens)
    WindowStore(tmp_path / "windows", windows, geometry, target.hidden, torch.float32).fill(
        model, model, Progress("", 1), 1
    )
    held = sum(path.stat().st_size for path in (tmp_path / "windows").glob("*.bin"))
    assert held == windows_bytes(bench, 4)
    prompts = tokens(6, profile.prompt.prefix_tokens + steps)
    forcings = list(profile.evaluation.forcings)
    store = PromptStore(tmp_path / "prompts", prompts, profile.prompt.prefix_tokens, forcings, 6)
    store.fill(model, model, Progress("", 1), 1)
    held = sum(path.stat().st_size for path in (tmp_path / "prompts").glob("*.safetensors"))
    assert prompts_bytes(bench, 6, len(forcings)) == pytest.approx(held, rel=0.1)

    layers, heads, dim = geometry.layers, geometry.heads, geometry.head_dim
    matrices, biases = torch.zeros(layers, heads, dim, dim), torch.zeros(layers, heads, dim)
    ridge, one = RidgeMap(matrices, biases, matrices, biases, 1.0), torch.ones(layers, heads)
    save_map(ridge, tmp_path / "ridge.safetensors", pair="x")
    assert ridge_bytes(bench) == pytest.approx((tmp_path / "ridge.safetensors").stat().st_size, rel=0.1)
    for arm in bench.arms:
        path = tmp_path / f"{arm.id}.safetensors"
        options = {
            "residual": arm.residual,
            "features": arm.features,
            "base": ridge if arm.base == "ridge" else None,
        }
        learned = ResidualMap.initial(
            one, one, dim, arm.rank, generator=torch.Generator().manual_seed(0), **options
        )
        save_map(learned, path, pair="x")
        assert bench.parameters(arm) == learned.parameters
        tensors = (
            path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        )  # without what describes them
        assert checkpoint_bytes(bench, arm) == tensors


def test_what_is_here_is_not_downloaded_again(study, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLIB_CACHE", str(tmp_path))
    first = {one.name: one for one in planned(study, "h100").downloads}
    assert first[LLAMA].bytes == 2 * known_shapes()[LLAMA].parameters and not first[LLAMA].here
    assert not first["gensim 4.4.0"].here
    file = yaml.safe_load((DATA / "assets.yaml").read_text())["enwiki"]["file"]
    (tmp_path / file).touch()
    again = planned(study, "h100")
    assert again.download_bytes == sum(one.bytes for one in first.values()) - first["gensim 4.4.0"].bytes


def test_a_model_of_several_files_is_here_when_all_of_them_are(tmp_path, monkeypatch):
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"weight_map": {"a": parts[0], "b": parts[1]}}))
    present = {"model.safetensors.index.json", parts[0]}

    def find(name, file, revision=None):
        return str(index) if file in present else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", find)
    assert not is_cached("some/model", None)
    present.add(parts[1])
    assert is_cached("some/model", None)


# --- device memory and what to change


def test_the_study_fits_an_h100_and_its_weights_are_most_of_it(study):
    made = planned(study, "h100")
    assert made.fits and "fits NVIDIA H100" in made.verdict
    for stage in made.stages:
        assert 0.5 < stage.peak.weights / stage.peak.total <= 1
    both = sum(known_shapes()[name].weight_bytes("bfloat16") for name in (LLAMA, MINITRON))
    peaks = {stage.stage: stage.peak for stage in made.stages}
    assert peaks["latency"].weights == both
    assert all(peaks[stage].weights < both for stage in STAGES if stage != "latency")  # one model at a time


def test_a_card_of_24_gb_is_told_what_to_lower_and_then_fits_it_all(study):
    made = planned(study, "4090")
    assert not made.fits and is_one_sentence(KvlibError(made.verdict)), made.verdict
    assert (
        "stages screening and confirmation need" in made.verdict
        and "set training.micro_batch to" in made.verdict
    )
    none = [0] * 6  # clocks that run while the source reads: both models would have to be there
    assert "stage latency needs" in made.verdict and f"set latency.cold_repetitions to {none}" in made.verdict
    said = made.verdict.split("training.micro_batch to ")[1].split()[0].strip(";,")
    lowered = planned(study, "4090", {"training.micro_batch": int(said)})
    assert "screening" not in lowered.verdict and "confirmation" not in lowered.verdict
    assert [stage.flop for stage in lowered.stages] == pytest.approx([stage.flop for stage in made.stages])
    resident = {"latency.cold_repetitions": none, "latency.pipeline_repetitions": none}
    fitting = planned(study, "4090", {"training.micro_batch": int(said)} | resident)
    assert fitting.fits and fitting.stages[4].flop < made.stages[4].flop


def test_the_setting_that_is_named_makes_the_stage_fit(study):
    room = planned(study, "h100").device
    for overrides, key in (
        ({"evaluation.batch_prompts": 512}, "evaluation.batch_prompts"),
        ({"training.prompts_per_step": 64}, "training.micro_batch"),
        ({"latency.prefix_tokens": [128, 512, 1024, 2048, 4096, 131072]}, "latency.prefix_tokens"),
    ):
        device = room
        if key.startswith("latency"):
            device = device_named("a100-40")
        made = make_plan(load_profile(str(study), overrides), device)
        assert f"set {key} to" in made.verdict or f"and {key} to" in made.verdict, made.verdict


def test_activations_are_computed_again_only_where_one_prompt_at_a_time_is_too_many(study):
    settings = {"training.prompts_per_step": 4, "evaluation.batch_prompts": 1}
    least = planned(study, "h100", settings | {"training.micro_batch": 1}).stages[1].peak
    assert least.phase == "training"
    for room, asked in ((least.total + 1, False), (least.total - 1, True)):
        device = replace(device_named("h100"), memory=int(room), reserved=0)
        verdict = make_plan(load_profile(str(study), settings), device).verdict
        assert ("training.checkpoint_activations to true" in verdict) is asked, verdict


def test_a_float32_pair_that_is_too_large_is_told_to_go_to_half(study):
    made = planned(study, "h100", {"pair.dtype": "float32"})
    small = planned(study, "l40s", {"pair.dtype": "float32"})
    assert made.stages[0].peak.weights == 4 * known_shapes()[LLAMA].parameters
    assert "set pair.dtype to bfloat16" in small.verdict


def test_positions_that_the_pair_does_not_have_are_refused():
    settings = {"latency.prefix_tokens": [128, 512, 1024, 2048, 4096, 9000]}
    made = make_plan(load_profile("laptop", settings), device_named("h100"))
    assert "latency.prefix_tokens asks for 9,000 positions and the pair has 8,192" in made.verdict


def test_too_little_disk_is_refused_where_the_device_is_here(study, monkeypatch):
    here = measured_device("cpu", {"measured": 1, "reserved": 0, "slack": 0, "disk": 1, "layer_ms": 1})
    usage = shutil._ntuple_diskusage(10**12, 0, 60 * 10**9)
    monkeypatch.setattr("kvlib.study.plan.making.shutil.disk_usage", lambda place: usage)
    made = make_plan(load_profile(str(study)), here)
    assert "60.0 free" in made.verdict and "set partitions.screen_train.items" in made.verdict
    fewer = int(made.verdict.split("confirm_train.items to ")[1].split()[0].strip(";"))
    counts = {f"partitions.{name}_train.items": fewer for name in ("screen", "confirm")}
    assert make_plan(load_profile(str(study), counts), here).disk_bytes <= 60 * 10**9
    assert "disk are needed" not in planned(study, "h100").verdict  # another machine's disk is not known


# --- time


def test_the_slowest_of_arithmetic_memory_launches_and_transfers_counts():
    device = device_named("h100")
    assert device.seconds(Cost(half=device.half, read=device.bandwidth / 2)) == pytest.approx(1)
    assert device.seconds(Cost(half=device.half / 2, read=device.bandwidth)) == pytest.approx(1)
    assert device.seconds(
        Cost(link=device.link, layers=0.5 / device.layer_s, disk=device.disk)
    ) == pytest.approx(2)
    assert device.seconds(Cost(single=device.single)) == pytest.approx(1)


def test_a_better_card_takes_less_time_and_the_names_are_those_of_the_list(study):
    seconds = [planned(study, name).seconds for name in ("4090", "a100", "h100")]
    assert seconds == sorted(seconds, reverse=True)
    assert {"auto", "cpu", "h100", "h200", "a100", "4090"} <= set(device_names())
    refused(lambda: device_named("h101"), match="h100")


def test_the_published_prefill_is_what_the_efficiency_was_taken_from(study):
    published = yaml.safe_load((DATA / "published.yaml").read_text())["latency"]["native"]
    parts = {part.what: part for stage in planned(study, "h100").stages for part in stage.parts}
    device = device_named("h100")
    for length, ms in published.items():
        planned_ms = device.seconds(parts[f"{length:,} tokens, native"].cost) * 1e3
        assert planned_ms == pytest.approx(ms, rel=0.25), length


def test_a_profile_for_cuda_is_not_planned_onto_a_processor(study):
    profile = load_profile(str(study), {"device": "cuda"})
    here = measured_device("cpu", {"measured": 1, "reserved": 0, "slack": 0, "disk": 1, "layer_ms": 1})
    assert "name a card with --device" in make_plan(profile, here).verdict
    assert device_for(load_profile("smoke")).is_cpu


# --- the command


def test_plan_prints_every_stage_and_ends_with_a_sentence(kvlib, tmp_path):
    status, out, _ = kvlib("plan", "laptop", "--device", "h100", "--json", str(tmp_path / "plan.json"))
    lines = out.splitlines()
    assert status == 0 and lines[-1].startswith("profile laptop fits NVIDIA H100")
    for notebook in ("00_pair", "01_screening", "02_confirmation", "03_frozen_evaluation", "04_latency"):
        assert sum(line.startswith(notebook) for line in lines) == 1
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["fits"] and record["device"]["source"] and len(record["stages"]) == len(STAGES)
    assert record["stages"][1]["peak_bytes"] > 0 and record["stages"][1]["parts"]
    assert (
        not list((tmp_path / "results").glob("*")) if (tmp_path / "results").exists() else True
    )  # nothing is begun


def test_plan_refuses_with_the_setting_and_takes_it(kvlib, study):
    status, out, err = kvlib("plan", str(study), "--device", "4090")
    assert status == 2 and "01_screening" in out and "set training.micro_batch to" in err
    status, _, err = kvlib("plan", str(study), "--device", "4090", "-p", "training.micro_batch", "2")
    assert status == 2 and "micro_batch" not in err and "latency.cold_repetitions" in err
    status, _, err = kvlib("plan", str(study), "--device", "4090", "-p", "training.macro_batch", "2")
    assert status == 2 and "unknown key 'training.macro_batch'" in err
    status, _, err = kvlib("plan", "nobody", "--device", "h100")
    assert status == 2 and "expected one of" in err


def test_what_is_done_is_said_and_not_counted(kvlib, tmp_path):
    run = open_run("smoke", results=tmp_path / "results")
    run_pair(run)
    made = plan_run("smoke", lambda profile: device_named("h100"), results=tmp_path / "results")
    assert [stage.stage for stage in made.stages if stage.done_s is not None] == ["pair"]
    assert made.seconds == pytest.approx(sum(stage.seconds for stage in made.stages[1:]))
    status, out, _ = kvlib("plan", "smoke", "--device", "h100")
    assert status == 0 and "done in" in next(line for line in out.splitlines() if line.startswith("00_pair"))
    status, out, _ = kvlib("plan", "smoke", "--device", "h100", "-p", "evaluation.gate_tolerance", "0.01")
    assert status == 0 and "done in" not in out
    assert not run.overrides  # what if is not what is
    status, _, err = kvlib("plan", "laptop", "--run", "smoke", "--device", "h100")
    assert status == 2 and "is a run of profile 'smoke'" in err


def test_a_plan_begins_no_run(kvlib, tmp_path):
    kvlib("plan", "smoke", "--device", "h100")
    assert not (tmp_path / "results").exists()


# --- the page


def test_the_page_names_every_card_and_every_stage(study):
    plans = {name: planned(study, name) for name in ("h100", "4090")}
    facts = plan_facts(plans)
    assert all(plan.verdict[1:] in facts["verdicts"] for plan in plans.values())
    cards = tables.plan_cards(plans)
    assert cards["name"].tolist() == ["h100", "4090"] and cards["fits"].tolist() == ["yes", "not as it is"]
    for plan in plans.values():
        assert len(tables.plan_stages(plan)) == len(STAGES) + 1
        memory = tables.plan_memory(plan)
        peaks = [stage.peak.total / GIB for stage in plan.stages]
        assert memory.drop(columns=["notebook", "moment"]).sum(axis=1).tolist() == pytest.approx(
            peaks, abs=0.05
        )
    assert tables.plan_downloads(plans["h100"])["download"].tolist()[:2] == [LLAMA, MINITRON]


@pytest.mark.parametrize("damage", ["no config", "cut", "a shard short"])
def test_a_folder_that_a_run_would_refuse_is_not_planned_for(kvlib, study, tmp_path, damage):
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder, max_shard_size="20KB" if damage == "a shard short" else "1GB")
    weights = sorted(folder.glob("*.safetensors"))
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "cut":
        weights[0].write_bytes(weights[0].read_bytes()[:100])
    else:
        weights[-1].unlink()
    status, _, err = kvlib("plan", str(study), "--device", "h100", "-p", "pair.target.id", str(folder))
    assert status == 2 and str(folder) in err and "download it again" in err


def test_a_plan_is_not_made_for_a_run_or_a_path_that_cannot_be(kvlib, study):
    for run in ("../x", "", ".hidden"):
        status, _, err = kvlib("plan", str(study), "--device", "h100", "--run", run)
        assert status == 2 and "expected a plain folder name" in err
    status, _, err = kvlib("plan", str(study), "--device", "h100", "-p", "pair.target.id", "/nowhere/model")
    assert status == 2 and "expected a folder that is there or a hub id" in err
    assert device_named("H100") == device_named("h100")
