"""Hold one length and depth for some steps, then the next: what a profile is measured with.

A step's cost depends on this step's length and on this step's depth, and the length is cut to what the step before
drafted. So only a decision that is held shows what it costs; the first step after a change drafts as told but may
verify less.
"""

from __future__ import annotations

import numpy as np

from faser.core import MAX_DEPTH, Decision, Observation

EVERY = 8


class Probe:
    """Walks a seeded order of all (length, depth) with length <= depth, over and over, `hold` steps at each.

    Nothing is drafted at every EVERY-th: that is what all else is weighed against, so every batch has to meet it.
    """

    blind = True

    def __init__(self, hold: int, seed: int) -> None:
        if hold < 1:
            raise ValueError(f"hold is {hold}; allowed: 1 or more")
        pairs = [(length, depth) for depth in range(1, MAX_DEPTH + 1) for length in range(depth + 1)]
        walk = [pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))]
        parts = [walk[i : i + EVERY - 1] for i in range(0, len(walk), EVERY - 1)]
        self._walk = [pair for part in parts for pair in ((0, 0), *part)]
        self._hold = hold
        self._steps = 0

    def decide(self, observation: Observation) -> Decision:
        length, depth = self._walk[self._steps // self._hold % len(self._walk)]
        if observation.running or observation.of_load("prefill_share") > 0.0:
            self._steps += 1  # a step that computes nothing is none of the hold
        return Decision(np.full(observation.running, length), depth)
