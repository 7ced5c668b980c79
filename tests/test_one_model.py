"""Source and target are never in memory together, and no copy of the target is made that another would do for."""

import gc
import weakref

import pytest
import torch
from test_study import whole  # noqa: F401 - a finished run

from kvlib.cache import prefill
from kvlib.study import evaluation, models, pairing, screening
from kvlib.study.evidence import run_evidence
from kvlib.study.records import read_json, read_table, write_json
from kvlib.study.run import read_summary
from kvlib.study.stages import open_run, run_confirmation, run_frozen_evaluation, run_pair, run_screening

STAGES = (run_pair, run_screening, run_confirmation, run_frozen_evaluation, run_evidence)


class Watch:
    """Counts the models that are alive whenever one has just been loaded."""

    def __init__(self, monkeypatch):
        self.alive, self.seen = {}, []
        load = models.load_pair_model

        def watched(run, role, dtype=None):
            model = load(run, role, dtype)
            self.alive[weakref.ref(model)] = role
            gc.collect()
            self.seen.append(sorted(role for ref, role in self.alive.items() if ref() is not None))
            return model

        for module in (models, pairing, screening, evaluation):
            monkeypatch.setattr(module, "load_pair_model", watched)


def test_one_model_is_there_at_a_time_from_the_first_stage_to_the_last(tmp_path, monkeypatch):
    watch, run = Watch(monkeypatch), open_run("smoke", results=tmp_path, **{"screening.arms": None})
    loads = {}
    for stage in STAGES:
        before = len(watch.seen)
        stage(run)
        loads[stage.__name__] = watch.seen[before:]
    assert all(len(alive) == 1 for alive in watch.seen), loads
    # pruning, then each once; each once; each once; each once; per length each once, then the target
    assert [len(loads[stage.__name__]) for stage in STAGES] == [3, 2, 2, 2, 5]


def test_in_two_number_formats_the_target_is_there_twice_and_the_source_never_beside_it(
    tmp_path, monkeypatch
):
    watch = Watch(monkeypatch)
    run = open_run("smoke", results=tmp_path, **{"training.dtype": "bfloat16", "screening.arms": None})
    run_pair(run)
    run_screening(run)
    assert {tuple(alive) for alive in watch.seen} == {("source",), ("target",), ("target", "target")}
    # Loaded in the other format, not converted to it: a conversion rounds the rotary frequencies too, and at later
    # positions the windows' keys would be turned otherwise than those of the prompts.
    pair = read_json(run.stage("pair") / "summary.json")
    store = screening.prepare(run, "screen", pair, screening.Progress("test", 1), filled=True)[0].store
    model = models.OneModel(run).get("source", torch.bfloat16)
    keys = prefill(model, store.windows[:4]).keys
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(torch.equal(store.source[:4, n, 0], layer.float()) for n, layer in enumerate(keys))


def test_a_worker_finds_the_caches_and_loads_the_target_alone(whole, tmp_path, monkeypatch):  # noqa: F811
    run = open_run("smoke", results=whole)
    watch, pair = Watch(monkeypatch), read_json(run.stage("pair") / "summary.json")
    monkeypatch.setattr(screening.WindowStore, "_checksums", lambda *_: pytest.fail("looked through again"))
    monkeypatch.setattr(screening, "fingerprint", lambda *_: pytest.fail("hashed again"))
    trainer, scorer = screening.prepare(run, "screen", pair, screening.Progress("test", 1), filled=True)
    assert watch.seen == [["target"]] and trainer.target is scorer.target
    assert all(torch.equal(a, b) for a, b in zip(trainer.scale, trainer.store.source_scale()))
    monkeypatch.undo()
    watch = Watch(monkeypatch)
    screening.prepare(run, "screen", pair, screening.Progress("test", 1))
    assert watch.seen == [["target"]]  # nothing is missing: the source is not loaded either


def test_a_run_with_little_memory_ends_with_the_same_figures(whole, tmp_path, monkeypatch):  # noqa: F811
    """One prompt and one window at a time, as on a small card. float32: KL within 1e-3 of its mean after training."""
    usual, run = open_run("smoke", results=whole), open_run("smoke", results=tmp_path)
    one = {"windows": 1, "prompts": 1, "training.micro_batch": 1}
    for stage, call in (("pair", run_pair), ("screening", run_screening), ("confirmation", run_confirmation),
                        ("frozen_evaluation", run_frozen_evaluation)):  # fmt: skip
        if stage != "pair":
            write_json(run.stage(stage) / "lowered.json", one)
        call(run)
    assert [read_summary(run.stage(name)).get("lowered") for name in ("pair", "screening")] == [None, one]
    assert not list(run.folder.glob("*/lowered.json"))  # said in the record, and begun anew next time
    assert read_json(next(run.stage("screening").glob("arms/*/trained.json")))["micro_batch"] == 1
    for file in ("screening/validation.parquet", "frozen_evaluation/prompts.parquet"):
        ours, theirs = (read_table(r.folder / file) for r in (run, usual))
        assert (ours["kl32"] - theirs["kl32"]).abs().max() < 1e-3 * theirs["kl32"].mean()
