"""A plan's counts against what small models measure: operations, peak memory, bytes of files and of weights."""

from dataclasses import replace

import pytest
import torch
from live_bytes import peak_of
from tiny import tiny_llama, tokens
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kvlib.cache import Geometry, prefill
from kvlib.divergence import Reference, oracle_reference, path_divergence, text_reference
from kvlib.maps import DirectMap, ResidualMap, RidgeAccumulator
from kvlib.maps.residual import WEIGHTS
from kvlib.pair import rotary_of
from kvlib.pruning import prune_width
from kvlib.ragged import RaggedPrefix
from kvlib.study.plan import memory
from kvlib.study.plan.operations import Runner
from kvlib.study.plan.shapes import shape_of_config
from kvlib.training import Batch, Frozen, forced_kl

WITHIN = 0.10
SHAPES = {
    "wide MLP, large vocabulary": {
        "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 48, "vocab_size": 3000,
        "num_hidden_layers": 4,
    },
    "wide attention, small vocabulary": {
        "hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 500,
    },
}  # fmt: skip
B, T, S = 4, 96, 16
RANK = 4


def near(measured: float):
    return pytest.approx(measured, rel=WITHIN)


def flops(call) -> int:
    """Operations of torch's products, attention by its causal half; the processor's kernel has no count of its own."""

    def causal(query, key, value, dropout=0.0, is_causal=False, *args, out_shape=None, **kwargs):
        assert is_causal or query[2] == 1
        return sdpa_flop_count(query, key, value) // (2 if is_causal else 1)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: causal}) as counted:
        call()
    return counted.get_total_flops()


@pytest.fixture(scope="module", params=SHAPES, ids=SHAPES)
def model(request):
    return tiny_llama(**SHAPES[request.param])


def runner_of(model, dtype: str) -> Runner:
    return Runner(shape_of_config(model.config, "tiny"), dtype)


def cases(model, runner: Runner) -> dict:
    """Name -> (the real call, its planned cost, its planned peak or None)."""
    ids = tokens(B, T)
    prefix, reference = prefill(model, ids), oracle_reference(model, ids, S)
    forced = Reference(ids[:, :S], ids[:, :S], reference.hidden)
    return {
        "prefill": (lambda: prefill(model, ids), runner.prefill(B, T), memory.prefill(runner, B, T)),
        "prefill with hidden states": (
            lambda: prefill(model, ids, return_hidden=True),
            runner.prefill(B, T, hidden=True),
            memory.prefill(runner, B, T, hidden=True),
        ),
        "oracle": (
            lambda: oracle_reference(model, ids, S),
            runner.oracle(B, T, S),
            memory.oracle(runner, B, T, S),
        ),
        "text": (lambda: text_reference(model, ids, ids[:, :S]), runner.text(B, T, S), None),
        "scoring a handoff": (
            lambda: path_divergence(model, prefix, DirectMap(), forced),
            runner.forced(B, T, S, per_head=0) + runner.head(B * S),
            memory.scoring(runner, B, T, S, copies=0, on_cpu=True),
        ),
    }


def test_operations_are_those_that_torch_counts(model):
    # in double precision, since the float32 products of a processor go through kernels that nobody counts
    wide = model.double()
    for name, (call, cost, _) in cases(wide, runner_of(wide, "float64")).items():
        assert cost.flop == near(flops(call)), name
    model.float()


def test_peak_memory_is_what_is_alive_at_the_worst_moment(model):
    runner = runner_of(model, "float32")
    for name, (call, _, peak) in cases(model, runner).items():
        if peak is not None:
            assert peak.total - peak.weights == near(peak_of(call)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_weigh_what_the_model_weighs(dtype):
    made = [tiny_llama(**settings) for settings in SHAPES.values()]
    made.append(tiny_llama(tie_word_embeddings=True))
    settings = {
        "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    made += [
        Qwen2ForCausalLM(Qwen2Config(**settings)),
        Qwen3ForCausalLM(Qwen3Config(**settings, head_dim=16)),
    ]
    for model in made:
        held = sum(p.numel() * p.element_size() for p in model.to(dtype).parameters())
        shape = shape_of_config(model.config, "tiny")
        assert shape.weight_bytes(str(dtype).removeprefix("torch.")) == held, model.config.model_type


# --- training


def training_step(model, cached: int, *, residual="linear", features="own"):
    """One step of forced_kl and its backward pass over a padded batch, as a call."""
    geometry = Geometry.of(model)
    shape = (geometry.layers, 2, geometry.heads, cached, geometry.head_dim)
    dtype = next(model.parameters()).dtype
    hidden = torch.randn(B, S, model.config.hidden_size)
    batch = Batch(
        RaggedPrefix([torch.randn(shape, dtype=dtype) for _ in range(B)]), None, tokens(B, S), hidden
    )
    one = torch.ones(geometry.layers, geometry.heads)
    initial = ResidualMap.initial(
        one,
        one,
        geometry.head_dim,
        RANK,
        residual=residual,
        features=features,
        generator=torch.Generator().manual_seed(0),
    )
    learned = replace(initial, **{name: getattr(initial, name).requires_grad_(True) for name in WEIGHTS})
    # without rows: torch's own products over one padded batch, as on a card
    frozen = Frozen.of(model, model.get_output_embeddings().weight.float(), None)
    rotary = rotary_of(model) if learned.needs_rotary else None
    return lambda: forced_kl(frozen, learned, batch, rotary).backward(), learned.parameters


@pytest.mark.parametrize("cached", [64, 200])
def test_a_training_step_costs_what_torch_counts(model, cached):
    call, _ = training_step(model, cached)
    per_head = 2 * model.config.head_dim * RANK
    planned = runner_of(model, "float32").training_step(B, cached, S, per_head=per_head)
    assert planned.flop == near(flops(call))


@pytest.mark.parametrize("cached", [64, 200])
def test_a_training_step_holds_what_is_alive_at_its_worst_moment(model, cached):
    call, parameters = training_step(model, cached)
    call()  # gradients are there from the first step on: the optimiser's share
    peak = memory.training(runner_of(model, "float32"), B, cached, S, parameters, on_cpu=True)
    assert peak.total - peak.weights - peak.optimiser == near(peak_of(call))


@pytest.mark.parametrize(("residual", "features", "kept"), [("quadratic", "own", 2), ("linear", "rms", 1)])
def test_a_map_that_attention_cannot_absorb_keeps_its_features_for_backward(model, residual, features, kept):
    call, parameters = training_step(model, 200, residual=residual, features=features)
    call()
    peak = memory.training(runner_of(model, "float32"), B, 200, S, parameters, features=kept, on_cpu=True)
    assert peak.total - peak.weights - peak.optimiser == near(peak_of(call))


def test_activations_that_are_computed_again_are_not_kept():
    runner = runner_of(tiny_llama(**SHAPES["wide MLP, large vocabulary"]), "float32")
    plain, again = (memory.training(runner, B, 200, S, 0, again=again) for again in (False, True))
    assert again.activations < plain.activations / 2
    more = runner.training_step(B, 200, S, again=True).flop - runner.training_step(B, 200, S).flop
    down = (
        2 * B * S * runner.shape.hidden * runner.shape.mlp * runner.shape.layers
    )  # not asked for by backward
    assert more == near(runner.forced(B, 200, S).flop - runner.head(B * S).flop - down)


def test_ridge_sums_and_pruning_cost_what_torch_counts(model):
    wide = model.double()
    runner = runner_of(wide, "float64")
    source = target = prefill(wide, tokens(1, T))
    sums = RidgeAccumulator(Geometry.of(wide))
    assert runner.ridge(1, T).flop == near(flops(lambda: sums.add(source, target)))
    model.float()
    windows, width, neurons = (
        tokens(6, 64),
        model.config.hidden_size // 16 * 8,
        model.config.intermediate_size // 2,
    )
    pruned = replace(runner.shape, hidden=width, mlp=neurons, tied=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlib.pruning.linear", torch.nn.functional.linear)  # products that torch counts
        measured = flops(lambda: prune_width(model, windows, width, neurons))
    assert runner_of(model, "float32").pruning(6, 64, pruned).flop == near(measured)
