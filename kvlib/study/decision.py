"""The decision rule, written down before a run, and what it says of a final evaluation."""

from pathlib import Path

from kvlib.study.profile import DATA
from kvlib.study.records import sha256_file
from kvlib.study.statistics import normal_interval

DECISION_RULE = DATA / "decision_rule.md"
SIGNIFICANCE = 0.05
NOISE_FACTOR = 10
CONTENT_SHARE = 0.5
CRITERIA = (
    "normal interval",
    "bootstrap interval",
    "interval clustered by article",
    "Wilcoxon test after Holm",
)
EMPTY_CONTROLS = ("other_prompt", "random_moments", "zeros")


def decision_rule_hash(path: Path = DECISION_RULE) -> str:
    return sha256_file(path)


def decide(forcing: dict) -> dict:
    """The rule applied to one forcing's results (`frozen_evaluation/summary.json`, "forcing", the oracle's).

    Returns: {"verdict": "improves" | "harms" | "undecided", "criteria": {name: bool | None},
        "needs_content": bool | None, "content": {name: bool | None}, "exceeds_noise": bool | None,
        "content_share": how much of the gain a map trained on other prompts' caches recovers}. None: not measured.
    """
    learned = forcing["paired"]["learned-direct"]
    below, above = _criteria(learned, -1), _criteria(learned, 1)
    verdict = "improves" if all(below.values()) else "harms" if all(above.values()) else "undecided"
    content, share = _content(forcing)
    noise = (forcing.get("noise", {}).get("native_two_parts") or {}).get("kl32", {}).get("mean")
    gain = None if learned["mean"] is None else -learned["mean"]
    return {
        "verdict": verdict,
        "criteria": above if verdict == "harms" else below,
        "needs_content": None if None in content.values() else all(content.values()),
        "content": content,
        "content_share": share,
        "exceeds_noise": None if noise is None or gain is None else gain > NOISE_FACTOR * abs(noise),
    }


def _criteria(paired: dict, sign: int) -> dict[str, bool]:
    """Each criterion in the direction of `sign`; one that could not be computed does not hold."""
    clustered = None
    if paired["mean"] is not None and paired.get("se_clustered") is not None:
        clustered = normal_interval(paired["mean"], paired["se_clustered"])
    p = paired.get("wilcoxon_p_holm")
    held = (
        _beyond(paired.get("ci95"), sign),
        _beyond(paired.get("bca95"), sign),
        _beyond(clustered, sign),
        p is not None and p < SIGNIFICANCE and paired["mean"] * sign > 0,
    )
    return dict(zip(CRITERIA, held, strict=True))


def _beyond(interval: list[float] | None, sign: int) -> bool:
    return interval is not None and min(sign * bound for bound in interval) > 0


def _content(forcing: dict) -> tuple[dict[str, bool | None], float | None]:
    controls, paths = forcing.get("controls", {}), forcing["paths"]
    mean = {name: paths[name]["kl32"]["mean"] for name in ("direct", "learned")}

    def kl(name: str) -> float | None:
        return (controls.get(name) or {}).get("kl32", {}).get("mean")

    found: dict[str, bool | None] = {}
    for name in EMPTY_CONTROLS:
        entry = controls.get(name)
        found[name] = None if entry is None else _beyond(entry["paired"].get("ci95"), 1)
    permuted, trained = kl("learned_heads_permuted"), kl("wrong_trained")
    found["learned_heads_permuted"] = None if permuted is None else permuted > mean["learned"]
    gain, share = mean["direct"] - mean["learned"], None
    if trained is not None and gain > 0:
        share = (mean["direct"] - trained) / gain
    found["wrong_trained"] = None if share is None else share < CONTENT_SHARE
    return found, share
