"""A fast step of training is the plain one: the same loss and gradients, and no product that is thrown away."""

from dataclasses import replace

import pytest
import torch
from test_maps import KINDS, random_residual
from tiny import tiny_llama, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvlib import RidgeMap
from kvlib.cache import Geometry
from kvlib.frozen_layers import is_plain_llama
from kvlib.maps.residual import WEIGHTS
from kvlib.packed import FrozenLinears, FrozenMatrix
from kvlib.pair import rotary_of
from kvlib.ragged import roomy_length
from kvlib.study.progress import Progress
from kvlib.study.store import WindowStore
from kvlib.training import Frozen, forced_kl
from kvlib.warmup import kv_mse

STEPS, CUTS = 4, [9, 17, 30]


@pytest.fixture
def wide_norms(monkeypatch):
    """Norms in the model's own dtype: transformers' take float32 in a float64 model as well, whose rounding would hide errors."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


def setting(tmp_path, dtype, with_target=False):
    """(target, a batch of three prompts of unequal length) in one dtype, caches included."""
    target, source = (tiny_llama(seed).to(dtype) for seed in (0, 1))
    store = WindowStore(tmp_path, tokens(3, 40), Geometry.of(target), target.config.hidden_size, dtype)
    store.fill(source, target, Progress("test", 3), 1)
    batch = store.batch([0, 1, 2], CUTS, STEPS, with_target=with_target)
    return target, replace(batch, hidden=batch.hidden.to(dtype))


def ridge(dtype):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.eye(16) + 0.1 * torch.randn(3, 2, 16, 16, generator=generator) for _ in range(2)]
    biases = [0.1 * torch.randn(3, 2, 16, generator=generator) for _ in range(2)]
    return RidgeMap(weights[0], biases[0], weights[1], biases[1], penalty=0.0).to(dtype)


def loss_and_gradients(frozen, cache_map, batch):
    own = replace(cache_map, **{n: getattr(cache_map, n).clone().requires_grad_(True) for n in WEIGHTS})
    loss = forced_kl(frozen, own, batch, rotary_of(frozen.target) if own.needs_rotary else None)
    loss.backward()
    return float(loss.detach()), [getattr(own, n).grad for n in WEIGHTS]


def both_ways(target, cache_map, batch, dtype):
    """(fast, plain): lengths of their own and oneDNN, against one padded batch and torch's products."""
    head = target.lm_head.weight.detach()
    found = []
    for rows in (batch.inputs.numel(), None):
        frozen = Frozen.of(target, head, rows)
        found.append(loss_and_gradients(frozen, cache_map.to(dtype), batch))
    return found


def largest_error(ours, theirs) -> float:
    """Of any gradient, relative to the largest entry of its tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs))


# 1e-9: float64 sums of some hundred terms, in another order, through three layers. A wrong term is off by far more.
@pytest.mark.parametrize("base", ["direct", "ridge"])
@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_a_fast_step_has_the_plain_steps_loss_and_gradients(tmp_path, wide_norms, residual, features, base):
    target, batch = setting(tmp_path, torch.float64)
    cache_map = replace(
        random_residual(residual, features), base=ridge(torch.float32) if base == "ridge" else None
    )
    (loss, ours), (wanted, theirs) = both_ways(target, cache_map, batch, torch.float64)
    # rotary angles are the model's own float32
    tolerance = 1e-6 if features == "rope_stripped" else 1e-9
    assert loss == pytest.approx(wanted, rel=tolerance) and loss > 0
    assert all(float(gradient.abs().max()) > 0 for gradient in theirs)
    assert largest_error(ours, theirs) < tolerance


@pytest.mark.parametrize(
    ("residual", "features"), [("linear", "own"), ("quadratic", "own"), ("linear", "rope_stripped")]
)
def test_a_body_that_is_no_plain_llama_keeps_its_own_layers(tmp_path, residual, features):
    target, batch = setting(tmp_path, torch.float64)
    for layer in target.model.layers:
        layer.mlp.gate_proj.forward = layer.mlp.gate_proj.forward  # somebody else's
    assert not is_plain_llama(target)
    (loss, ours), (wanted, theirs) = both_ways(
        target, random_residual(residual, features), batch, torch.float64
    )
    assert loss == pytest.approx(wanted, rel=1e-6) and largest_error(ours, theirs) < 1e-6


def test_in_float32_they_differ_by_rounding_only(tmp_path):
    target, batch = setting(tmp_path, torch.float32)
    (loss, ours), (wanted, theirs) = both_ways(target, random_residual("linear", "own"), batch, torch.float32)
    assert loss == pytest.approx(wanted, rel=1e-4) and largest_error(ours, theirs) < 1e-3


def test_frozen_linears_give_torchs_products_and_leave_the_model_as_it_was():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float64, 0)):
        model = tiny_llama(0).to(dtype)
        layer = model.model.layers[0].mlp.down_proj
        x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(True)
        wanted = layer(x)
        (gradient,) = torch.autograd.grad(wanted.sum(), x)
        with FrozenLinears(model, 10).within():
            found = layer(x)
            (ours,) = torch.autograd.grad(found.sum(), x)
        for a, b in ((found, wanted), (ours, gradient)):
            assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())
        assert all("forward" not in vars(module) for module in model.modules())


def test_a_step_multiplies_only_what_its_loss_needs(tmp_path):
    """Counted in float64, where every product is torch's own."""
    target, batch = setting(tmp_path, torch.float64)
    rows, config = batch.inputs.numel(), target.config
    linears = [m.weight.numel() for m in target.base_model.modules() if isinstance(m, torch.nn.Linear)]
    first = target.model.layers[0].self_attn
    idle = sum(
        m.weight.numel() for m in (first.q_proj, first.k_proj, first.v_proj)
    )  # hang on no weight of the map
    body = 2 * sum(linears) - idle
    head = 3 * config.vocab_size * config.hidden_size
    layers, dim, queries = config.num_hidden_layers, config.head_dim, config.num_attention_heads
    per_prompt = (
        queries * STEPS * dim
    )  # times positions: one product of scores with keys or of shares with values
    prefix = 4 * layers * per_prompt * sum(roomy_length(cut - 1) for cut in CUTS)
    new = (
        (6 * layers - 2 - 1) * per_prompt * STEPS * len(CUTS)
    )  # the first layer's own three gradients are idle
    maps = 6 * layers * per_prompt * dim * len(CUTS) - per_prompt * dim * len(CUTS)
    rank = 3 * 2 * layers * config.num_key_value_heads * dim * dim * 4
    cache_map = random_residual("linear", "own").to(torch.float64)
    frozen = Frozen.of(target, target.lm_head.weight.detach(), rows)
    with FlopCounterMode(display=False) as counter:
        loss_and_gradients(frozen, cache_map, batch)
    wanted = 2 * (rows * (body + head) + prefix + new + maps + rank)
    assert counter.get_total_flops() == pytest.approx(wanted, rel=0.01)


def test_a_matrix_keeps_its_dtype_where_onednn_has_no_kernel():
    weight = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = FrozenMatrix(weight, 3)
    x = torch.ones(3, 5, dtype=torch.float64)
    assert torch.equal(matrix.times(x), x @ weight.T)
    assert torch.equal(matrix.back(matrix.times(x)), x @ weight.T @ weight)


@pytest.mark.parametrize("base", ["direct", "ridge"])
@pytest.mark.parametrize(("residual", "features"), KINDS)
def test_the_warm_ups_gradients_are_autograds(tmp_path, residual, features, base):
    """Against the map's own correction under autograd, prompt by prompt, in float64."""
    target, batch = setting(tmp_path, torch.float64, with_target=True)
    cache_map = replace(
        random_residual(residual, features), base=ridge(torch.float32) if base == "ridge" else None
    ).to(torch.float64)
    rotary = rotary_of(target) if cache_map.needs_rotary else None
    ours, theirs = (
        replace(cache_map, **{n: getattr(cache_map, n).clone().requires_grad_(True) for n in WEIGHTS})
        for _ in range(2)
    )
    loss = kv_mse(ours, batch.source, batch.target, rotary)
    loss.backward()
    terms = []
    for x, y in zip(batch.source.rows, batch.target.rows):
        angles = rotary(torch.arange(x.shape[3]).unsqueeze(0)) if rotary else None
        for layer in range(3):
            corrected = theirs.correct(layer, *x[layer].unsqueeze(1), angles)
            for found, wanted in zip(corrected, y[layer]):
                terms.append((found[0] - wanted).square().sum((-1, -2)) / wanted.square().sum((-1, -2)))
    wanted = torch.stack(terms).mean()
    wanted.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-9)
    pairs = [[getattr(one, n).grad for n in WEIGHTS] for one in (ours, theirs)]
    # 1e-6: rotary angles are the model's own float32
    assert largest_error(*pairs) < (1e-6 if features == "rope_stripped" else 1e-9)
