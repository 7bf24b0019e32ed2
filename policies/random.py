"""Random lengths and depths, new ones for every request and step: if outputs survive this, they survive any policy."""

from __future__ import annotations

import numpy as np

from faser.core import MAX_DEPTH, Decision, Observation


class Random:
    """Uniform over 0..K, seeded."""

    blind = True

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def decide(self, observation: Observation) -> Decision:
        lengths = self._rng.integers(0, MAX_DEPTH + 1, observation.running)
        return Decision(lengths, int(self._rng.integers(0, MAX_DEPTH + 1)))
