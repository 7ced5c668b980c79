"""Profiles: what a run is made of, validated at the door."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from kvlib.errors import KvlibError, suggestion
from kvlib.study.inputs import (
    Count,
    DatasetCorpus,
    DatasetText,
    GeneratedCorpus,
    GgufModel,
    HubModel,
    Name,
    Pair,
    PrunedModel,
    RandomModel,
    Seed,
    Share,
    Strict,
    WikipediaCorpus,
)
from kvlib.study.names import DATA, profile_names
from kvlib.study.yaml_files import describe_error, flat, load_yaml, merge, override
from kvlib.ways import WAYS

# Models and texts have a file of their own; other files know them from here.
__all__ = [
    "DATA",
    "DatasetCorpus",
    "DatasetText",
    "GeneratedCorpus",
    "GgufModel",
    "HubModel",
    "Pair",
    "Partition",
    "Profile",
    "PrunedModel",
    "RandomModel",
    "WikipediaCorpus",
    "load_profile",
    "profile_names",
]

EXTENDS = "extends"


class Partition(Strict):
    """`items` windows, prompts or prefixes drawn from `articles` articles that no other partition uses.

    text: which of the corpus's texts they are drawn from, where it has several by name.
    """

    articles: Count
    items: Count
    text: Name | None = None


class Partitions(Strict):
    """build: what the source is pruned on; not drawn, and best left out, where nothing is pruned."""

    window_tokens: Annotated[int, Field(ge=2)]
    build: Partition | None = None
    screen_train: Partition
    screen_validate: Partition
    confirm_train: Partition
    confirm_validate: Partition
    final: Partition
    latency: Partition


class Prompt(Strict):
    prefix_tokens: Annotated[int, Field(ge=2)]
    forced_steps: Count


class Training(Strict):
    """dtype `auto` is bfloat16 where the processor or card computes in it, else float32.

    micro_batch: prompts per forward and backward pass, all of a step's when None; the gradient is the whole step's.
    checkpoint_activations: the target's layers are computed again in the backward pass, which saves their memory.
    """

    steps: Count
    prompts_per_step: Count
    micro_batch: Count | None = None
    checkpoint_activations: bool = False
    min_prefix_tokens: Annotated[int, Field(ge=2)]
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    cache_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    seed: Seed = 0


class Screening(Strict):
    learning_rates: Annotated[list[Share], Field(min_length=3, max_length=3)]
    ranks: Annotated[list[Count], Field(min_length=2)]
    centre_rank: Count
    warmup_steps: Count
    ridge_penalty: Share = 1e-3
    arms: Annotated[list[str], Field(min_length=1)] | None = None
    select: Count
    checkpoints: Annotated[list[Count], Field(min_length=1)]
    scales: Annotated[list[Share], Field(min_length=1)]
    finalists: Count


class Confirmation(Strict):
    seeds: Annotated[list[Seed], Field(min_length=1)]


class Evaluation(Strict):
    batch_prompts: Count
    forcings: Annotated[list[Literal["oracle", "text"]], Field(min_length=1)]
    gate_tolerance: Share
    gate_prefix_tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]


class Latency(Strict):
    """Counts are per length. modes: the learned map's other ways, timed beside the paths. breakdown: whether the shortest
    and the longest step are taken apart. native_repetitions: of native prefill, as `repetitions` when empty.
    pipeline_repetitions: of the cold pipeline, none when empty."""

    prefix_tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    warmups: list[Annotated[int, Field(ge=0)]]
    repetitions: list[Count]
    native_repetitions: list[Count] = []
    cold_repetitions: list[Annotated[int, Field(ge=0)]]
    memory: bool = True
    modes: list[Literal[WAYS]] = ["materialised", "in_place", "background"]
    breakdown: bool = True
    pipeline_repetitions: list[Annotated[int, Field(ge=0)]] = []


class Evidence(Strict):
    """What is asked of the frozen map after the final evaluation. `prompts` is per length, in the order of `prefix_tokens`.

    windows: how many of confirm_train's a training sees; steps: where the training on all of them is looked at. All
    windows and the last step are always among them, and counts that the run does not have are left out.
    """

    prefix_tokens: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)]
    prompts: list[Count]
    windows: Annotated[list[Count], Field(min_length=1)]
    steps: Annotated[list[Count], Field(min_length=1)]


class Profile(Strict):
    """device `auto` is the first CUDA device where there is one, else the processor."""

    name: Name
    label: str
    seed: Seed
    device: Literal["auto", "cpu", "cuda"] = "auto"
    pair: Pair
    corpus: Annotated[WikipediaCorpus | GeneratedCorpus | DatasetCorpus, Field(discriminator="kind")]
    partitions: Partitions
    prompt: Prompt
    training: Training
    screening: Screening
    confirmation: Confirmation
    evaluation: Evaluation
    latency: Latency
    evidence: Evidence

    @model_validator(mode="after")
    def _texts(self):
        if isinstance(self.pair.source, PrunedModel) and self.partitions.build is None:
            raise ValueError("partitions.build is missing, but pair.source is pruned on it: add it")
        known = list(self.corpus.texts) if isinstance(self.corpus, DatasetCorpus) else [None]
        for name, part in self.partitions:
            if isinstance(part, Partition) and part.text not in known:
                raise ValueError(
                    f"partitions.{name}.text is {part.text}, expected "
                    + (
                        f"one of corpus.texts = {known}"
                        if known != [None]
                        else "none: this corpus has one text"
                    )
                )
        return self

    @model_validator(mode="after")
    def _evidence(self):
        for name in ("prefix_tokens", "windows", "steps"):
            values = getattr(self.evidence, name)
            if sorted(set(values)) != values:
                raise ValueError(
                    f"evidence.{name} is {values}, expected different counts, the smallest first"
                )
        if len(self.evidence.prompts) != len(self.evidence.prefix_tokens):
            raise ValueError(
                f"evidence.prompts has {len(self.evidence.prompts)} entries, expected {len(self.evidence.prefix_tokens)}, one for "
                "each of evidence.prefix_tokens"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self):
        window, prompt = self.partitions.window_tokens, self.prompt
        if self.training.min_prefix_tokens + prompt.forced_steps > window:
            raise ValueError(
                f"partitions.window_tokens is {window}, expected at least training.min_prefix_tokens + prompt.forced_steps"
                f" = {self.training.min_prefix_tokens + prompt.forced_steps}"
            )
        late = [c for c in self.screening.checkpoints if c > self.training.steps]
        if late:
            raise ValueError(
                f"screening.checkpoints holds {late[0]}, expected at most training.steps = {self.training.steps}"
            )
        if self.screening.warmup_steps >= self.training.steps:
            raise ValueError(
                f"screening.warmup_steps is {self.screening.warmup_steps}, expected less than training.steps = {self.training.steps}"
            )
        lists = {
            f"screening.{name}": getattr(self.screening, name)
            for name in ("learning_rates", "ranks", "scales", "checkpoints")
        }
        lists |= {
            "confirmation.seeds": self.confirmation.seeds,
            "evaluation.forcings": self.evaluation.forcings,
            "latency.modes": self.latency.modes,
        }
        for name, values in lists.items():
            if len(set(values)) != len(values):
                raise ValueError(f"{name} is {values}, expected different values")
        if self.screening.centre_rank not in self.screening.ranks:
            raise ValueError(
                f"screening.centre_rank is {self.screening.centre_rank}, expected one of screening.ranks = {self.screening.ranks}"
            )
        if self.screening.finalists > self.screening.select:
            raise ValueError(
                f"screening.finalists is {self.screening.finalists}, expected at most screening.select = {self.screening.select}"
            )
        for name in ("screen_validate", "confirm_validate", "final"):
            if getattr(self.partitions, name).items < 2:
                raise ValueError(
                    f"partitions.{name}.items is 1, expected at least 2: a standard error needs two prompts"
                )
        lengths = self.latency.prefix_tokens
        if sorted(set(lengths)) != lengths:
            raise ValueError(
                f"latency.prefix_tokens is {lengths}, expected different lengths, shortest first"
            )
        optional = [n for n in ("native_repetitions", "pipeline_repetitions") if getattr(self.latency, n)]
        for name in ["warmups", "repetitions", "cold_repetitions", *optional]:
            if len(getattr(self.latency, name)) != len(lengths):
                raise ValueError(
                    f"latency.{name} has {len(getattr(self.latency, name))} entries, expected {len(lengths)}, one for each of "
                    "latency.prefix_tokens"
                )
        if (
            isinstance(self.pair.target, RandomModel)
            and max(self.screening.ranks) > self.pair.target.head_dim
        ):
            raise ValueError(
                f"screening.ranks holds {max(self.screening.ranks)}, expected at most head_dim = {self.pair.target.head_dim}"
            )
        return self


def _move_checkpoints(values: dict, planned: int) -> None:
    """Where fewer steps than `planned` leave checkpoints behind the end, put all of them at the same shares of the steps."""
    steps, checkpoints = values["training"]["steps"], values.get("screening", {}).get("checkpoints")
    numbers = [planned, steps, *checkpoints] if isinstance(checkpoints, list) and checkpoints else [None]
    if all(type(n) is int and n > 0 for n in numbers) and steps < max(checkpoints) <= planned:
        moved = {max(1, round(step * steps / planned)) for step in checkpoints}
        values["screening"]["checkpoints"] = sorted(moved)


def load_profile(name: str, overrides: dict | None = None) -> Profile:
    """A profile by name (data/profiles/NAME.yaml) or by path.

    A file that says `extends: OTHER` holds only what differs from the shipped profile of that name.

    Args:
        overrides: values by dotted key, such as {"training.steps": 40}; keys must exist, values are validated. Steps that
            end before a checkpoint take the checkpoints along, unless these are given as well.

    Raises: KvlibError, one sentence, for an unknown name, key or a value that does not fit.
    """
    values, given = _values(name), overrides or {}
    training = values.get("training")
    planned = training.get("steps") if isinstance(training, dict) else None
    for key, value in given.items():
        override(values, key, value)
    if "training.steps" in given and "screening.checkpoints" not in given:
        _move_checkpoints(values, planned)
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        unknown = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "extra_forbidden"]
        known = [key for key in flat(values) if key not in given]
        near = suggestion(unknown[0], known) if unknown and unknown[0] in given else ""
        raise KvlibError(f"profile {name}: {describe_error(error)}{near}") from error


def _values(name: str) -> dict:
    by_path = name.endswith((".yaml", ".yml"))
    unknown = KvlibError(
        f"profile {name!r} given, expected one of {', '.join(profile_names())} or a path to a YAML file{suggestion(name, profile_names())}"
    )
    if not by_path and name not in profile_names():
        raise unknown
    try:
        values = load_yaml(Path(name) if by_path else DATA / "profiles" / f"{name}.yaml")
    except FileNotFoundError as error:
        raise unknown from error
    if EXTENDS not in values:
        return values
    base, whole = values.pop(EXTENDS), [each for each in profile_names() if not _extends(each)]
    if base not in whole:
        raise KvlibError(
            f"profile {name}: extends is {base!r}, expected one of {', '.join(whole)}, which extend no other: correct the name"
        )
    missing = [key for key in ("name", "label") if key not in values]
    if missing:
        raise KvlibError(
            f"profile {name}: key {missing[0]!r} is missing, which is not taken over from {base}: add it"
        )
    return merge(_values(base), values)


def _extends(name: str) -> bool:
    return EXTENDS in load_yaml(DATA / "profiles" / f"{name}.yaml")
