"""What a step of several engines came to: what rewards, sums and environments read, and `Engines` makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.core import Ints

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """One step of all engines.

    seconds, tokens, system_s, prefill_tokens, batch: [E]; tokens emitted, first ones included; system_s the integral
    over the step of the number of requests in the system; batch the requests with rows in it. depth: [E] drafted at its
    end. verified, accepted: [M] of the requests that decoded, those of engine e at rows starts[e] to starts[e + 1],
    owner [M] their engines; see `StepOutcome`. places: [2, M] where on the tape each was as the step began, and as it
    ended; None over live vLLM, whose texts are on none.
    finished: [m] engines of the requests that finished; finished_s: [m] their times in system.
    """

    seconds: Doubles
    tokens: Ints
    system_s: Doubles
    prefill_tokens: Ints
    batch: Ints
    depth: Ints
    verified: Ints
    accepted: Ints
    starts: Ints
    owner: Ints
    finished: Ints
    finished_s: Doubles
    places: Ints | None = None
