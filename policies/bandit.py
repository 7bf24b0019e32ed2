"""One length for all, by a bandit: discounted UCB over the lengths, a bandit of its own for each size of batch.

Arms are the lengths 0..K, held for HOLD steps, since a length pays only once as much has been drafted (the first step
after a change is not counted). The reward of a step is its gain (`last_step`): decode tokens per ms over those without
speculation. Contexts are running requests: 1, 2-3, 4-7 and so on, each with its own counts, as in Nightjar (arXiv
2512.22420). A step of n requests counts n times, as its mean is that much surer. In a context, with N_k request-steps
of arm k, N = sum N_k, and X_k their mean reward,

    k = argmax X_k + c sqrt(log(1 + N) / N_k)

which is UCB1 (Auer et al., 2002), as BanditSpec has it (arXiv 2505.15141); counts are multiplied by `discount` at each
hold, so that what was long ago is tried again (D-UCB, Garivier and Moulines, arXiv 0805.3415). Each arm starts with
`trust` request-steps at the reward that the cost model expects of it, so that traffic is not spent on lengths that the
profile rules out. Nothing is random.
"""

from __future__ import annotations

import numpy as np

from faser.core import MAX_DEPTH, Decision, Observation
from faser.costs import StepCost
from faser.policies.last_step import LastStep
from faser.policies.schedule import geometric
from faser.requests import PRIOR

HOLD = 8
EXPLORE, DISCOUNT, TRUST = 0.2, 0.995, 2048.0
"""Best of what was tried on validation arrivals of the 13B pair, where the profile is right. With less trust it finds
sooner what the profile has wrong, and pays more for looking: 256 cost 1 % there.
"""
LEAST = 1e-3
"""Request-steps below which nothing is forgotten."""
CONTEXTS = 12
"""Powers of two of running requests."""


class Bandit:
    """counts, means: [contexts, K + 1] discounted request-steps of each arm, and their mean reward."""

    def __init__(
        self, cost: StepCost, *, explore: float = EXPLORE, discount: float = DISCOUNT, trust: float = TRUST
    ) -> None:
        """explore: c of the formula. ValueError: what is wrong."""
        if not 0.0 <= explore <= 10.0:
            raise ValueError(f"EXPLORE is {explore:g}; allowed: 0 to 10")
        if not 0.0 < discount <= 1.0:
            raise ValueError(f"DISCOUNT is {discount:g}; allowed: over 0, at most 1")
        if not 1.0 <= trust <= 1e9:
            raise ValueError(f"TRUST is {trust:g}; allowed: 1 to 1e9")
        self._explore, self._discount = explore, discount
        self._last = LastStep(cost)
        n, k = 2 ** np.arange(CONTEXTS)[:, None], np.arange(MAX_DEPTH + 1)
        self.means = geometric(PRIOR) * cost.ms(rows=n, batch=n) / cost.ms(rows=n * (1 + k), batch=n, depth=k)
        self.counts = np.full(self.means.shape, trust)
        self._context, self._arm = 0, 0
        self._sums = np.zeros(2)  # of the hold: request-steps, and their rewards
        self._left = 0

    def decide(self, observation: Observation) -> Decision:
        self._see(observation)
        context = max(observation.running, 1).bit_length() - 1
        if self._left == 0 or abs(context - self._context) > 1:
            self._learn()
            self._context, self._left = min(context, CONTEXTS - 1), HOLD
            self._arm = self.best(self._context)
        if observation.running:
            self._left -= 1
        decision = Decision(np.full(observation.running, self._arm), self._arm)
        self._last.decided(observation, decision)
        return decision

    def best(self, context: int) -> int:
        """The arm with the largest upper bound in `context`; the shortest of equals."""
        counts = self.counts[context]
        bonus = np.sqrt(np.log(1.0 + counts.sum()) / counts)
        return int(np.argmax(self.means[context] + self._explore * bonus))

    def _see(self, observation: Observation) -> None:
        """Keep the gain of the last step if it was all of the present arm's."""
        speed = self._last.speed(observation)
        if speed and speed.drafted == self._arm and abs(speed.verified - self._arm) < 0.5:
            self._sums += speed.requests, speed.requests * speed.gain

    def _learn(self) -> None:
        """The hold that ends now."""
        steps, total = self._sums
        if not steps:
            return
        counts, means = self.counts[self._context], self.means[self._context]
        counts *= self._discount
        np.maximum(counts, LEAST, out=counts)
        counts[self._arm] += steps
        means[self._arm] += (total - steps * means[self._arm]) / counts[self._arm]
        self._sums[:] = 0.0
