"""Where a run stands: for every stage whether it is done, what is out of date and why, and how long it takes."""

from dataclasses import dataclass

from kvlib.errors import KvlibError
from kvlib.study.folders import changed_file
from kvlib.study.records import read_record
from kvlib.study.run import EXTRA, MADE, NOTEBOOKS, OUTPUTS, STAGES, Run, read_summary
from kvlib.study.yaml_files import flat

DONE, TO_DO, BEGUN, STALE, DAMAGED = "done", "to do", "begun", "out of date", "damaged"
MEASURES_THE_FROZEN_MAP = ("frozen_evaluation", "latency", *EXTRA)
MOST_REASONS = 3


@dataclass(frozen=True)
class Standing:
    """One stage. seconds: what it took, or has taken so far; None where nothing says so. why: in words, when not done."""

    stage: str
    state: str
    seconds: float | None
    why: str = ""


def standings(run: Run) -> list[Standing]:
    """Every stage of the sequence, and those outside it that were begun."""
    begun = [stage for stage in EXTRA if run.stage(stage).exists()]
    return [standing(run, stage) for stage in (*STAGES, *begun)]


def standing(run: Run, stage: str) -> Standing:
    """Raises KvlibError, with its file's name, where a record is damaged."""
    folder = run.stage(stage)
    if not (folder / "summary.json").exists():
        return Standing(stage, BEGUN if folder.exists() else TO_DO, run.spent(stage) or None)
    summary = read_summary(folder)
    missing = [name for name in OUTPUTS[stage] if not (folder / name).exists()]
    if missing:
        return Standing(stage, DAMAGED, summary["duration_s"], f"{missing[0]} is missing")
    if swapped := changed_file(folder, summary["files"]):
        why = f"{swapped.name} is not the file that its summary was written with"
        return Standing(stage, DAMAGED, summary["duration_s"], why)
    if summary["key"] != run.key(stage):
        changed = changes(summary.get("settings"), run.settings(stage))
        return Standing(stage, STALE, summary["duration_s"], changed)
    if stage in MEASURES_THE_FROZEN_MAP and summary.get("frozen") != frozen_hash(run):
        return Standing(stage, STALE, summary["duration_s"], "it measured another frozen map")
    return Standing(stage, DONE, summary["duration_s"])


def frozen_hash(run: Run) -> str | None:
    """The manifest's hash of the map that the run has frozen now."""
    if standing(run, "confirmation").state != DONE:
        return None
    return read_record(run.stage("confirmation") / "summary.json", "manifest_hash")["manifest_hash"]


def out_of_date(run: Run) -> list[str]:
    """What in the book of a run that is finished shows other settings than its present ones, in words.

    Raises: KvlibError, with the command that goes on, where the run is not finished or what it found is damaged.
    """
    said = []
    for one in (standing(run, stage) for stage in STAGES):
        name = NOTEBOOKS[one.stage]
        if one.state in (TO_DO, BEGUN, DAMAGED):
            what = f"{name} is {one.state}{': ' + one.why if one.why else ''}"
            first = (
                f"restore the file, or delete {run.stage(one.stage) / 'summary.json'} and " if one.why else ""
            )
            raise KvlibError(
                f"run {run.name} is not finished ({what}), expected every stage to be done: {first}"
                f"run `python -m kvlib run --profile {run.source} --run {run.name}`"
            )
        said += [f"{name}: {one.why}"] if one.state == STALE else []
    return said


def changes(before: dict | None, after: dict) -> str:
    """`training.steps was 100, is 40`, the first few of them. before: None where the record holds no settings."""
    if before is None:
        return "made with other settings, which its record does not name"
    old, new = flat(before), flat(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    said = [f"{name} was {_value(old, name)}, is {_value(new, name)}" for name in names[:MOST_REASONS]]
    more = len(names) - len(said)
    return "; ".join(said + ([f"{more} more"] if more > 0 else []))


def _value(values: dict, name: str) -> str:
    return str(values[name]) if name in values else "not there"


def same_elsewhere(run: Run, stage: str) -> tuple[str, float] | None:
    """(another run beside this one, its seconds) where it has finished the stage with the very same settings."""
    for made in sorted(run.folder.parent.glob(f"*/{stage}/{MADE}")):
        other = made.parents[1]
        if other == run.folder:
            continue
        try:
            key = read_record(made.parent / "summary.json", "key")["key"]
            if key == run.key(stage):
                return other.name, read_record(made, "duration_s")["duration_s"]
        except KvlibError:
            continue  # another run's damage is no business of this one
    return None
