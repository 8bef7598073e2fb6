"""What an A/B is: arms that differ in their loss section alone, and what counts as parity."""

from dataclasses import dataclass, field, replace
from typing import Literal

from logitless.train.config import LossConfig, TrainConfig
from logitless.train.errors import TrainError

RISE_UPDATES = 10
"""Updates at each end whose mean reward is compared."""


@dataclass(frozen=True)
class ParityConfig:
    """When an arm counts as equal to the first.

    Args:
        loss_error: with shared rollouts: the largest difference of the loss of one of the first updates, in nats.
        kl_error: with shared rollouts: that of the divergence to the reference, in nats.
        grad_norm_error: with shared rollouts: that of the gradient's norm, relative to the first arm's largest.
        early_updates: with shared rollouts: how many updates count as the first.
        later_factor: with shared rollouts: later updates may differ by so many times as much, for each hands its
            rounding on to the next.
        confidence: with free rollouts: of the interval around the difference of the means over seeds (Welch's t), which
            must hold 0 for the loss, the reward and the divergence.
        reward_margin: with free rollouts: a larger difference of the mean reward never passes, however seeds differ.
        last_updates: with free rollouts: the updates at the end whose mean is compared.
    """

    loss_error: float = 1e-6
    kl_error: float = 1e-5
    grad_norm_error: float = 1e-4
    early_updates: int = 10
    later_factor: float = 100.0
    confidence: float = 0.99
    reward_margin: float = 0.05
    last_updates: int = 10


@dataclass(frozen=True)
class AbConfig:
    """Runs that differ in their loss alone, side by side.

    Args:
        name: names the record `NAME.jsonl` and the report.
        arms: loss sections; the first is the baseline.
        train: the run that all arms share; its `name`, `output`, `loss` and `seed` are replaced.
        output: folder of the runs, of `report.html` and of the recorded rollouts.
        results: folder of the record.
        seeds: each arm runs once with each.
        rollouts: `shared`: the first arm samples and the others train on what it sampled, so that each update can be
            compared; `free`: each arm samples for itself, and the spread over seeds is the measure (two seeds or more).
        parity: what counts as equal.
        max_temp_ratio: the largest temp memory of an arm's compiled update, times the first arm's, that passes; None
            for no bound.
        min_reward_rise: by how much the mean reward of the last ten updates must exceed that of the first ten.
        timeout_s: of one run.
        topology: a TPU such as `v6e:2x4`, for which `logitless ab plan` compiles the update of each arm.
    """

    name: str
    arms: list[LossConfig]
    train: TrainConfig
    output: str = "runs/ab"
    results: str = "results"
    seeds: list[int] = field(default_factory=lambda: [0])
    rollouts: Literal["shared", "free"] = "shared"
    parity: ParityConfig = field(default_factory=ParityConfig)
    max_temp_ratio: float | None = None
    min_reward_rise: float | None = None
    timeout_s: float = 36_000.0
    topology: str | None = None

    def __post_init__(self) -> None:
        titles = [arm.title for arm in self.arms]
        if len(titles) < 2:
            raise TrainError(f"ab config: arms has {len(titles)} loss section; a comparison needs two or more")
        if len(set(titles)) < len(titles):
            raise TrainError(f"ab config: two arms are called alike ({', '.join(titles)}); give each a label")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise TrainError(f"ab config: seeds={self.seeds}; give at least one, each once")
        if self.rollouts == "free" and len(self.seeds) < 2:
            raise TrainError("ab config: rollouts=free measures by the spread over seeds: give two or more seeds")
        if self.parity.early_updates < 1:
            raise TrainError(f"ab config: parity.early_updates={self.parity.early_updates}; it must be at least 1")
        if not 0 < self.parity.confidence < 1:
            raise TrainError(f"ab config: parity.confidence={self.parity.confidence}; it must lie between 0 and 1")
        if self.rollouts == "free" and not 1 <= self.parity.last_updates <= self.train.steps:
            raise TrainError(
                f"ab config: parity.last_updates={self.parity.last_updates}; it must lie between 1 and train.steps="
                f"{self.train.steps}"
            )
        if self.min_reward_rise is not None and self.train.steps < 2 * RISE_UPDATES:
            raise TrainError(
                f"ab config: min_reward_rise compares the first {RISE_UPDATES} updates with the last {RISE_UPDATES}; "
                f"train.steps={self.train.steps} is too few"
            )
        for arm in self.arms:
            # Refused here, not after the first arm has run.
            replace(self.train, loss=arm)
