"""Most expected tokens per millisecond: survival x cost (as SmartSpec, 2406.14066, and vLLM's adaptive verification).

Lengths: of all drafted tokens in the batch, verify the m with the largest survival, m maximising
(N + sum of their survivals) / ms(rows + m). Survival falls along a draft, so the chosen ones are prefixes. Depth:
the D that maximises the same ratio for the next step, survivals there being powers of each request's acceptance
average. It is myopic: it sees neither the queue nor a request's end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from faser.core import MAX_DEPTH, Decision, Floats, Ints, Observation
from faser.costs import StepCost
from faser.requests import PRIOR


def best_depth(tokens: float, gained: ArrayLike, ms: ArrayLike) -> int:
    """Depth D in 0..K with the most tokens per ms.

    tokens: produced without speculation; gained [K]: more expected from each further position; ms [K + 1] by depth.
    """
    total = tokens + np.concatenate([[0.0], np.cumsum(gained)])
    return int(np.argmax(total / np.asarray(ms)))


class Goodput:
    """Stateless; `cost` is the engine's step-time model."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def decide(self, observation: Observation) -> Decision:
        n = observation.running
        if n == 0:
            return Decision(np.zeros(0, np.int64), self._depth(1, 0.0, observation))
        share = min(observation.of_load("prefill_share"), 0.99)
        prefill = n * share / (1.0 - share)
        return Decision(self._lengths(observation.survival, n + prefill), self._depth(n, prefill, observation))

    def _lengths(self, survival: Floats, rows: float) -> Ints:
        ranked = -np.sort(-survival[survival > 0.0])
        if len(ranked) == 0:
            return np.zeros(len(survival), np.int64)
        gained = np.concatenate([[0.0], np.cumsum(ranked)])
        at = rows + np.arange(len(gained))
        m = int(np.argmax((len(survival) + gained) / (self._cost.verify(at) + self._cost.sync(at))))
        if m == 0:
            return np.zeros(len(survival), np.int64)
        return np.asarray((survival >= ranked[m - 1]).sum(axis=1))

    def _depth(self, n: int, prefill: float, observation: Observation) -> int:
        acceptance = 0.5 * (observation.request("acceptance_fast") + observation.request("acceptance_slow"))
        if len(acceptance) == 0:
            acceptance = np.full(1, PRIOR, np.float32)  # requests about to finish prefill
        powers = np.arange(1, MAX_DEPTH + 1)
        gained = (acceptance[:, None] ** powers).sum(axis=0)
        depths = np.arange(MAX_DEPTH + 1)
        at = n * (1 + depths) + prefill
        ms = self._cost.verify(at) + self._cost.sync(at) + depths * self._cost.draft(n)
        return best_depth(n, gained, ms)
