"""One speculation length for every request at every load: what servers do today, and the baseline to beat."""

from __future__ import annotations

import numpy as np

from faser.core import Decision, Observation


class Static:
    """Draft and verify `length` tokens always; 0 is no speculation."""

    blind = True

    def __init__(self, length: int) -> None:
        self.length = length

    def decide(self, observation: Observation) -> Decision:
        return Decision(np.full(observation.running, self.length), self.length)
