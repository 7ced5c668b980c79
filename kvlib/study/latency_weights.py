"""How much each part of the latency stage weighs in its progress: about milliseconds on two cores."""

from kvlib.latency import Round
from kvlib.study.profile import Latency

BROKEN_DOWN, BREAKDOWN_REPETITIONS = ("direct", "learned"), 5


def has_pipeline(config: Latency, index: int) -> bool:
    """Whether the cold pipeline is measured at this length."""
    return bool(config.pipeline_repetitions) and config.pipeline_repetitions[index] > 0


def units(name: str, residency: str, tokens: int) -> float:
    """Weights, so that the time left can be told: about milliseconds on two cores.

    A prefill grows with the square of the length in the end; one token over a cache hardly grows at all.
    """
    prefill, one_token = tokens * (1.1 + tokens / 3800), 60 + tokens / 50
    if name == "native":
        return prefill
    return {"prefill": 0.8 * prefill, "resident": one_token, "cold": 0.8 * prefill + one_token}[residency]


def length_units(rounds: list[Round], tokens: int) -> float:
    clocks = [units(path.name, residency, tokens) for one in rounds for path, residency, _ in one.clocks]
    return sum(clocks)


def caches_units(config: Latency, prefixes: int) -> float:
    return prefixes * units("source", "prefill", max(config.prefix_tokens))


def breakdown_units(tokens: int) -> float:
    return len(BROKEN_DOWN) * (BREAKDOWN_REPETITIONS + 1) * 5 * units("", "resident", tokens)


def pipeline_units(config: Latency, index: int) -> float:
    if not has_pipeline(config, index):
        return 0.0
    tokens, runs = config.prefix_tokens[index], config.pipeline_repetitions[index] + 1
    return runs * (2 * units("", "cold", tokens) + units("", "resident", tokens))


def probe_units(name: str, tokens: int) -> float:
    return 1000 + units(name, "resident", tokens)
