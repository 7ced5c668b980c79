"""Which kinds of model can read a handed-over cache: held against native prefill, or refused."""

import pytest
import torch
from tiny import refused, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from kvlib import DirectMap, handoff, prefill
from kvlib.handoff import PROVEN

MODES = ("absorbed", "in_place", "materialised")
SMALL = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def model_of(kind: str, **changes):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [(kind, GROUPED) for kind in PROVEN]
    + [
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("opt", {}),
        ("granite", GROUPED),
        ("nemotron", GROUPED),
        ("cohere", {**GROUPED, "logit_scale": 1.0}),
    ],
)
def test_a_kind_of_model_that_is_accepted_reads_its_own_cache_as_native(kind, changes):
    model = model_of(kind, **changes).double()
    assert kind == model.config.model_type
    ids = tokens(2, 12, vocabulary=100)
    native = model(ids).logits[:, 8:]
    for mode in MODES:
        with (
            torch.no_grad(),
            handoff(model, prefill(model, ids[:, :8]), DirectMap(), mode, source=model) as active,
        ):
            assert torch.allclose(active.logits(ids[:, 8:]), native, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (
            "bloom",
            {},
            "cannot read a handed-over cache",
        ),  # attention of its own, with positions in its scores
        ("mpt", {}, "cannot read a handed-over cache"),
        ("xglm", {}, "cannot read a handed-over cache"),
        ("cohere", {**GROUPED, "logit_scale": 0.1}, "moves its logits"),  # scales logits after the head
        ("granite", {**GROUPED, "logits_scaling": 8.0}, "moves its logits"),
        ("diffllama", {}, "moves its logits"),  # two softmaxes per head
        ("bert", {"is_decoder": False}, "moves its logits"),  # looks ahead
        ("falcon", {}, "KV heads"),
        ("mistral", {**GROUPED, "sliding_window": 8}, "sliding window"),
        ("gemma2", GROUPED, "sliding_attention"),
        ("gpt_oss", GROUPED, "sliding_attention"),
        ("mamba", {}, "linear_attention"),
    ],
)
def test_a_kind_of_model_that_cannot_read_a_handed_over_cache_is_refused(kind, changes, sentence):
    model, ids = model_of(kind, **changes), tokens(1, 8, vocabulary=100)
    refused(lambda: handoff(model, prefill(model, ids), DirectMap()), match=sentence)
