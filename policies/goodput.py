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
from faser.requests import CONTEXT_SCALE, PRIOR


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
            return Decision(np.zeros(0, np.int64), self._depth(1, 0.0, np.full(1, PRIOR, np.float32)))
        share = min(observation.of_load("prefill_share"), 0.99)
        held = np.minimum(observation.request("context"), 0.999)
        context = CONTEXT_SCALE * float((held / (1.0 - held)).sum())
        acceptance = 0.5 * (observation.request("acceptance_fast") + observation.request("acceptance_slow"))
        lengths = self._lengths(observation.survival, n * share / (1.0 - share), context)
        return Decision(lengths, self._depth(n, context, acceptance))

    def _lengths(self, survival: Floats, prefill: float, context: float) -> Ints:
        """Prompts in the step make its rows dearer, but their own time is spent anyway and prices nothing."""
        n = len(survival)
        ranked = -np.sort(-survival[survival > 0.0])
        gained = np.concatenate([[0.0], np.cumsum(ranked)])
        extra = np.arange(len(gained))
        rows_ms = self._cost.ms(rows=n + prefill + extra, batch=n, context=context)
        start_ms = self._cost.step_ms(rows=n, batch=n, context=context)
        m = int(np.argmax((n + gained) / (rows_ms - rows_ms[0] + start_ms)))
        if m == 0:
            return np.zeros(n, np.int64)
        return np.asarray((survival >= ranked[m - 1]).sum(axis=1))

    def _depth(self, n: int, context: float, acceptance: Floats) -> int:
        gained = (acceptance[:, None] ** np.arange(1, MAX_DEPTH + 1)).sum(axis=0)
        depths = np.arange(MAX_DEPTH + 1)
        return best_depth(n, gained, self._cost.ms(rows=n * (1 + depths), batch=n, depth=depths, context=context))
