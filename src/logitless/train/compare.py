"""Do the arms of an A/B train alike? Errors update by update, or means against their spread over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from logitless.train.ab_config import RISE_UPDATES, AbConfig

COMPARED = ("loss", "reward/mean", "kl")
SETTLED = 5
"""Updates at the start whose time does not count: they compile."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed.

    Args:
        arm: its title.
        seed: of the run.
        summary: its `summary.json`.
        metrics: the lines of its `metrics.jsonl`, one an update.
    """

    arm: str
    seed: int
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def series(self, name: str) -> np.ndarray:
        """One number of each update; NaN where it was not to be had."""
        return np.array([np.nan if line.get(name) is None else line[name] for line in self.metrics], float)


@dataclass(frozen=True)
class Check:
    """One thing that had to hold."""

    arm: str
    what: str
    value: float
    bound: float
    passed: bool


@dataclass(frozen=True)
class Verdict:
    """All checks, and the ratios to the first arm."""

    checks: list[Check] = field(default_factory=list)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True when every check holds."""
        return all(check.passed for check in self.checks)

    @property
    def parity(self) -> dict[str, bool]:
        """For each arm, whether its numbers are the first arm's."""
        arms = dict.fromkeys(check.arm for check in self.checks)
        return {arm: all(c.passed for c in self.checks if c.arm == arm and c.what.startswith("parity")) for arm in arms}

    def as_record(self) -> dict[str, Any]:
        """As JSON takes it."""
        checks = [vars(check) for check in self.checks]
        return {"passed": self.passed, "parity": self.parity, "checks": checks, "ratios": self.ratios}


def compare(config: AbConfig, runs: Sequence[Run]) -> Verdict:
    """The verdict over all runs of an A/B."""
    verdict = Verdict()
    first = config.arms[0].title
    base = [run for run in runs if run.arm == first]
    for arm in config.arms:
        own = [run for run in runs if run.arm == arm.title]
        verdict.ratios[arm.title] = ratios(own, base)
        if config.min_reward_rise is not None:
            verdict.checks.append(_rise(arm.title, own, config.min_reward_rise))
        if arm.title == first:
            continue
        judge = _errors if config.rollouts == "shared" else _spread
        verdict.checks.extend(judge(config, arm.title, own, base))
        if config.max_temp_ratio is not None:
            ratio = verdict.ratios[arm.title]["temp"]
            verdict.checks.append(
                Check(
                    arm.title, "temp memory of the update", ratio, config.max_temp_ratio, ratio <= config.max_temp_ratio
                )
            )
    return verdict


def ratios(own: Sequence[Run], base: Sequence[Run]) -> dict[str, float]:
    """Temp memory and time of an update, times the first arm's; times are medians without the updates that compile."""

    def time(runs: Sequence[Run]) -> float:
        settled = [run.series("time/train/step_s") for run in runs]
        return float(
            np.median(np.concatenate([times[SETTLED:] if len(times) > SETTLED else times for times in settled]))
        )

    def temp(runs: Sequence[Run]) -> float:
        return float(max(run.summary["memory"]["temp"] for run in runs))

    return {
        "temp": temp(own) / temp(base),
        "step_time": time(own) / time(base),
        "temp_bytes": temp(own),
        "step_s": time(own),
    }


def _rise(arm: str, runs: Sequence[Run], needed: float) -> Check:
    ends = RISE_UPDATES
    rewards = [run.series("reward/mean") for run in runs]
    rise = float(np.mean([np.mean(curve[-ends:]) - np.mean(curve[:ends]) for curve in rewards]))
    return Check(arm, f"rise of the reward, last {ends} updates over the first {ends}", rise, needed, rise >= needed)


def _errors(config: AbConfig, arm: str, own: Sequence[Run], base: Sequence[Run]) -> list[Check]:
    """The largest error of any update, early and late: all arms trained on the same completions."""
    parity = config.parity
    bounds = {"loss": parity.loss_error, "kl": parity.kl_error, "grad_norm": parity.grad_norm_error}
    early = parity.early_updates
    spans = [(f"the first {early} updates", slice(early), 1.0)]
    if config.train.steps > early:
        spans.append(("a later update", slice(early, None), parity.later_factor))
    checks = []
    for name, bound in bounds.items():
        words = "relative to its largest" if name == "grad_norm" else "in nats"
        for when, span, factor in spans:
            worst = max(_largest_error(name, run, other, span) for run, other in zip(own, base, strict=True))
            what = f"parity: largest error of {name} in {when}, {words}"
            checks.append(Check(arm, what, worst, bound * factor, worst <= bound * factor))
    return checks


def _largest_error(name: str, run: Run, other: Run, span: slice) -> float:
    ours, theirs = run.series(name), other.series(name)
    # A number that one arm has and the other lacks is no match.
    gap = np.where(np.isnan(ours) & np.isnan(theirs), 0.0, np.abs(ours - theirs))[span]
    error = float(np.max(gap, initial=0.0))
    if error and name == "grad_norm":
        scale = float(np.nanmax(np.abs(theirs)))
        error = error / scale if scale else np.inf
    return error if np.isfinite(error) else np.inf


def _spread(config: AbConfig, arm: str, own: Sequence[Run], base: Sequence[Run]) -> list[Check]:
    """Is the difference of the means over seeds inside what seeds alone do?"""
    from scipy.stats import ttest_ind

    last = config.parity.last_updates
    checks = []
    for name in COMPARED:
        ours, theirs = ([float(np.mean(run.series(name)[-last:])) for run in runs] for runs in (own, base))
        gap = float(np.mean(ours) - np.mean(theirs))
        if np.isnan(gap):
            # No reference policy, no divergence: nothing to compare, unless one arm alone has it.
            if np.isnan(ours).all() and np.isnan(theirs).all():
                continue
            bound = 0.0
        elif np.ptp(ours) == 0 and np.ptp(theirs) == 0:
            bound = 0.0
        else:
            interval = ttest_ind(ours, theirs, equal_var=False).confidence_interval(config.parity.confidence)
            bound = float(interval.high - interval.low) / 2
        if name == "reward/mean":
            bound = min(bound, config.parity.reward_margin)
        what = f"parity: difference of {name}, mean of the last {last} updates, against the spread over seeds"
        checks.append(Check(arm, what, gap, bound, abs(gap) <= bound))
    return checks
