"""What transformers' `generate` may be asked on a handed-over cache: each check refuses in one sentence, or passes."""

import copy
import operator

from kvlib import guards
from kvlib.errors import KvlibError

OURS = ("attention_mask", "position_ids", "inputs_embeds", "inputs", "cache", "past_key_values", "use_cache")
OTHER_CACHES = (
    "assistant_model", "assistant_tokenizer", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
    "cache_implementation",
)  # fmt: skip
LENGTHS = ("max_new_tokens", "max_length")


def check_asked(model, tokens: int, asked: dict) -> None:
    """Raises KvlibError unless `generate` can do what the keywords `asked` say after a cache of `tokens` positions.

    A generation configuration counts, the one among the keywords and the model's own.
    """
    if taken := sorted(set(asked) & set(OURS)):
        raise KvlibError(
            f"{taken[0]}= given to `generate`, expected the handoff to set it from the cache: leave it out"
        )
    for name in OTHER_CACHES:
        if _effective(model, asked, name):
            raise KvlibError(
                f"{name} asked of `generate`, expected plain decoding on the handed-over cache: leave it out, of a generation "
                "configuration as well"
            )
    for name in LENGTHS:
        _check_whole(name, _effective(model, asked, name))
    _check_room(model, tokens, asked)


def keeping_cache(asked: dict) -> dict:
    """The keywords, so that `generate` reads on from its cache whatever a generation configuration says of `use_cache`.

    Without, every step would read the whole text again, after a prefix that holds it already. A `max_length` of None is
    left out: transformers counts with it.
    """
    kept = {name: value for name, value in asked.items() if name != "max_length" or value is not None}
    settings = kept.get("generation_config")
    if settings is None:
        return {**kept, "use_cache": True}
    settings = copy.deepcopy(settings)  # theirs; as a keyword beside it transformers would warn
    settings.use_cache = True
    return {**kept, "generation_config": settings}


def _effective(model, asked: dict, name: str):
    """A setting as `generate` takes it: a keyword, else the configuration given, else the model's own, else None."""
    if name in asked and (asked[name] is not None or name != "max_length"):
        return asked[name]
    for settings in (asked.get("generation_config"), model.generation_config):
        if (value := getattr(settings, name, None)) is not None:
            return value
    return None


def _check_whole(name: str, value) -> None:
    if value is None:
        return
    try:
        whole = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1:
        raise KvlibError(
            f"{name}={value!r} asked of `generate`, expected a whole number of 1 or more: write {name}=32 for example"
        )


def _check_room(model, tokens: int, asked: dict) -> None:
    # Without either, transformers chooses a number itself and stays within the positions.
    longest = _effective(model, asked, "max_length")
    new = _effective(model, asked, "max_new_tokens") or (longest - tokens - 1 if longest else 1)
    if new < 1:
        raise KvlibError(
            f"max_length={longest} asked of `generate` for a prompt of {tokens + 1} tokens, expected more than those: give a "
            "larger one, or max_new_tokens="
        )
    limit = guards.position_limit(model)
    if limit is not None and tokens + new > limit:
        raise KvlibError(
            f"{new} new tokens asked after {tokens} positions, the model has {limit}: ask for fewer, or cut the prompt"
        )
