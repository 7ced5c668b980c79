"""The real small pair with few steps: learned < direct < ridge in KL32, as in the study.

Needs the two assets that `make test` fetches beforehand (`python -m kvlib fetch`); about two minutes on two cores.
"""

import pytest

from kvlib.maps import DirectMap
from kvlib.study.arms import Arm
from kvlib.study.learning import Task
from kvlib.study.progress import Progress
from kvlib.study.scoring import summarise
from kvlib.study.screening import prepare
from kvlib.study.stages import open_run, run_pair

SMALLER = {
    "partitions.window_tokens": 512,
    "partitions.build": {"articles": 20, "items": 20},
    "partitions.screen_train": {"articles": 14, "items": 16},
    "partitions.screen_validate": {"articles": 8, "items": 12},
    "latency.prefix_tokens": [128],
    "latency.warmups": [1],
    "latency.repetitions": [1],
    "latency.native_repetitions": [1],
    "latency.cold_repetitions": [1],
    "latency.pipeline_repetitions": [1],
    "training.steps": 40,
    "screening.checkpoints": [40],
    "screening.warmup_steps": 5,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return open_run("laptop", "real", results=tmp_path_factory.mktemp("results"), **SMALLER)


@pytest.mark.all_cores
def test_learned_beats_direct_beats_ridge(run):
    pair = run_pair(run)
    assert pair["gate"]["passed"] and pair["pruning"]["body_parameters_kept"] == pytest.approx(0.71, abs=0.02)
    assert (
        pair["held_out_nll"]["target"] < pair["held_out_nll"]["source"] < pair["held_out_nll"]["target"] + 2
    )
    trainer, scorer = prepare(run, "screen", pair, Progress("test", 1))
    task = Task(Arm("direct", "linear", "own", 8, 0.003, 5), seed=0, steps=40)
    assert trainer.train(task, Progress("test", 1), "test")["status"] == "finished"
    maps = {
        "direct": DirectMap(),
        "ridge": trainer.ridge,
        "learned": trainer.load(task, 40).with_scale(0.75),
    }
    found = {name: summarise(scorer.table(cache_map)) for name, cache_map in maps.items()}
    assert found["learned"]["kl32"] < found["direct"]["kl32"] < found["ridge"]["kl32"], found
    assert found["learned"]["top1"] > found["ridge"]["top1"]
    assert 0.1 < found["direct"]["kl32"] < 0.5
