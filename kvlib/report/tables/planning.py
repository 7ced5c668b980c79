"""Tables of a plan: what each stage takes on a card, what is downloaded, and which cards it fits."""

import pandas as pd

from kvlib.report import wording
from kvlib.study.plan import Plan
from kvlib.study.plan.devices import GIB
from kvlib.study.plan.rows import STAGE_COLUMNS, size, stage_rows
from kvlib.study.run import NOTEBOOKS


def plan_stages(plan: Plan) -> pd.DataFrame:
    """A row per stage, the sum last; what is done already is left out, since a page is for any machine."""
    table = pd.DataFrame(stage_rows(plan), columns=STAGE_COLUMNS).drop(columns="state")
    return table.replace(" ", wording.SPACE, regex=True)


def plan_memory(plan: Plan) -> pd.DataFrame:
    """Each stage's worst moment by what the memory is for, in GiB."""
    parts = ("weights", "caches", "activations", "logits", "optimiser")
    rows = [
        (NOTEBOOKS[s.stage], s.peak.phase, *(round(getattr(s.peak, part) / GIB, 2) for part in parts))
        for s in plan.stages
    ]
    return pd.DataFrame(rows, columns=["notebook", "moment", *parts])


def plan_downloads(plan: Plan) -> pd.DataFrame:
    rows = [(one.name, size(one.bytes)) for one in plan.downloads]
    return pd.DataFrame(rows, columns=["download", "size"])


def plan_cards(plans: dict[str, Plan]) -> pd.DataFrame:
    """A row per card, by the name that the command knows it by."""
    rows = [
        (
            name,
            plan.device.name,
            f"{plan.device.memory / GIB:.1f} GiB",
            f"{max(stage.peak.total for stage in plan.stages) / GIB:.1f} GiB",
            "yes" if plan.fits else "not as it is",
            wording.duration(plan.seconds),
            plan.device.source,
        )
        for name, plan in plans.items()
    ]
    columns = [
        "name",
        "card",
        "memory",
        "needed at the worst moment",
        "fits",
        "estimated time",
        "figures from",
    ]
    return pd.DataFrame(rows, columns=columns)
