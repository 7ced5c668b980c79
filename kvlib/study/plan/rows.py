"""A plan as rows of a table, for a terminal or a page."""

from kvlib.study.display import duration
from kvlib.study.plan.devices import GIB
from kvlib.study.plan.making import Plan, StagePlan
from kvlib.study.run import NOTEBOOKS

STAGE_COLUMNS = ("notebook", "state", "disk", "device memory", "at its worst", "operations", "time")
DOWNLOAD_COLUMNS = ("download", "size", "state")
PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def stage_rows(plan: Plan) -> list[tuple]:
    """`STAGE_COLUMNS` for every stage, then what is still to be done in all."""
    total = ("in all", "", size(plan.disk_bytes), _memory(max(s.peak.total for s in plan.stages)), "",
             operations(sum(s.flop for s in plan.stages if s.done_s is None)), duration(plan.seconds))  # fmt: skip
    return [*(_row(stage) for stage in plan.stages), total]


def _row(stage: StagePlan) -> tuple:
    state = "to do" if stage.done_s is None else f"done in {duration(stage.done_s)}"
    time = duration(stage.seconds) if stage.done_s is None else ""
    peak = stage.peak
    return (
        NOTEBOOKS[stage.stage], state, size(stage.kept_bytes), _memory(peak.total), peak.phase, operations(stage.flop), time,
    )  # fmt: skip


def download_rows(plan: Plan) -> list[tuple]:
    """`DOWNLOAD_COLUMNS`."""
    return [(one.name, size(one.bytes), "here" if one.here else "to download") for one in plan.downloads]


def _memory(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def size(count: float) -> str:
    """`64 GB`, `1.5 MB`, in powers of ten as disks are sold."""
    return f"{_scaled(count)}B" if count else "–"


def operations(count: float) -> str:
    """`81 P`: 10¹⁵ floating-point operations."""
    return _scaled(count).strip()


def _scaled(count: float) -> str:
    power = 0
    while count >= 1000 and power < len(PREFIXES) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} {PREFIXES[power]}" if count >= 10 else f"{count:.1f} {PREFIXES[power]}"
