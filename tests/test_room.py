"""When memory runs out: half as many at once, the same result, and one sentence when one is too many."""

import logging

import pytest
import torch
from test_maps import random_residual
from test_training import fresh, models, run, store  # noqa: F401 - fixtures
from tiny import refused, tokens

from kvlib import training
from kvlib.cache import Geometry
from kvlib.maps import DirectMap
from kvlib.maps.residual import WEIGHTS
from kvlib.room import Room, out_of_memory
from kvlib.study import lowering, prompts
from kvlib.study import store as stores
from kvlib.study.progress import Progress
from kvlib.study.prompts import PromptStore
from kvlib.study.records import write_json
from kvlib.study.scoring import Scorer
from kvlib.study.store import WindowStore

CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(CPU),
    MemoryError(),
]


def fits_only(most, call, size_of, error=ERRORS[0]):
    """`call`, for which memory suffices as long as `size_of` its arguments is `most` or less."""

    def limited(*args, **kwargs):
        if size_of(*args, **kwargs) > most:
            raise error
        return call(*args, **kwargs)

    return limited


@pytest.mark.parametrize("error", ERRORS, ids=["cuda", "cpu", "python"])
def test_the_part_that_failed_is_done_again_in_halves(error, caplog):
    done, lowered = [], []
    room = Room("prompts", 8, "take fewer", lowered.append)
    work = fits_only(
        3, lambda part: done.append(part) or part.start, lambda part: part.stop - part.start, error
    )
    with caplog.at_level(logging.WARNING):
        assert room.over(7, work) == [0, 2, 4, 6]
    assert room.most == 2 and lowered == [4, 2]
    assert [
        r.message.startswith(f"memory ran out: {n} of the prompts") for r, n in zip(caplog.records, lowered)
    ]


def test_one_that_is_too_many_is_one_sentence_that_says_what_helps():
    room = Room("prompts", 2, "lower prompt.prefix_tokens")
    refused(
        lambda: room.over(2, fits_only(0, len, lambda part: 1)),
        match="1 of the prompts .* lower prompt.prefix_tokens",
    )


def test_other_errors_are_passed_on():
    assert not out_of_memory(RuntimeError("shapes differ")) and not out_of_memory(ValueError("out of memory"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        Room("prompts", 2, "no").over(2, fits_only(0, len, lambda part: 1, RuntimeError("shapes differ")))


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_a_halved_step_has_the_same_result(models, store, monkeypatch, warmup_steps):  # noqa: F811
    target, _ = models
    whole = run(target, store, fresh(store), warmup_steps=warmup_steps)
    sizes = {"forced_kl": lambda *args: args[2].source.batch, "kv_mse": lambda *args: args[1].batch}
    for name, size in sizes.items():
        monkeypatch.setattr(training, name, fits_only(1, getattr(training, name), size))
    halved = run(target, store, fresh(store), warmup_steps=warmup_steps)
    assert [step.micro_batch for step in halved] == [1] * 6 and whole[0].micro_batch == 2
    # float32 sums of the same terms in another order
    assert [step.loss for step in halved] == pytest.approx([step.loss for step in whole], rel=1e-4)
    for name in WEIGHTS:
        assert (getattr(halved[-1].map, name) - getattr(whole[-1].map, name)).abs().median() < 1e-5


def test_a_step_that_does_not_fit_with_one_prompt_names_what_helps(models, store, monkeypatch):  # noqa: F811
    monkeypatch.setattr(training, "forced_kl", fits_only(0, len, lambda *args: 1))
    refused(lambda: run(models[0], store, fresh(store), warmup_steps=0), match="1 of the step's prompts")


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_gradients_of_uneven_pieces_add_up(models, store, monkeypatch, warmup_steps):  # noqa: F811
    """Five prompts at once, and as two, two and one: the same sums in another order."""
    target, batch = models[0], store.batch([0, 1, 2, 3, 4], [9, 30, 17, 12, 25], 4, with_target=True)
    found = {}
    for most in (5, 2, 1):
        gradients = found[most] = []

        def note(optimiser, gradients=gradients):
            gradients += [weight.grad.clone() for weight in optimiser.param_groups[0]["params"]]

        monkeypatch.setattr(torch.optim.Adam, "step", note)
        steps = training.train(
            target, random_residual("linear", "own"), lambda number, warm: batch, steps=1 + warmup_steps,
            warmup_steps=warmup_steps, learning_rate=0.01, head_weight=target.lm_head.weight, micro_batch=most,
        )  # fmt: skip
        gradients.append(torch.tensor(next(steps).loss))
    for parts in (found[2], found[1]):
        for ours, theirs in zip(parts, found[5]):
            assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def prompt_store(folder, most):
    return PromptStore(folder, tokens(7, 20), 12, ["oracle", "text"], 4, Room("prompts", most, "no"))


def test_prompts_one_at_a_time_give_what_all_at_once_do(models, tmp_path):  # noqa: F811
    """On a card with little memory: KL within 1e-4 of itself in float32, along the same tokens."""
    target, source = models
    found = []
    for most in (4, 1):
        filled = prompt_store(tmp_path / str(most), most).fill(source, target, Progress("test", 7), 1)
        found.append((filled, Scorer(filled, target, ["a"] * 7).table(DirectMap())))
    (whole, ours), (single, theirs) = found
    for start in whole.starts:
        one, other = (s.batch(start)[1]["oracle"] for s in (whole, single))
        assert torch.equal(one.forced, other.forced)
        torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-4, atol=1e-4)
    assert theirs["kl32"].tolist() == pytest.approx(ours["kl32"].tolist(), rel=1e-4)
    assert theirs["top1"].tolist() == ours["top1"].tolist()


def test_caching_and_scoring_halve_and_say_so(models, tmp_path, monkeypatch):  # noqa: F811
    target, source = models
    monkeypatch.setenv("KVLIB_PROGRESS", str(tmp_path / "progress.json"))
    progress = Progress("test", 20)
    limited = fits_only(2, prompts.prefill, lambda model, ids, **kwargs: len(ids), ERRORS[1])
    for module in (prompts, stores):
        monkeypatch.setattr(module, "prefill", limited)
    room = lowering.room(tmp_path, *lowering.PROMPTS, 4, "no", progress)
    filled = PromptStore(tmp_path / "p", tokens(7, 20), 12, ["oracle"], 4, room).fill(
        source, target, progress, 1
    )
    assert lowering.read_lowered(tmp_path) == {"prompts": 2} and filled.filled
    windows = WindowStore(
        tmp_path / "w", tokens(6, 40), Geometry.of(target), 48, torch.float32,
        lowering.room(tmp_path, *lowering.WINDOWS, 4, "no", progress),
    ).fill(source, target, progress, 1)  # fmt: skip
    assert lowering.read_lowered(tmp_path) == {"prompts": 2, "windows": 2} and windows.complete == 6
    # a run that goes on begins where it was, and another worker's smaller number stays
    assert lowering.room(tmp_path, *lowering.PROMPTS, 4, "no").most == 2
    later = lowering.room(tmp_path, *lowering.PROMPTS, 8, "no")
    write_json(tmp_path / lowering.LOWERED, {"prompts": 1})
    later._halve("memory ran out")
    assert lowering.read_lowered(tmp_path) == {"prompts": 1}
