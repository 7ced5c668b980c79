"""Stand-ins for the real pairs and texts: small in size only, with every property of theirs that has ever broken such code."""

from pathlib import Path

import datasets
import tokenizers
import torch
import yaml
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from kvlib.study.corpus import Article, generated_articles
from kvlib.study.profile import DATA
from tests.tiny import LLAMA3_ROPE

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SHARD = "60KB"  # several files a model
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}


def byte_tokenizer(texts: list[str], *, bos: bool = True, words: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE in its fast form, trained on `texts`; puts a BOS before every text as Llama 3 does, or has none, as Qwen."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    named = [BOS, EOS] if bos else [EOS]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=named,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(texts, trainer)
    if bos:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, model.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token=BOS if bos else None, eos_token=EOS)


def config_of(family: str, hidden_size: int, vocabulary: int, **changes):
    """Three layers, 4 query heads on 2 KV heads, head_dim 32 where hidden size / heads is 12 or 16; the head is its own."""
    common = {
        "vocab_size": vocabulary, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if family == "llama":
        own = {"rope_parameters": LLAMA3_ROPE, "bos_token_id": 0, "eos_token_id": 1}
        return LlamaConfig(**{**common, **own, **changes})
    own = {"rope_parameters": QWEN_ROPE, "use_sliding_window": False, "bos_token_id": None, "eos_token_id": 0}
    kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    return kind(**{**common, **own, **changes})


def save_model(folder: Path, config, tokenizer, seed: int, *, shard: str = SHARD) -> Path:
    """A model with random weights in bfloat16 as a Hugging Face folder of several safetensors files, with its tokenizer."""
    model = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name:  # the norms of queries and keys are nowhere near one in trained models
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
            else:  # biases of queries, keys and values too
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return folder


def save_pair(folder: Path, family: str, texts: list[str], **changes) -> dict[str, Path]:
    """`target` and `source` of one cache shape and tokenizer, of hidden sizes 64 and 48. Qwen3's source ties its embeddings."""
    tokenizer = byte_tokenizer(texts, bos=family == "llama")
    vocabulary = changes.pop("vocab_size", len(tokenizer))
    tied = {"tie_word_embeddings": True} if family == "qwen3" else {}
    return {
        "target": save_model(folder / "target", config_of(family, 64, vocabulary, **changes), tokenizer, 1),
        "source": save_model(
            folder / "source", config_of(family, 48, vocabulary, **tied, **changes), tokenizer, 2
        ),
    }


def save_wikitext(folder: Path, counts: dict[str, int], *, sentences: int = 60) -> Path:
    """A folder laid out as Salesforce/wikitext: one line per row, blank ones too, articles and sections under headings."""
    for number, (split, count) in enumerate(counts.items()):
        lines = []
        for index, article in enumerate(generated_articles(count, sentences, seed=number)):
            lines += [
                "",
                f" = {split.capitalize()} {index} = \n",
                "",
                *_lines(article, " = = History = = \n"),
            ]
        _save(folder / "wikitext-103-raw-v1" / f"{split}-00000-of-00001.parquet", {"text": lines})
    splits = {split: f"wikitext-103-raw-v1/{split}-*" for split in counts}
    return _card(folder, "wikitext-103-raw-v1", splits)


def save_fineweb(folder: Path, count: int, *, sentences: int = 120) -> Path:
    """A folder laid out as HuggingFaceFW/fineweb: one page per row with what is known of it; every other one is short."""
    long = [article.text for article in generated_articles(count, sentences, seed=9)]
    texts = [text if n % 2 else text[:200] for n, text in enumerate(long)]
    rows = range(count)
    columns = {
        "text": texts, "id": [f"<urn:uuid:{n}>" for n in rows], "dump": ["CC-MAIN-2024-10"] * count,
        "url": [f"https://example.org/{n}" for n in rows], "date": ["2024-02-21T00:00:00Z"] * count,
        "file_path": ["s3://example"] * count, "language": ["en"] * count, "language_score": [0.9] * count,
        "token_count": [len(text) // 4 for text in texts],
    }  # fmt: skip
    _save(folder / "sample" / "10BT" / "000_00000.parquet", columns)
    return _card(folder, "sample-10BT", {"train": "sample/10BT/*"})


SIZES = {
    "partitions": {
        "window_tokens": 64, "screen_train": {"articles": 6, "items": 8}, "screen_validate": {"articles": 4, "items": 6},
        "confirm_train": {"articles": 6, "items": 8}, "confirm_validate": {"articles": 4, "items": 6},
        "final": {"articles": 6, "items": 8}, "latency": {"articles": 2, "items": 2},
    },
    "prompt": {"prefix_tokens": 24, "forced_steps": 8},
    "training": {"steps": 6, "prompts_per_step": 2, "min_prefix_tokens": 8},
    "screening": {"warmup_steps": 2, "checkpoints": [4, 6], "scales": [0.5, 1.0]},
    "evaluation": {"batch_prompts": 4, "gate_prefix_tokens": [24]},
    "latency": {
        "prefix_tokens": [32, 64, 256], "warmups": [1, 1, 1], "repetitions": [5, 3, 3], "cold_repetitions": [2, 2, 2],
        "pipeline_repetitions": [1, 1, 0],
    },
    "evidence": {"prefix_tokens": [8, 48], "prompts": [8, 4], "windows": [3, 8], "steps": [3, 6]},
}  # fmt: skip


def save_profile(folder: Path, base: str, pair: dict[str, Path], wikitext: Path, fineweb: Path) -> Path:
    """A profile file that extends a shipped one, with other sizes, counts and places and nothing else."""
    texts = {
        "test": {"id": str(wikitext), "min_characters": 1500, "keep": 8},
        "train": {"id": str(wikitext), "min_characters": 1500, "keep": 32},
        "web": {"id": str(fineweb), "min_characters": 1500, "keep": 3},
    }
    names = {"name": f"small-{base}", "label": f"small-{base}: a stand-in, a test and no result"}
    places = {"device": "cpu", "pair": {role: {"id": str(place)} for role, place in pair.items()}}
    whole = yaml.safe_load((DATA / "profiles" / f"{base}.yaml").read_text())
    if "extends" in whole:  # one level: the pair file's own keys are the places that are replaced here
        base = whole["extends"]
    path = folder / f"{names['name']}.yaml"
    path.write_text(yaml.safe_dump({"extends": base, **names, **places, "corpus": {"texts": texts}, **SIZES}))
    return path


def texts_of(wikitext: Path) -> list[str]:
    """Some of the training split's lines, for a tokenizer to be trained on."""
    path = next((wikitext / "wikitext-103-raw-v1").glob("train-*"))
    return datasets.Dataset.from_parquet(str(path), cache_dir=str(wikitext / ".cache"))["text"][:200]


def _lines(article: Article, heading: str) -> list[str]:
    """An article's rows: paragraphs end in a space and a line break, blank rows are empty, a section begins halfway."""
    rows = [f" {paragraph} \n" for paragraph in article.text.split("\n\n")]
    half = len(rows) // 2
    return [*rows[:half], "", heading, "", *rows[half:]]


def _save(path: Path, columns: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(path)


def _card(folder: Path, config: str, splits: dict[str, str]) -> Path:
    files = [{"split": split, "path": path} for split, path in splits.items()]
    card = yaml.safe_dump({"configs": [{"config_name": config, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")
    return folder
