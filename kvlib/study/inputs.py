"""What a run takes in, as a profile names it: models and texts."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[
    int, Field(ge=0, le=2**32 - 1)
]  # what every generator takes, and room for those derived from it
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Strict(BaseModel):
    """Unknown keys are refused, values are not coerced, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class GgufModel(Strict):
    """A model in a GGUF file that a package's wheel carries (a name in data/assets.yaml)."""

    kind: Literal["gguf"]
    asset: str


class RandomModel(Strict):
    """A Llama with random weights, for tests. `spread` is the standard deviation of its weights."""

    kind: Literal["random"]
    layers: Count
    hidden_size: Count
    intermediate_size: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    max_positions: Count
    spread: Share = 0.2

    @model_validator(mode="after")
    def _shape(self):
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"heads is {self.heads}, kv_heads {self.kv_heads} and head_dim {self.head_dim}, expected heads to be a multiple of "
                "kv_heads and head_dim to be even"
            )
        return self


class HubModel(Strict):
    """A model on the hub, or a local folder that holds one. revision: a branch, tag or commit; the newest when None."""

    kind: Literal["hub"]
    id: Annotated[str, Field(min_length=1)]
    revision: str | None = None


class PrunedModel(Strict):
    """The target, width-pruned on the build partition's windows."""

    kind: Literal["pruned"]
    hidden_size: Count
    intermediate_size: Count
    penalty: Share = 1e-2


class Pair(Strict):
    target: Annotated[GgufModel | RandomModel | HubModel, Field(discriminator="kind")]
    source: Annotated[PrunedModel | HubModel, Field(discriminator="kind")]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class WikipediaCorpus(Strict):
    """A MediaWiki dump (a name in data/assets.yaml)."""

    kind: Literal["wikipedia"]
    asset: str
    min_characters: Count


class GeneratedCorpus(Strict):
    kind: Literal["generated"]
    articles: Count
    sentences: Count


class DatasetText(Strict):
    """Documents of one split of a data set on the hub, or of a local folder in the same layout.

    layout: `documents` has one document per row; `wikitext` has one line per row, and articles begin at their headings.
    column: holds the text. title: the column that names a document, its number when None (not for `wikitext`).
    min_characters: shorter documents are passed over. keep, read_at_most: reading stops at so many documents.
    streaming: rows come over the network as they are read; otherwise the data set is downloaded whole and kept.
    """

    id: Annotated[str, Field(min_length=1)]
    config: str | None = None
    revision: str | None = None
    split: str
    layout: Literal["documents", "wikitext"] = "documents"
    column: str = "text"
    title: str | None = None
    min_characters: Count
    keep: Count
    read_at_most: Count
    streaming: bool = True
    licence: str


class DatasetCorpus(Strict):
    """Texts by name. A document that an earlier text has, by its title or its words, is left out of a later one."""

    kind: Literal["datasets"]
    texts: Annotated[dict[Name, DatasetText], Field(min_length=1)]
