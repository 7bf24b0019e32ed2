"""Rewards: objects of their own, so that an objective is chosen without touching the environment.

All are negative costs, of which an episode's sum has a meaning of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from faser.envs.simulator import Step
from faser.envs.summary import Baseline


class Reward(Protocol):
    """Pure: the same step gives the same reward."""

    def __call__(self, step: Step, baseline: Baseline) -> float: ...


@dataclass(frozen=True, kw_only=True)
class TimeInSystem:
    """Minus the integral of the number of requests in the system over the step, arrivals in mid-step included exactly.

    An episode's return is minus the ratio of mean times in system, with the policy over without speculation.
    """

    def __call__(self, step: Step, baseline: Baseline) -> float:
        return -step.system_s / baseline.system_s


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Minus the engine's seconds. The tokens of an episode are given, so its return is the inverse of the speed-up."""

    def __call__(self, step: Step, baseline: Baseline) -> float:
        return -step.outcome.seconds / baseline.busy_s


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Minus 1 / n for every request that finishes more than `target_s` after its arrival: the share that misses."""

    target_s: float = 20.0

    def __call__(self, step: Step, baseline: Baseline) -> float:
        return -float((step.finished_s > self.target_s).sum()) / baseline.requests


REWARDS: dict[str, Reward] = {"time_in_system": TimeInSystem(), "throughput": Throughput(), "slo": Slo()}
"""By name, as `objective=` of the environment takes them."""
