"""The stand-ins have the properties that they stand in for."""

import json

import datasets
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.standins import BOS, config_of, save_fineweb, save_model, save_pair, save_wikitext, texts_of


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    return save_wikitext(tmp_path_factory.mktemp("wikitext"), {"train": 6, "test": 2})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_pair_shares_its_cache_and_nothing_else(tmp_path, wikitext, family):
    pair = save_pair(tmp_path, family, texts_of(wikitext))
    target, source = (AutoConfig.from_pretrained(pair[role]) for role in ("target", "source"))
    for config in (target, source):
        assert config.head_dim != config.hidden_size // config.num_attention_heads
        assert config.num_key_value_heads < config.num_attention_heads
    assert target.hidden_size != source.hidden_size and not target.tie_word_embeddings
    files = json.loads((pair["target"] / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) > 2
    names = " ".join(files)
    assert ("q_proj.bias" in names) == (family == "qwen2")
    assert ("q_norm" in names) == (family == "qwen3")
    assert (target.rope_parameters["rope_type"] == "llama3") == (family == "llama")
    assert source.tie_word_embeddings == (family == "qwen3")


def test_llamas_tokenizer_puts_a_bos_first_and_qwens_has_none(tmp_path, wikitext):
    texts = texts_of(wikitext)
    llama = AutoTokenizer.from_pretrained(save_pair(tmp_path / "llama", "llama", texts)["target"])
    qwen = AutoTokenizer.from_pretrained(save_pair(tmp_path / "qwen", "qwen3", texts)["target"])
    assert llama.is_fast and llama("the old river").input_ids[0] == llama.convert_tokens_to_ids(BOS)
    assert qwen.is_fast and qwen.bos_token is None
    assert qwen.decode(qwen("the old river").input_ids) == "the old river"


def test_a_vocabulary_of_128256_words_is_no_obstacle_to_kl(tmp_path, wikitext):
    from kvlib.cache import prefill
    from kvlib.divergence import oracle_reference, path_divergence
    from kvlib.maps import DirectMap
    from tests.standins import byte_tokenizer

    tokenizer = byte_tokenizer(texts_of(wikitext))
    places = [
        save_model(tmp_path / str(width), config_of("llama", width, 128256), tokenizer, seed, shard="10MB")
        for seed, width in enumerate((24, 16))
    ]
    target, source = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval() for place in places
    )
    ids = torch.tensor([tokenizer("the old river carries the stone near the quiet valley .").input_ids])
    with torch.no_grad():
        reference = oracle_reference(target, ids, 4)
        own = path_divergence(target, prefill(target, ids[:, :-1]), DirectMap(), reference)
        other = path_divergence(target, prefill(source, ids[:, :-1]), DirectMap(), reference)
    assert float(own.kl.mean()) < 0.02 < float(other.kl.mean())


def test_the_folders_are_read_by_datasets_as_the_data_sets_are(tmp_path, wikitext):
    rows = datasets.load_dataset(str(wikitext), "wikitext-103-raw-v1", split="test", streaming=True)
    assert [row["text"] for row in rows][:3] == ["", " = Test 0 = \n", ""]
    pages = datasets.load_dataset(
        str(save_fineweb(tmp_path / "fineweb", 4)), "sample-10BT", split="train", streaming=True
    )
    assert {"text", "url", "token_count"} <= set(next(iter(pages)))
