"""How many processes share a stage's units: as many as cores, units, memory and work allow, and the same threads when it goes on."""

from types import SimpleNamespace

import pytest
import torch
from tiny import refused

from kvlib.study.arms import all_arms
from kvlib.study.executors import Settings, local, sizing
from kvlib.study.executors.local import LocalExecutor, torch_threads
from kvlib.study.learning import Task
from kvlib.study.plan.bench import Bench as Planned
from kvlib.study.profile import load_profile
from kvlib.study.progress import Progress
from kvlib.study.records import read_json, write_json
from kvlib.study.shares import SHARES, Share
from kvlib.study.stages import open_run
from kvlib.study.units import Unit

ARMS = [arm for arm in all_arms(load_profile("laptop").screening) if arm.base == "direct"][:6]
COUNTED = [Unit(arm.id, Task(arm, 1, 100), "", ((100, (1.0,)),)) for arm in ARMS]


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    """A run of the laptop's settings without its pair, on a machine with room for any number of workers."""
    run = open_run("laptop", results=tmp_path)
    planned = Planned.of(run.profile, "float32", True)
    monkeypatch.setattr(sizing, "planned_for", lambda run: planned)
    free(monkeypatch, 1e12)
    return run


def free(monkeypatch, size: float) -> None:
    monkeypatch.setattr(sizing.psutil, "virtual_memory", lambda: SimpleNamespace(available=size))


def shared(run, threads: int, left: int = 6, units=COUNTED, **settings) -> Share:
    return sizing.share_out(run, "screening", units, left, threads, Settings(**settings))


@pytest.mark.parametrize(
    ("threads", "left", "settings", "share"),
    [
        (1, 6, {}, Share(1, 1)),
        (2, 6, {}, Share(2, 1)),
        (4, 6, {}, Share(4, 1)),
        (16, 6, {}, Share(6, 2)),
        (16, 2, {}, Share(2, 2)),
        (16, 6, {"threads_per_unit": 8}, Share(2, 8)),
        (2, 6, {"workers": 1}, Share(1, 2)),
        (2, 6, {"workers": 3}, Share(3, 1)),
        (1, 6, {"workers": 2, "threads_per_unit": 3}, Share(2, 3)),
    ],
)
def test_threads_are_shared_out_among_as_many_as_there_are_units(laptop, threads, left, settings, share):
    assert shared(laptop, threads, left, **settings) == share


def test_there_are_no_more_than_memory_suffices_for(laptop, monkeypatch):
    each = sizing.worker_bytes(sizing.planned_for(laptop), "screening")
    assert each > 2 * sizing.planned_for(laptop).target.weight_bytes("float32")
    free(monkeypatch, 3.9 * each / sizing.SPARE)
    assert shared(laptop, 8) == Share(3, 2)


def test_without_memory_for_two_all_stays_in_this_process(laptop, monkeypatch):
    free(monkeypatch, 0)
    assert shared(laptop, 8) == Share(1, 8)


def test_a_stage_that_goes_on_keeps_its_threads_whatever_is_free_then(laptop, monkeypatch):
    assert shared(laptop, 4) == Share(4, 1)
    free(monkeypatch, 0)
    assert shared(laptop, 4) == Share(1, 1)
    free(monkeypatch, 1e12)
    assert shared(laptop, 4) == Share(4, 1) and shared(laptop, 4, left=1) == Share(1, 1)
    assert shared(laptop, 4, threads_per_unit=2) == Share(2, 2)  # said aloud
    assert shared(laptop, 4, units=COUNTED[:1], left=1) == Share(
        1, 4
    )  # other units have a share of their own


def test_units_that_are_done_before_a_process_is_up_stay_in_this_one(laptop, tmp_path, monkeypatch):
    smoke = Planned.of(load_profile("smoke"), "float32", True)
    assert sizing.operations(smoke, "screening", COUNTED) < sizing.WORTHWHILE
    monkeypatch.setattr(sizing, "planned_for", lambda run: smoke)
    assert shared(laptop, 2) == Share(1, 2)


def test_a_card_has_one_and_says_so(laptop, monkeypatch):
    for module in (sizing, local):
        monkeypatch.setattr(module, "device_of", lambda profile: SimpleNamespace(type="cuda"))
    assert shared(laptop, 16) == Share(1, 16)
    refused(
        lambda: LocalExecutor(laptop, "screen", {}, Progress("test", 1), Settings(workers=2)),
        match="workers 2 given for a run on a card, .* leave --workers out",
    )


def test_shares_that_are_none_are_refused(laptop):
    shared(laptop, 2)
    path = laptop.stage("screening") / SHARES
    record = read_json(path)
    record["shares"]["6 units"]["threads"] = 0
    write_json(path, record)
    refused(lambda: shared(laptop, 2), match="holds something else than numbers of workers and threads")


@pytest.mark.all_cores
def test_torch_has_its_threads_back_afterwards():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
