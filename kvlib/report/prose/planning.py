"""What the page about running on a GPU says of a plan."""

from kvlib.report import wording
from kvlib.study.plan import Plan
from kvlib.study.plan.rows import size


def plan_facts(plans: dict[str, Plan]) -> dict[str, str]:
    """Strings by the key under which the page asks for them; the first card is the one that the study used.

    downloads, disk: bytes. card, time, longest, longest_time: the first card, all stages on it, the longest of them.
    verdicts: one sentence per card.
    """
    first = next(iter(plans.values()))
    longest = max(first.stages, key=lambda stage: stage.seconds)
    kept = sum(stage.kept_bytes for stage in first.stages)
    return {
        "downloads": size(sum(one.bytes for one in first.downloads)),
        "disk": size(kept),
        "card": first.device.name,
        "time": wording.duration(first.seconds),
        "longest": longest.stage.replace("_", " "),
        "longest_time": wording.duration(longest.seconds),
        "verdicts": " ".join(f"{plan.verdict[0].upper()}{plan.verdict[1:]}." for plan in plans.values()),
    }
