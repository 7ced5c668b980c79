"""Measuring from the prompt on: three ways per round, the same token whichever way, medians per length."""

import pytest
import torch
from test_maps import random_residual
from tiny import refused, tiny_llama, tokens

from kvlib.cold import measure_pipeline, pipeline_rows


@pytest.mark.parametrize("residual", ["linear", "quadratic"])
def test_every_way_runs_once_per_round_and_ends_at_the_same_token(residual):
    told = []
    raw = measure_pipeline(
        tiny_llama(0), tiny_llama(1), random_residual(residual), tokens(2, 20), 4, seed=3,
        progress=lambda path, way: told.append((path, way)),
    )  # fmt: skip
    assert len(raw) == 12 and len(told) == 15  # a warm-up round
    assert [row["order"] for row in raw] == list(range(12))
    for n in range(4):
        rows = [row for row in raw if row["repetition"] == n]
        assert {row["way"] for row in rows} == {"serial", "pipelined", "resident"}
        assert {row["prompt"] for row in rows} == {n // 2} and len({row["token"] for row in rows}) == 1
    assert len({tuple(row["way"] for row in raw[i : i + 3]) for i in range(0, 12, 3)}) > 1  # drawn anew
    for row in raw:
        assert row["prefix_tokens"] == 20 and row["path"] == "learned" and row["ms"] > 0
        assert row["mode"] == ("absorbed" if residual == "linear" else "in_place")
        if row["way"] == "serial":
            assert row["source_ms"] + row["handoff_ms"] == pytest.approx(row["ms"])
        else:
            assert row["source_ms"] is None and row["handoff_ms"] is None


def test_one_seed_gives_one_order():
    arguments = (tiny_llama(0), tiny_llama(1), random_residual(), tokens(1, 6), 5)
    first, again = ([row["way"] for row in measure_pipeline(*arguments, seed=7)] for _ in range(2))
    assert first == again


def test_rows_are_medians_per_length_and_path():
    def row(tokens, way, ms, source_ms=None):
        rest = None if source_ms is None else ms - source_ms
        return {
            "prefix_tokens": tokens, "path": "learned", "way": way, "ms": ms, "source_ms": source_ms, "handoff_ms": rest,
        }  # fmt: skip

    raw = [row(8, "serial", ms, ms - 5) for ms in (100, 130, 110)] + [
        row(8, "pipelined", ms) for ms in (90, 95, 91)
    ]
    raw += [row(8, "resident", ms) for ms in (4, 6, 5)]
    raw += [row(16, "serial", 7, 3), row(16, "pipelined", 6), row(16, "resident", 2)]
    short, long = pipeline_rows(raw)
    assert short == {
        "prefix_tokens": 8, "path": "learned", "source_prefill_p50_ms": 105, "serial_p50_ms": 110, "serial_handoff_p50_ms": 5,
        "pipelined_p50_ms": 91, "resident_p50_ms": 5, "repetitions": 3,
    }  # fmt: skip
    assert (long["prefix_tokens"], long["serial_handoff_p50_ms"], long["repetitions"]) == (16, 4, 1)


def test_what_does_not_fit_is_refused_before_a_clock_runs():
    target, source = tiny_llama(0), tiny_llama(1)
    refused(
        lambda: measure_pipeline(target, source, random_residual(), tokens(1, 1), 1, seed=0),
        match="all but the last",
    )
    shallow = tiny_llama(0, num_hidden_layers=2)
    refused(
        lambda: measure_pipeline(shallow, source, random_residual(), tokens(1, 6), 1, seed=0),
        match="the residual map is for",
    )
    source.base_model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    refused(
        lambda: measure_pipeline(target, source, random_residual(), tokens(1, 6), 1, seed=0),
        match="NaN or infinity",
    )
