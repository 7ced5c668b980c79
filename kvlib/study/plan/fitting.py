"""Whether a stage fits a device, and if not, which settings make it fit: the first that changes least."""

import itertools
from collections.abc import Callable, Iterator

from kvlib.study.plan.memory import Peak
from kvlib.study.profile import Profile
from kvlib.study.timing import times_the_source

Overrides = dict[str, object]


def worst(peaks: list[Peak]) -> Peak:
    return max(peaks, key=lambda peak: peak.total)


def smaller(profile: Profile, stage: str) -> Iterator[Overrides]:
    """Settings that lower a stage's peak, one after the other, those that leave the result as it is first."""
    halves = _halves(profile.evaluation.batch_prompts)
    batches = [{}, *({"evaluation.batch_prompts": n} for n in halves)]
    formats: list[Overrides] = [{}]
    if profile.pair.dtype == "float32":
        formats.append({"pair.dtype": "bfloat16"})
    if stage == "latency":
        lengths = profile.latency.prefix_tokens
        shorter = [{}, *({"latency.prefix_tokens": lengths[:n]} for n in range(len(lengths) - 1, 0, -1))]
        resident: list[Overrides] = [{}]
        if times_the_source(profile.latency):
            none = [0] * len(lengths)
            resident.append({"latency.cold_repetitions": none, "latency.pipeline_repetitions": none})
        choices = itertools.product(formats, shorter, resident)
    elif stage in ("screening", "confirmation"):
        pieces = _halves(profile.training.micro_batch or profile.training.prompts_per_step)
        steps: list[Overrides] = [{}, *({"training.micro_batch": n} for n in pieces)]
        again: list[Overrides] = [{}]
        if not profile.training.checkpoint_activations:
            again.append({"training.checkpoint_activations": True})
        choices = itertools.product(formats, again, steps, batches)
    else:
        choices = itertools.product(formats, batches)
    for chosen in choices:
        found = {key: value for part in chosen for key, value in part.items()}
        if found:
            yield found


def _halves(count: int) -> list[int]:
    found = []
    while count > 1:
        count = (count + 1) // 2
        found.append(count)
    return found


def remedy(
    profile: Profile, stage: str, room: float, peaks_with: Callable[[Overrides], list[Peak]]
) -> Overrides | None:
    """The settings under which the stage's peak is at most `room` bytes; None when none of `smaller` do it.

    peaks_with: the stage's peaks under some settings.
    """
    for settings in smaller(profile, stage):
        if worst(peaks_with(settings)).total <= room:
            return settings
    return None


def said(settings: Overrides) -> str:
    """Settings as one gives them on the command line."""
    return " and ".join(_said(key, value) for key, value in settings.items())


def _said(key: str, value) -> str:
    if key == "latency.prefix_tokens":  # latency's other lists have an entry for each of its lengths
        return f"{key} to {value} and latency's other lists to as many entries"
    return f"{key} to {str(value).lower() if isinstance(value, bool) else value}"
