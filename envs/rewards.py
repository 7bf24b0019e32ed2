"""Rewards: objects of their own, so that an objective is chosen without touching the environment.

All are negative costs, of which an episode's sum has a meaning of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from faser.envs.advance import Advance, Doubles


@dataclass(frozen=True, slots=True)
class Without:
    """The episodes of E engines without speculation, [E] each: see `Baseline`."""

    system_s: Doubles
    busy_s: Doubles
    requests: Doubles


class Reward(Protocol):
    """Pure: the same step gives the same reward."""

    def __call__(self, advance: Advance, without: Without) -> Doubles:
        """[E] of one step of all engines."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimeInSystem:
    """Minus the integral of the number of requests in the system over the step, arrivals in mid-step included exactly.

    An episode's return is minus the ratio of mean times in system, with the policy over without speculation.
    """

    def __call__(self, advance: Advance, without: Without) -> Doubles:
        return -advance.system_s / without.system_s


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Minus the engine's seconds. The tokens of an episode are given, so its return is the inverse of the speed-up."""

    def __call__(self, advance: Advance, without: Without) -> Doubles:
        return -advance.seconds / without.busy_s


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Minus 1 / n for every request that finishes more than `target_s` after its arrival: the share that misses."""

    target_s: float = 20.0

    def __call__(self, advance: Advance, without: Without) -> Doubles:
        missed = np.bincount(advance.finished[advance.finished_s > self.target_s], minlength=len(advance.seconds))
        return -missed / without.requests


REWARDS: dict[str, Reward] = {"time_in_system": TimeInSystem(), "throughput": Throughput(), "slo": Slo()}
"""By name, as `objective=` of the environment takes them."""
