"""A model's shape, from which its bytes and operations follow: read from a profile, a folder, a cache or data/shapes.yaml."""

from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import AutoConfig

from kvlib.errors import KvlibError
from kvlib.pair import first_line
from kvlib.study.hub import check_files, local_folder
from kvlib.study.profile import DATA
from kvlib.study.run import home

SHAPES_FILE = DATA / "shapes.yaml"
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
WORDS = 50  # in the vocabulary of made-up text, about: its tokenizer is made from it


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated MLPs. tied: one matrix serves as embedding and head. stored: number format of its weight files.

    biases: of the query, key and value projections. head_norms: of queries and keys.
    """

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool = False
    stored: str = "float32"
    biases: bool = False
    head_norms: bool = False

    @property
    def qkv(self) -> int:
        """Parameters of one layer's query, key and value matrices."""
        return self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer(self) -> int:
        """Parameters of one layer's matrices."""
        return self.qkv + self.heads * self.head_dim * self.hidden + 3 * self.hidden * self.mlp

    @property
    def head(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        vectors = 2 * self.hidden + self.biases * (self.heads + 2 * self.kv_heads) * self.head_dim
        vectors += self.head_norms * 2 * self.head_dim
        return self.layers * (self.layer + vectors) + self.hidden + (1 if self.tied else 2) * self.head

    def weight_bytes(self, dtype: str) -> int:
        return self.parameters * SIZES[dtype]

    def cache_bytes(self, prompts: int, tokens: int, dtype: str) -> int:
        """Keys and values of `prompts` × `tokens` positions."""
        return 2 * self.layers * self.kv_heads * self.head_dim * prompts * tokens * SIZES[dtype]


def known_shapes(path: Path = SHAPES_FILE) -> dict[str, ModelShape]:
    """Hub id -> shape, of the models in data/shapes.yaml."""
    entries = yaml.safe_load(Path(path).read_text("utf-8"))["models"]
    return {
        name: ModelShape(name, **{k: v for k, v in fields.items() if k != "source"})
        for name, fields in entries.items()
    }


def shape_of(pair, role: str) -> ModelShape:
    """The shape of a profile's `target` or `source`. pair: the profile's.

    Raises: KvlibError for a hub id that neither data/shapes.yaml nor this machine knows, and for a folder of no model.
    """
    model = getattr(pair, role)
    kinds = {"hub": _hub, "gguf": _gguf, "random": _random}
    if model.kind == "pruned":
        return _pruned(model, shape_of(pair, "target"))
    if model.kind not in kinds:
        raise KvlibError(
            f"pair.{role} is of kind {model.kind!r}, expected one of {', '.join([*kinds, 'pruned'])}: plan another profile"
        )
    return kinds[model.kind](model)


def shape_of_config(config, name: str) -> ModelShape:
    """The shape that a transformers configuration states."""
    try:
        heads = config.num_attention_heads
        return ModelShape(
            name, config.hidden_size, config.intermediate_size, config.num_hidden_layers, heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.vocab_size, config.max_position_embeddings, bool(config.tie_word_embeddings),
            str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
            biases=bool(getattr(config, "attention_bias", config.model_type == "qwen2")),
            head_norms=config.model_type == "qwen3",
        )  # fmt: skip
    except AttributeError as error:
        raise KvlibError(
            f"{name} given, whose configuration names no {error.name}, expected a decoder-only language model: plan for another"
        ) from error


def _hub(model) -> ModelShape:
    folder = local_folder(model.id, home())
    is_folder = folder is not None
    if is_folder:
        check_files(folder)
    try:
        config = AutoConfig.from_pretrained(
            folder or model.id, revision=model.revision, local_files_only=True
        )
        return shape_of_config(config, model.id)
    except (OSError, ValueError) as error:
        known = {} if is_folder else known_shapes()
        if model.id in known:
            return known[model.id]
        remedy = (
            "restore its config.json"
            if is_folder
            else f"download it first (`hf download {model.id} config.json`), give a local folder, or add it to data/shapes.yaml"
        )
        raise KvlibError(
            f"the shape of {model.id} is not known here, expected a folder, a downloaded model or one of "
            f"{', '.join(known_shapes())}: {remedy} ({first_line(error)[:80]})"
        ) from error


def _gguf(model) -> ModelShape:
    known = known_shapes()
    if model.asset not in known:
        raise KvlibError(
            f"the shape of asset {model.asset!r} is not known, expected one that data/shapes.yaml lists: add it there"
        )
    return known[model.asset]


def _random(model) -> ModelShape:
    return ModelShape(
        "random weights", model.hidden_size, model.intermediate_size, model.layers, model.heads, model.kv_heads,
        model.head_dim, WORDS, model.max_positions,
    )  # fmt: skip


def _pruned(model, target: ModelShape) -> ModelShape:
    return ModelShape(
        f"{target.name}, pruned", model.hidden_size, model.intermediate_size, target.layers, target.heads,
        target.kv_heads, target.head_dim, target.vocabulary, target.positions,
    )  # fmt: skip
