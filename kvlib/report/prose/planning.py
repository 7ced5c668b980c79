"""What the page about running on a GPU says of a plan."""

from kvlib.report import wording
from kvlib.study.plan import Plan
from kvlib.study.plan.rows import size


def plan_facts(plans: dict[str, Plan]) -> dict[str, str]:
    """Strings by the key under which the page asks for them; the first card is the one that the study used.

    label: the planned profile's. downloads, disk: in bytes. time: on the first card. longest: its longest stage. verdicts:
    one sentence per card. command: the planned profile's name, as the commands take it.
    """
    first = next(iter(plans.values()))
    longest = max(first.stages, key=lambda stage: stage.seconds)
    kept = sum(stage.kept_bytes for stage in first.stages)
    return {
        "label": first.profile.label,
        "downloads": size(sum(one.bytes for one in first.downloads)),
        "disk": size(kept),
        "card": first.device.name,
        "time": wording.duration(first.seconds),
        "longest": longest.stage.replace("_", " "),
        "longest_time": wording.duration(longest.seconds),
        "verdicts": " ".join(f"{plan.verdict[0].upper()}{plan.verdict[1:]}." for plan in plans.values()),
    }
