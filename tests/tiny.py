"""Tiny random-weight Llamas that tests share, and what a refusal must be."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvlib import KvlibError

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Three layers, 6 query heads on 2 KV heads, head_dim 16 where hidden / heads is 8."""
    settings = {
        "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
        **changes,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**settings)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _name, weight in sorted(model.named_parameters()):
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model.eval().requires_grad_(False)


def tokens(batch: int, length: int, seed: int = 0, vocabulary: int = 101) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def is_one_sentence(error: Exception) -> bool:
    """What was given, what was expected, what to do: on one line, and neither a stub nor a page."""
    text = str(error)
    return "\n" not in text and ". " not in text and 40 < len(text) < 500 and (":" in text or ";" in text)


def refused(call, *, match: str) -> None:
    """`call` raises a KvlibError of one sentence that matches."""
    with pytest.raises(KvlibError, match=match) as refusal:
        call()
    assert is_one_sentence(refusal.value), str(refusal.value)
