"""The arms of the screen: one centre, and controlled slices around it on both bases."""

from dataclasses import asdict, dataclass

from kvlib.errors import KvlibError, suggestion
from kvlib.study.profile import Screening

BASES = ("direct", "ridge")


@dataclass(frozen=True)
class Arm:
    """One configuration of a learned map. `id` names it in every record."""

    base: str
    residual: str
    features: str
    rank: int
    learning_rate: float
    warmup_steps: int

    @property
    def id(self) -> str:
        return f"{self.base}-{self.residual}-{self.features}-r{self.rank}-lr{self.learning_rate:g}-w{self.warmup_steps}"

    @property
    def absorbable(self) -> bool:
        """Whether its map is affine in each head's own vector, on either base."""
        return self.residual == "linear" and self.features == "own"

    def record(self) -> dict:
        return {"id": self.id, **asdict(self)}


def slices(screening: Screening) -> dict[str, dict[str, list[Arm]]]:
    """Axis -> base -> the arms that differ in that axis alone, in the axis's order, the centre among them."""
    middle = sorted(screening.learning_rates)[1]
    result: dict[str, dict[str, list[Arm]]] = {}
    for base in BASES:
        centre = {
            "base": base, "residual": "linear", "features": "own", "rank": screening.centre_rank,
            "learning_rate": middle, "warmup_steps": screening.warmup_steps,
        }  # fmt: skip
        axes = {
            "learning_rate": sorted(screening.learning_rates),
            "rank": sorted(screening.ranks),
            "warmup_steps": [0, screening.warmup_steps],
            "residual": ["linear", "quadratic"],
            "features": ["own", "rms", "rope_stripped"],
        }
        for axis, values in axes.items():
            result.setdefault(axis, {})[base] = [Arm(**{**centre, axis: value}) for value in values]
    return result


def all_arms(screening: Screening) -> list[Arm]:
    """Every different arm of the slices, the direct base first, in a fixed order: 20 in the study's design."""
    found = {arm.id: arm for base in BASES for axis in slices(screening).values() for arm in axis[base]}
    return list(found.values())


def chosen_arms(screening: Screening) -> list[Arm]:
    """`all_arms`, or those whose ids the profile lists. Raises KvlibError for an id that is none of them."""
    arms = {arm.id: arm for arm in all_arms(screening)}
    if screening.arms is None:
        return list(arms.values())
    unknown = [name for name in screening.arms if name not in arms]
    if unknown:
        raise KvlibError(
            f"arm {unknown[0]!r} given, expected some of {', '.join(arms)}{suggestion(unknown[0], arms)}"
        )
    if len(set(screening.arms)) != len(screening.arms) or len(screening.arms) < screening.select:
        raise KvlibError(
            f"{len(set(screening.arms))} different arms given, expected at least screening.select = "
            f"{screening.select}, each once: name more, or lower screening.select"
        )
    return [arms[name] for name in screening.arms]
