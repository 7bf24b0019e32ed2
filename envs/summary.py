"""What an episode came to, in a few numbers that are the same for every policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.core import StepOutcome


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One episode.

    mean_time_in_system_s, p99_time_in_system_s: arrival to last token, over finished requests.
    tokens_per_s: output tokens over the seconds in which the engine worked (idle gaps left out).
    ratio_to_none: request-seconds in the system over those without speculation on the same arrivals; < 1 is better.
    mean_length: drafted tokens verified, and mean_accepted: accepted, per request and step; steps that verify none
        count. A request-step emits mean_accepted + 1 tokens.
    mean_depth: tokens drafted at the end of a step, per step.
    finished, steps: counts. busy_s: seconds in which the engine worked.
    """

    mean_time_in_system_s: float
    p99_time_in_system_s: float
    tokens_per_s: float
    ratio_to_none: float
    mean_length: float
    mean_depth: float
    mean_accepted: float
    finished: int
    steps: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The same arrivals without speculation: request-seconds in the system, engine seconds, and requests."""

    system_s: float
    busy_s: float
    requests: int


class Ledger:
    """Adds up steps."""

    def __init__(self) -> None:
        self.steps = self.request_steps = self.tokens = 0
        self.verified = self.accepted = self.depth = 0
        self.busy_s = self.system_s = 0.0

    def add(self, outcome: StepOutcome, tokens: int, system_s: float) -> None:
        """One step: `tokens` emitted, `system_s` the integral of requests in the system over it."""
        self.steps += 1
        self.request_steps += len(outcome.verified)
        self.tokens += tokens
        self.verified += int(outcome.verified.sum())
        self.accepted += int(outcome.accepted.sum())
        self.depth += outcome.draft_depth
        self.busy_s += outcome.seconds
        self.system_s += system_s

    def summary(self, time_in_system_s: NDArray[np.float64], baseline: Baseline) -> Summary:
        """`time_in_system_s`: [n], NaN where unfinished."""
        done = time_in_system_s[np.isfinite(time_in_system_s)]
        visits, steps = max(self.request_steps, 1), max(self.steps, 1)
        return Summary(
            mean_time_in_system_s=float(done.mean()) if len(done) else float("nan"),
            p99_time_in_system_s=float(np.percentile(done, 99)) if len(done) else float("nan"),
            tokens_per_s=self.tokens / self.busy_s if self.busy_s else 0.0,
            ratio_to_none=self.system_s / baseline.system_s,
            mean_length=self.verified / visits,
            mean_depth=self.depth / steps,
            mean_accepted=self.accepted / visits,
            finished=len(done),
            steps=self.steps,
            busy_s=self.busy_s,
        )
