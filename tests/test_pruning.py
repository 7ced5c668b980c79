"""Width pruning: the cache geometry stays, the result is an ordinary Llama, the refits earn their place."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvlib.errors import KvlibError
from kvlib.pruning import prune_width

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_llama(**changes) -> LlamaForCausalLM:
    """Random weights large enough that attention and MLP matter; 4 heads of 16 on a hidden width of 48."""
    settings = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 5,
        "eos_token_id": 6,
        "tie_word_embeddings": False,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(std=0.15)
            # A spectrum as uneven as a trained model's, so that a slice is worth taking.
            model.model.embed_tokens.weight *= torch.logspace(0.5, -1, model.config.hidden_size)
    return model


def confine_stream(model: LlamaForCausalLM, width: int) -> None:
    """Project all that writes to the residual stream onto one subspace of `width` dimensions."""
    generator = torch.Generator().manual_seed(7)
    directions = torch.linalg.qr(torch.randn(model.config.hidden_size, width, generator=generator)).Q
    projection = directions @ directions.T
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ projection)
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.copy_(projection @ linear.weight)


def token_windows(count: int = 12, length: int = 64, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (count, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def test_cache_geometry_stays_while_widths_shrink():
    target = tiny_llama()
    source, report = prune_width(target, token_windows(), 40, 50)
    ids = token_windows(2, 20, seed=2)
    wide, narrow = (m(input_ids=ids, use_cache=True).past_key_values for m in (target, source))
    assert len(wide.layers) == len(narrow.layers) == 3
    for a, b in zip(wide.layers, narrow.layers):
        assert a.keys.shape == b.keys.shape == (2, 2, 20, 16)
        assert a.values.shape == b.values.shape
    config = source.config
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (40, 50, 16)
    assert source.model.layers[0].mlp.down_proj.weight.shape == (40, 50)
    assert report.calibration_tokens == 12 * 64
    assert [layer.layer for layer in report.layers] == [0, 1, 2]
    assert 0.5 < report.energy_kept < 1 and 0 < report.head_error < 1
    assert all(0 < layer.residual_error < 1 and 0.5 < layer.mlp_energy_kept < 1 for layer in report.layers)


def test_config_follows_the_target():
    target = tiny_llama(rope_parameters=LLAMA3_ROPE)
    source, _ = prune_width(target, token_windows(), 40, 50)
    for field in ("rope_parameters", "max_position_embeddings", "bos_token_id", "eos_token_id", "vocab_size"):
        assert getattr(source.config, field) == getattr(target.config, field)
    assert source.generation_config.eos_token_id == target.generation_config.eos_token_id


def test_body_parameters_kept_is_the_share_of_the_layers():
    _, report = prune_width(tiny_llama(), token_windows(), 40, 50)

    def body(hidden, neurons):
        return 3 * (hidden * (4 + 2 + 2 + 4) * 16 + 3 * hidden * neurons + 2 * hidden)

    assert report.body_parameters_kept == pytest.approx(body(40, 50) / body(48, 64))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3_ROPE},
        {"head_dim": 12},
        {"num_key_value_heads": 1, "num_hidden_layers": 1},
        {"hidden_act": "gelu"},
    ],
    ids=["plain", "tied", "llama3_rope", "head_dim_is_hidden_by_heads", "one_kv_head", "gelu"],
)
def test_a_stream_that_fits_the_width_is_reproduced(changes):
    target = tiny_llama(**changes)
    confine_stream(target, 40)
    source, report = prune_width(target, token_windows(), 40, 64)
    held_out = token_windows(3, 128, seed=3)  # longer than calibration: past llama3's scaled wavelengths
    torch.testing.assert_close(logits(source, held_out), logits(target, held_out), atol=2e-3, rtol=1e-3)
    assert report.energy_kept > 1 - 1e-6
    assert report.layers[-1].residual_error < 1e-6 and report.head_error < 1e-6
    assert all(layer.mlp_energy_kept == 1 for layer in report.layers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_source_loads_as_an_ordinary_model(tmp_path, tied, dtype):
    target = tiny_llama(tie_word_embeddings=tied, rope_parameters=LLAMA3_ROPE).to(dtype)
    target.config.quantization_config = {"quant_method": "gguf"}  # what a GGUF file leaves behind
    source, _ = prune_width(target, token_windows(), 40, 50)
    source.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.lm_head.weight.dtype == source.lm_head.weight.dtype == dtype
    assert loaded.lm_head.weight.data_ptr() != loaded.model.embed_tokens.weight.data_ptr()
    ids = token_windows(2, 100, seed=4)
    assert torch.equal(logits(loaded, ids), logits(source, ids))


def test_chunking_changes_memory_not_the_result():
    target, windows = tiny_llama(), token_windows(count=7)
    reference, reference_report = prune_width(target, windows, 40, 50, chunk_windows=7)
    for chunk_windows in (1, 3, 100):
        source, report = prune_width(target, windows, 40, 50, chunk_windows=chunk_windows)
        for (name, a), b in zip(source.named_parameters(), reference.parameters()):
            torch.testing.assert_close(a, b, atol=5e-4, rtol=5e-4, msg=lambda m, name=name: f"{name}: {m}")
        assert report.energy_kept == pytest.approx(reference_report.energy_kept, rel=1e-5)


def test_pruning_twice_gives_the_same_weights_and_leaves_target_and_generator_alone():
    target, windows = tiny_llama(), token_windows()
    before = {name: p.clone() for name, p in target.state_dict().items()}
    generator = torch.random.get_rng_state()
    first, second = (prune_width(target, windows, 40, 50)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert all(torch.equal(p, before[name]) for name, p in target.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_refits_bring_the_source_closer_than_the_slice():
    target, windows = tiny_llama(), token_windows(24, 128)
    refitted, refitted_report = prune_width(target, windows, 36, 40)
    sliced, sliced_report = prune_width(target, windows, 36, 40, penalty=1e9)  # so stiff that the slice stays
    assert refitted_report.layers[-1].residual_error < 0.9 * sliced_report.layers[-1].residual_error
    assert refitted_report.head_error < sliced_report.head_error

    held_out = token_windows(8, 128, seed=5)
    wanted = logits(target, held_out).log_softmax(-1)

    def divergence(source):
        return float((wanted.exp() * (wanted - logits(source, held_out).log_softmax(-1))).sum(-1).mean())

    assert divergence(refitted) < 0.9 * divergence(sliced)


def test_only_what_writes_to_the_stream_is_refitted():
    target, windows = tiny_llama(), token_windows()
    soft, stiff = (prune_width(target, windows, 40, 50, penalty=p)[0] for p in (1e-2, 1e9))
    for name, weight in soft.named_parameters():
        same = torch.equal(weight, stiff.get_parameter(name))
        assert same == (not name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight"))), name


def test_progress_counts_every_layer_in_both_passes():
    calls = []
    prune_width(tiny_llama(), token_windows(), 40, 50, progress=lambda *counts: calls.append(counts))
    assert calls == [(n, 6) for n in range(1, 7)]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"hidden_size": 48}, "hidden_size is 48: expected less than the target's 48"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 38}, "expected a multiple of the 4 heads; choose 36"),
        ({"intermediate_size": 65}, "intermediate_size is 65: expected 1 to the target's 64"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"windows": token_windows()[0]}, r"torch.int64 \(64,\): expected an int64 tensor \(N, T\)"),
        ({"windows": token_windows().int()}, "torch.int32"),
        ({"windows": [[1, 2]]}, "windows are list"),
        ({"windows": token_windows()[:0]}, r"windows are torch.int64 \(0, 64\): expected at least one"),
        ({"windows": token_windows(1, 257)}, "of 2 to 256 tokens"),
        ({"windows": token_windows() + 1}, "token ids 1 to 97: expected 0 to 96"),
        ({"windows": token_windows() - 1}, "token ids -1"),
        ({"chunk_windows": 0}, "chunk_windows is 0"),
        ({"penalty": 0.0}, "penalty is 0.0"),
        ({"target": torch.nn.Linear(2, 2)}, "the target is a Linear: expected a LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_pruned_is_refused_in_one_sentence(arguments, sentence):
    given = {"target": tiny_llama(), "windows": token_windows(), "hidden_size": 40, "intermediate_size": 50}
    given |= arguments
    with pytest.raises(KvlibError, match=sentence):
        prune_width(**given)


def test_broken_weights_are_named():
    target = tiny_llama()
    with torch.no_grad():
        target.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(KvlibError, match="model.layers.1.mlp.up_proj.weight is not finite float"):
        prune_width(target, token_windows(), 40, 50)


@pytest.mark.parametrize("kind, name", [("attention_bias", "q_proj"), ("mlp_bias", "gate_proj")])
def test_biases_are_refused(kind, name):
    with pytest.raises(KvlibError, match=rf"has model.layers.0.*{name}.bias: expected no biases"):
        prune_width(tiny_llama(**{kind: True}), token_windows(), 40, 50)


def test_activations_that_overflow_are_refused():
    target = tiny_llama()
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight *= 1e38
    with pytest.raises(KvlibError, match="activations are not finite"):
        prune_width(target, token_windows(), 40, 50)
