"""K tiers from acceptance averages, with hysteresis (as SGLang's `--speculative-adaptive`, but a request has its own).

What is drafted is a tier for the whole batch. It rises when the mean acceptance says that the next tier's last token
would be accepted more often than RISE, and falls when that is less than FALL for the present one's; the gap between
the two keeps it from flipping. What is verified is each request's own: the longest tier, within what was drafted, whose
last token its own average gives at least FALL. Load is not looked at. Requests that are sampled under rules of their
own (`excluded`) have no say in the tier.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from faser.core import MAX_DEPTH, Decision, Observation

TIERS = (2, 3, 4, 5)
RISE, FALL = 0.15, 0.02
"""Survival of a tier's last token, acceptance ** K, above which it is entered and below which it is left. So low, and
tiers so close, since a row costs little of a step; tried on validation arrivals of the 13B pair, where tiers 1, 3, 5, 7
at 0.5 and 0.35 take 20 % longer.
"""


class Ema:
    """Keeps one number between steps: the batch's tier."""

    blind = True

    def __init__(self, rise: float = RISE, fall: float = FALL, tiers: Sequence[int] = TIERS) -> None:
        """tiers: increasing lengths, 1 to K: at 0 no verdict would ever come again. ValueError: what is wrong."""
        if not 0.0 <= fall <= rise <= 1.0:
            raise ValueError(f"RISE is {rise:g} and FALL {fall:g}; allowed: 0 to 1, FALL at most RISE")
        if not tiers or list(tiers) != sorted({*tiers}) or not 1 <= tiers[0] <= tiers[-1] <= MAX_DEPTH:
            raise ValueError(f"tiers are {', '.join(map(str, tiers))}; allowed: increasing, from 1 to {MAX_DEPTH}")
        self._tiers, self._rise, self._fall = np.array(tiers), rise, fall
        self._tier = min(1, len(tiers) - 1)

    @classmethod
    def parse(cls, text: str) -> Ema:
        """From "RISE:FALL:K,K,..." with any of the last left out. ValueError: what is wrong."""
        match = re.fullmatch(r"(\d?\.?\d+)(?::(\d?\.?\d+)(?::(\d(?:,\d)*))?)?", text)
        if match is None:
            raise ValueError(f"{text!r} is not allowed; allowed: RISE:FALL:K,K,... as in {RISE}:{FALL}:2,3,4,5")
        rise, fall, tiers = match.groups()
        lowest = min(FALL, float(rise)) if fall is None else float(fall)
        return cls(float(rise), lowest, [int(k) for k in tiers.split(",")] if tiers else TIERS)

    def decide(self, observation: Observation) -> Decision:
        acceptance = observation.request("acceptance_fast").astype(np.float64)
        if len(shared := acceptance[observation.request("excluded") == 0]):
            mean, tiers = shared.mean(), self._tiers
            if self._tier + 1 < len(tiers) and mean ** tiers[self._tier + 1] > self._rise:
                self._tier += 1
            elif self._tier > 0 and mean ** tiers[self._tier] < self._fall:
                self._tier -= 1
        held = (acceptance[:, None] ** self._tiers >= self._fall).sum(axis=1)
        lengths = self._tiers[np.maximum(held - 1, 0)]
        return Decision(lengths, int(self._tiers[self._tier]))
