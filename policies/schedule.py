"""K from the batch size alone: vLLM's own dynamic speculation (`num_speculative_tokens_per_batch_size`) as a policy."""

from __future__ import annotations

import re

import numpy as np

from faser.core import MAX_DEPTH, Decision, Observation
from faser.costs import StepCost
from faser.policies.goodput import best_depth
from faser.requests import PRIOR

LARGEST_BATCH = 1024


class Schedule:
    """`table[n]` is K for n running requests; the last entry serves any larger batch."""

    def __init__(self, table: list[int]) -> None:
        self._table = table

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From "1-8=4,9-64=2": batch sizes from-to = K, no gaps, K = 0 past the last. ValueError names the part."""
        table = [0]
        for part in text.split(","):
            match = re.fullmatch(r"(\d{1,4})-(\d{1,4})=(\d)", part.strip())
            if match is None:
                raise ValueError(f"{part!r} is not FROM-TO=K")
            first, last, length = (int(g) for g in match.groups())
            if first != max(len(table), 1) or last < first or length > MAX_DEPTH:
                raise ValueError(
                    f"{part!r}: FROM must be {max(len(table), 1)}, TO at least FROM and K 0 to {MAX_DEPTH}"
                )
            table += [length] * (last - first + 1)
        table[0] = table[1]
        return cls([*table, 0])

    @classmethod
    def from_cost(cls, cost: StepCost, acceptance: float = PRIOR) -> Schedule:
        """The table with most expected tokens per ms when every token is accepted with probability `acceptance`."""
        survival = acceptance ** np.arange(1, MAX_DEPTH + 1)
        depths = np.arange(MAX_DEPTH + 1)
        table = []
        for n in range(1, LARGEST_BATCH + 1):
            ms = cost.ms(rows=n * (1 + depths), batch=n, depth=depths)
            table.append(best_depth(n, n * survival, ms))
        return cls([table[0], *table])

    def decide(self, observation: Observation) -> Decision:
        length = self._table[min(observation.running, len(self._table) - 1)]
        return Decision(np.full(observation.running, length), length)
