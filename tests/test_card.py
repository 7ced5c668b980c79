"""The study on a card: whatever meets a model is on its device. There is no card here, one is pretended."""

import pytest
import torch
from pretend_card import HostMeetsCard, Lane, pretend_card
from tiny import tiny_llama, tokens

from kvlib import DirectMap, handoff, prefill
from kvlib.study import controls
from kvlib.study.evidence import run_evidence
from kvlib.study.records import read_table
from kvlib.study.stages import (
    open_run,
    run_confirmation,
    run_frozen_evaluation,
    run_latency,
    run_pair,
    run_screening,
)

STAGES = (run_pair, run_screening, run_confirmation, run_frozen_evaluation, run_evidence)


def open_small(folder, device: str):
    return open_run(
        "smoke", results=folder, device=device,
        **{"latency.breakdown": False, "latency.pipeline_repetitions": [], "latency.memory": False,
           "latency.prefix_tokens": [32], "latency.warmups": [1], "latency.repetitions": [2],
           "latency.native_repetitions": [], "latency.cold_repetitions": [1]},
    )  # fmt: skip


def test_a_host_tensor_beside_one_on_the_card_is_noticed(monkeypatch):
    with pretend_card(monkeypatch):
        model = tiny_llama(0).to("cuda")
        assert next(model.parameters()).device.type == "cuda" and tokens(1, 5).device.type == "cpu"
        with pytest.raises(HostMeetsCard):
            model(tokens(1, 5))
        ids = tokens(1, 5).to("cuda")
        with handoff(model, prefill(model, ids[:, :4]), DirectMap()) as active:
            logits = active.logits(ids[:, 4:])
        assert logits.device.type == "cuda" and logits.cpu().device.type == "cpu"
        with pytest.raises(HostMeetsCard):
            logits + torch.ones(101)
        with pytest.raises(HostMeetsCard):
            logits.numpy()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same study on the processor and on the pretended card: (processor's run, card's run)."""
    runs = {}
    for device in ("cpu", "cuda"):
        run = open_small(tmp_path_factory.mktemp(device), device)
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu":
                [stage(run) for stage in STAGES]
            else:
                with pretend_card(patch):
                    [stage(run) for stage in (*STAGES, run_latency)]
                assert set(Lane.threads) and all(name.startswith("kvlib-ahead") for name in Lane.threads)
        runs[device] = run
    return runs


def test_every_stage_runs_with_all_that_meets_a_model_on_the_card(both):
    assert all((both["cuda"].stage(name) / "summary.json").exists() for name in ("evidence", "latency"))


def test_the_cards_way_through_training_ends_where_the_processors_does(both):
    """One padded batch and torch's own products, against each prefix at its own length and oneDNN's."""
    ours, theirs = (read_table(both[d].stage("screening") / "validation.parquet") for d in ("cuda", "cpu"))
    assert ours["arm"].tolist() == theirs["arm"].tolist()
    assert (ours["kl32"] - theirs["kl32"]).abs().max() < 2e-3 * theirs["kl32"].mean()


def test_the_same_test_fails_where_one_tensor_is_left_behind(both, monkeypatch):
    run = both["cuda"]
    summary = run.stage("frozen_evaluation") / "summary.json"

    def left_behind(prefix, rotary, generator):
        keys = [k + torch.randn(k.shape, generator=generator) for k in prefix.keys]
        return controls.PrefixCache(keys, list(prefix.values))

    with pretend_card(monkeypatch):
        monkeypatch.setattr(controls, "random_like", left_behind)
        summary.unlink()
        for path in run.stage("frozen_evaluation").glob("work-*/controls-*.parquet"):
            path.unlink()
        with pytest.raises(HostMeetsCard):
            run_frozen_evaluation(run)
