"""Two models share a cache only when everything that matters agrees; each failure names both models."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LLAMA3_ROPE, tiny_llama
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvlib import KvlibError, ModelPair, check_compatible, fingerprint
from kvlib.pair import load_model
from kvlib.study.corpus import Article, build_word_tokenizer


def named(model, name):
    model.config.name_or_path = name
    return model


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_hidden_layers": 2}, "layers: 2 against 3"),
        ({"num_key_value_heads": 3}, "KV heads: 3 against 2"),
        ({"head_dim": 8}, "head_dim: 8 against 16"),
        ({"vocab_size": 90}, "vocabulary size: 90 against 101"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rotary embedding"),
        ({"rope_parameters": LLAMA3_ROPE}, "rotary embedding"),
    ],
)
def test_each_difference_has_its_own_sentence(changes, what):
    target, source = named(tiny_llama(), "big"), named(tiny_llama(1, **changes), "small")
    with pytest.raises(KvlibError, match="source small and target big differ in") as refusal:
        check_compatible(target, source)
    assert what in str(refusal.value) and "\n" not in str(refusal.value)


def test_another_width_is_no_difference():
    check_compatible(tiny_llama(), tiny_llama(1, hidden_size=36, intermediate_size=20))


def test_another_dtype_is_refused():
    with pytest.raises(KvlibError, match="differ in dtype: torch.bfloat16 against torch.float32"):
        check_compatible(tiny_llama(), tiny_llama().bfloat16())


def test_sliding_window_layers_are_refused():
    config = Qwen2Config(
        vocab_size=101, hidden_size=96, intermediate_size=32, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(KvlibError, match="full attention in every layer"):
        check_compatible(tiny_llama(), Qwen2ForCausalLM(config))


def test_tokenizers_are_compared_by_their_ids():
    one = build_word_tokenizer([Article("a", "red green blue")])
    two = build_word_tokenizer([Article("a", "red green black")])
    check_compatible(tiny_llama(), tiny_llama(1), one, build_word_tokenizer([Article("b", "blue green red")]))
    with pytest.raises(KvlibError, match="differ in tokenizer: token 'black'"):
        check_compatible(tiny_llama(), tiny_llama(1), one, two)


def test_an_added_bos_is_found():
    from tokenizers.processors import TemplateProcessing

    plain, adding = (build_word_tokenizer([Article("a", "red green blue")]) for _ in range(2))
    adding.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    with pytest.raises(KvlibError, match="BOS"):
        check_compatible(tiny_llama(), tiny_llama(1), plain, adding)


def test_fingerprints_tell_weights_apart_and_dtypes_not():
    assert fingerprint(tiny_llama()) == fingerprint(tiny_llama()) == fingerprint(tiny_llama().bfloat16())
    changed = tiny_llama()
    changed.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    assert len({fingerprint(tiny_llama()), fingerprint(tiny_llama(1)), fingerprint(changed)}) == 3


def test_a_pair_is_loaded_from_folders_and_bad_ones_are_one_sentence(tmp_path):
    tokenizer = build_word_tokenizer([Article("a", "red green blue")])
    for name, seed in (("target", 0), ("source", 1)):
        tiny_llama(seed).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    pair = ModelPair.load(tmp_path / "target", tmp_path / "source")
    assert not any(p.requires_grad for p in pair.target.parameters()) and len(pair.fingerprint) == 64
    with pytest.raises(KvlibError, match="expected a folder or hub id"):
        ModelPair.load(tmp_path / "nowhere", tmp_path / "source")
    broken = tiny_llama()
    broken.lm_head.weight[0, 0] = float("nan")
    broken.save_pretrained(tmp_path / "source")
    with pytest.raises(KvlibError, match="lm_head.weight .* NaN or infinity"):
        ModelPair.load(tmp_path / "target", tmp_path / "source")


def test_a_weight_that_is_not_there_is_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(KvlibError, match="lack model.layers.1.mlp.up_proj.weight"):
        load_model(tmp_path)


def test_a_truncated_weight_file_is_one_sentence(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(KvlibError, match="expected a folder or hub id") as refusal:
        load_model(tmp_path, dtype=torch.float32)
    assert "\n" not in str(refusal.value)
