"""What an episode came to, in a few numbers that are the same for every policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.envs.advance import Advance

SUMS = ("steps", "busy_s", "system_s", "tokens", "depth", "visits", "verified", "accepted")
"""What a `Ledger` adds up; visits are requests that decoded, in all steps."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One episode.

    mean_time_in_system_s, p99_time_in_system_s: arrival to last token, over finished requests.
    tokens_per_s: output tokens over the seconds in which the engine worked (idle gaps left out).
    within_target: share of the finished whose time in system is at most `latency_target_s` of `Engines`.
    ratio_to_none: request-seconds in the system over those without speculation on the same arrivals; < 1 is better.
    mean_length: drafted tokens verified, and mean_accepted: accepted, per request and step; steps that verify none
        count. A request-step emits mean_accepted + 1 tokens.
    mean_depth: tokens drafted at the end of a step, per step.
    finished, steps: counts; visits: of requests that decoded, in all steps. busy_s: seconds in which the engine worked.
    """

    mean_time_in_system_s: float
    p99_time_in_system_s: float
    tokens_per_s: float
    within_target: float
    ratio_to_none: float
    mean_length: float
    mean_depth: float
    mean_accepted: float
    finished: int
    steps: int
    visits: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The same arrivals without speculation: request-seconds in the system, engine seconds, requests, and the time in
    system of each [n], s.
    """

    system_s: float
    busy_s: float
    requests: int
    time_in_system_s: NDArray[np.float64]


class Ledger:
    """Adds up the steps of E engines side by side; one row of `sums` [8, E] for each of SUMS."""

    def __init__(self, engines: int) -> None:
        self.sums = np.zeros((len(SUMS), engines))

    def clear(self, engine: int) -> None:
        """Forget the steps of one engine."""
        self.sums[:, engine] = 0.0

    def add(self, advance: Advance) -> None:
        """One step of all; engines that stood still are left out."""
        moved, owner, e = advance.seconds > 0, advance.owner, len(advance.seconds)
        counts = [np.bincount(owner, weights, e) for weights in (None, advance.verified, advance.accepted)]
        steps = (moved, advance.seconds, advance.system_s, advance.tokens, advance.depth * moved)
        for row, values in zip(self.sums, (*steps, *counts), strict=True):
            np.add(row, values, out=row)

    @property
    def steps(self) -> NDArray[np.float64]:
        """[E] so far."""
        steps: NDArray[np.float64] = self.sums[0]
        return steps

    def summary(
        self, engine: int, time_in_system_s: NDArray[np.float64], baseline: Baseline, latency_target_s: float
    ) -> Summary:
        """Of one engine. `time_in_system_s`: [n], NaN where unfinished."""
        of = dict(zip(SUMS, self.sums[:, engine].tolist(), strict=True))
        done = time_in_system_s[np.isfinite(time_in_system_s)]
        visits, steps = max(of["visits"], 1), max(of["steps"], 1)
        return Summary(
            mean_time_in_system_s=float(done.mean()) if len(done) else float("nan"),
            p99_time_in_system_s=float(np.percentile(done, 99)) if len(done) else float("nan"),
            tokens_per_s=of["tokens"] / of["busy_s"] if of["busy_s"] else 0.0,
            within_target=float((done <= latency_target_s).mean()) if len(done) else float("nan"),
            ratio_to_none=of["system_s"] / baseline.system_s,
            mean_length=of["verified"] / visits,
            mean_depth=of["depth"] / steps,
            mean_accepted=of["accepted"] / visits,
            finished=len(done),
            steps=int(of["steps"]),
            visits=int(of["visits"]),
            busy_s=of["busy_s"],
        )
