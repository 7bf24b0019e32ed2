"""A K tier for the whole batch from its acceptance average, with hysteresis (as SGLang's adaptive speculation does).

The tier rises when the average says that the next one's last token would be accepted more often than not, and falls
when that is clearly untrue of the present one; the gap between the two thresholds keeps it from flipping. Load is
not looked at.
"""

from __future__ import annotations

import numpy as np

from faser.core import Decision, Observation

TIERS = (1, 3, 5, 7)
RISE, FALL = 0.5, 0.35
"""Survival of a tier's last token, acceptance ** K, above which it is entered and below which it is left."""


class Ema:
    """Keeps one number between steps: the tier."""

    def __init__(self) -> None:
        self._tier = 1

    def decide(self, observation: Observation) -> Decision:
        n = observation.running
        if n:
            acceptance = float(observation.request("acceptance_fast").mean())
            if self._tier + 1 < len(TIERS) and acceptance ** TIERS[self._tier + 1] > RISE:
                self._tier += 1
            elif self._tier > 0 and acceptance ** TIERS[self._tier] < FALL:
                self._tier -= 1
        length = TIERS[self._tier]
        return Decision(np.full(n, length), length)
