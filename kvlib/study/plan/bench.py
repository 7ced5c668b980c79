"""What a plan is made from: a profile with the shapes of its two models, and the counts that follow from them."""

from dataclasses import dataclass

from kvlib.study.arms import Arm, chosen_arms
from kvlib.study.plan.operations import Cost, Runner
from kvlib.study.plan.shapes import ModelShape, shape_of
from kvlib.study.profile import Profile

GATE_HANDOFFS = (
    13  # of a gate: five maps that change nothing, three ways, without those that attention cannot absorb
)
LOSS_PROMPTS = 4  # at a time, when held-out losses are measured


@dataclass(frozen=True)
class Bench:
    """A profile with its two models, in the pair's number format and in training's."""

    profile: Profile
    target: ModelShape
    source: ModelShape
    training_dtype: str
    on_cpu: bool

    @classmethod
    def of(cls, profile: Profile, training_dtype: str, on_cpu: bool) -> "Bench":
        return cls(
            profile,
            shape_of(profile.pair, "target"),
            shape_of(profile.pair, "source"),
            training_dtype,
            on_cpu,
        )

    def runner(self, role: str, dtype: str | None = None) -> Runner:
        return Runner(getattr(self, role), dtype or self.profile.pair.dtype)

    @property
    def arms(self) -> list[Arm]:
        return chosen_arms(self.profile.screening)

    @property
    def cached(self) -> int:
        """Positions of a prompt that are handed over."""
        return self.profile.prompt.prefix_tokens - 1

    @property
    def longest_cut(self) -> int:
        return self.profile.partitions.window_tokens - self.profile.prompt.forced_steps - 1

    @property
    def mean_cut(self) -> float:
        return (
            self.profile.training.min_prefix_tokens
            + self.profile.partitions.window_tokens
            - self.profile.prompt.forced_steps
        ) / 2

    @property
    def has_pruning(self) -> bool:
        return self.profile.pair.source.kind == "pruned" and self.profile.partitions.build is not None

    @property
    def is_mixed(self) -> bool:
        """Whether training computes in another number format than the pair is in: the target is then there twice."""
        return self.training_dtype != self.profile.pair.dtype

    @property
    def step_prompts(self) -> int:
        """Prompts of a training step: no more than there are windows."""
        wanted = self.profile.partitions
        return min(
            self.profile.training.prompts_per_step, wanted.screen_train.items, wanted.confirm_train.items
        )

    @property
    def micro_batch(self) -> int:
        return min(self.profile.training.micro_batch or self.step_prompts, self.step_prompts)

    def parameters(self, arm: Arm) -> int:
        return 2 * self.target.layers * self.target.kv_heads * self.numbers(arm)

    def numbers(self, arm: Arm) -> int:
        """Of an arm's matrices, for one head's keys."""
        return (self.features(arm) + 1) * self.target.head_dim * arm.rank

    def features(self, arm: Arm) -> int:
        return 2 if arm.residual == "quadratic" else 1

    def load(self, role: str, dtype: str | None = None) -> Cost:
        """Reading a model's weights from the disk into the device's memory."""
        runner, stored = self.runner(role, dtype), getattr(self, role)
        return Cost(link=stored.weight_bytes(runner.dtype), disk=stored.weight_bytes(stored.stored))
