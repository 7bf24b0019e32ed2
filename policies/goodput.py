"""Most expected tokens per millisecond: survival x cost (as SmartSpec, 2406.14066, and vLLM's adaptive verification).

The observation carries what it takes (`faser.worth`): the survival above which a row pays for itself in this step, and
the value of each depth for the next. It is myopic: it sees neither the queue nor a request's end.
"""

from __future__ import annotations

import numpy as np

from faser.core import LOAD_FEATURES, MAX_DEPTH, Decision, Observation

DEPTH_VALUES = LOAD_FEATURES.index("depth_value_0")


class Goodput:
    """Stateless."""

    def decide(self, observation: Observation) -> Decision:
        lengths = np.count_nonzero(observation.survival > observation.of_load("row_price"), axis=1)
        values = observation.load[DEPTH_VALUES : DEPTH_VALUES + MAX_DEPTH + 1]
        return Decision(lengths, int(values.argmax()))
