"""Lengths by a Gaussian process and its lower confidence bound, after the paper's controller (arXiv 2604.20503).

Of that controller only the kind is known here (GP-LCB, over the speculation length); what it models is this file's
choice. The cost y of a point x = (length, acceptance, log2 of the batch) is the log of the time per token over that
without speculation. It is modelled as what the cost model expects of it at this acceptance, plus a Gaussian process
with a kernel that is constant + linear in length + squared-exponential, over the last WINDOW points (Rasmussen and
Williams, 2006, eq. 2.25 and 2.26):

    mean(x) = expected(x) + k(x)' (K + noise)^-1 (y - expected),  var(x) = k(x, x) - k(x)' (K + noise)^-1 k(x)
    length  = argmin mean(x) - beta sqrt(var(x))                      (GP-UCB of Srinivas et al., arXiv 0912.3995)

A point is a hold of HOLD steps, at the mean length and acceptance of its requests. A request gets the length that
would be best for a batch of requests like it, from a small grid of acceptances that is solved once a hold; drafted is
the mean of those, rounded up. Nothing is random: what is tried next is where the bound is low.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, Decision, Observation
from faser.costs import StepCost
from faser.policies.last_step import LastStep

Doubles = NDArray[np.float64]

WINDOW, HOLD = 128, 8
BETA = 0.5
SCALE = np.array([2.5, 0.25, 1.5])
"""Distances in length, acceptance and log2 of the batch over which what was seen still tells something."""
OFFSET, SLOPE, SIGNAL = 0.05, 0.1, 0.07
"""Standard deviations of what the cost model and the acceptance leave unexplained in y: the same everywhere, in
proportion to the length (at K), and of the squared-exponential kernel.
"""
NOISE, SPREAD = 0.05, 0.5
"""Standard deviations of a point, and, over the square root of its request-steps, of their mean."""
SHRINK = 0.5
"""How far a request's acceptance is drawn to the batch's mean: it is an average over few tokens."""
GRID = np.linspace(0.025, 0.975, 20)
"""Acceptances that lengths are chosen for; a request takes the nearest."""


def kernel(a: Doubles, b: Doubles) -> Doubles:
    """[A, B] covariance of points a [A, 3] and b [B, 3]."""
    apart = (a[:, None, :] - b[None, :, :]) / SCALE
    slope = SLOPE**2 * np.outer(a[:, 0], b[:, 0]) / MAX_DEPTH**2
    return np.asarray(OFFSET**2 + slope + SIGNAL**2 * np.exp(-0.5 * (apart**2).sum(axis=2)))


def posterior(x: Doubles, residual: Doubles, noise: Doubles, at: Doubles) -> tuple[Doubles, Doubles]:
    """Mean and standard deviation [Q] at points `at` [Q, 3], after `residual` [M], with variances `noise` [M], was seen
    at `x` [M, 3].
    """
    cross = kernel(x, at)
    solved = np.linalg.solve(kernel(x, x) + np.diag(noise), np.column_stack([residual, cross]))
    variance = OFFSET**2 + (SLOPE * at[:, 0] / MAX_DEPTH) ** 2 + SIGNAL**2 - (cross * solved[:, 1:]).sum(axis=0)
    return cross.T @ solved[:, 0], np.sqrt(np.maximum(variance, 0.0))


class GpLcb:
    """Keeps a window of `points`: x, y - expected, and its variance."""

    def __init__(self, cost: StepCost, *, beta: float = BETA) -> None:
        """beta: of the formula; 0 never explores. ValueError: what is wrong."""
        if not 0.0 <= beta <= 10.0:
            raise ValueError(f"BETA is {beta:g}; allowed: 0 to 10")
        self._cost, self._beta = cost, beta
        self._last = LastStep(cost)
        self.points: deque[Doubles] = deque(maxlen=WINDOW)
        self._seen: list[tuple[float, ...]] = []  # of each step of the hold: requests, gain, acceptance, length, depth
        self._lengths = np.zeros(len(GRID), np.int64)
        self._acceptance = 0.0  # mean, in the step that runs
        self._left, self._batch = 0, 0

    def decide(self, observation: Observation) -> Decision:
        n = observation.running
        self._see(observation)
        acceptance = 0.5 * (observation.request("acceptance_fast") + observation.request("acceptance_slow"))
        if self._left == 0 or not 0.5 < max(n, 1) / self._batch < 2.0:
            self._learn()
            self._lengths, self._batch, self._left = self.lengths(max(n, 1)), max(n, 1), HOLD
        self._left -= n > 0
        if n:
            acceptance += SHRINK * (acceptance.mean() - acceptance)
        nearest = np.rint((acceptance - GRID[0]) / (GRID[1] - GRID[0])).astype(np.int64)
        wanted = self._lengths[np.clip(nearest, 0, len(GRID) - 1)]
        depth = int(np.ceil(wanted.mean())) if n else int(self._lengths[len(GRID) // 2])
        decision = Decision(np.minimum(wanted, depth), depth)
        self._last.decided(observation, decision)
        counted = acceptance[observation.request("excluded") == 0]
        self._acceptance = float(counted.mean()) if len(counted) else 0.0
        return decision

    def lengths(self, batch: int) -> NDArray[np.int64]:
        """[GRID] length of the lowest bound, for `batch` running requests."""
        k = np.tile(np.arange(MAX_DEPTH + 1.0), len(GRID))
        a = np.repeat(GRID, MAX_DEPTH + 1)
        at = np.column_stack([k, a, np.full(len(k), np.log2(batch))])
        seen = np.array(self.points).reshape(-1, 5)
        mean, deviation = posterior(seen[:, :3], seen[:, 3], seen[:, 4], at)
        bound = self.expected(k, a, np.array(batch), k) + mean - self._beta * deviation
        return np.asarray(bound.reshape(len(GRID), -1).argmin(axis=1))

    def expected(self, length: Doubles, acceptance: Doubles, batch: Doubles, depth: Doubles) -> Doubles:
        """y of steps of `batch` requests at this acceptance, if every token is as likely to be right."""
        tokens = (1.0 - acceptance ** (length + 1.0)) / (1.0 - acceptance)
        ms = self._cost.ms(rows=batch * (1.0 + length), batch=batch, depth=depth)
        return np.asarray(np.log(ms / self._cost.ms(rows=batch, batch=batch) / tokens))

    def _see(self, observation: Observation) -> None:
        speed = self._last.speed(observation)
        if speed:
            self._seen.append((speed.requests, speed.gain, self._acceptance, speed.verified, speed.drafted))

    def _learn(self) -> None:
        """The hold that ends now."""
        if not self._seen:
            return
        seen = np.array(self._seen)
        steps = float(seen[:, 0].sum())
        gain, acceptance, length, depth = (seen[:, :1] * seen[:, 1:]).sum(axis=0) / steps
        batch = seen[:, 0].mean()
        acceptance = np.minimum(acceptance, GRID[-1])
        residual = -np.log(gain) - self.expected(length, acceptance, batch, depth)
        x = (length, acceptance, np.log2(batch))
        self.points.append(np.array([*x, residual, NOISE**2 + SPREAD**2 / steps]))
        self._seen = []
