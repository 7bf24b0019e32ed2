"""K from the batch size alone: vLLM's own dynamic speculation (`num_speculative_tokens_per_batch_size`) as a policy.

The best table of this kind needs two measured things: what steps cost, and how many tokens a request gets from a step
at each K. The second is not the powers of an acceptance: right tokens come in runs, and hard requests take more steps.
So it is counted by walking recorded requests (`tokens_per_step`), at every K.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from faser.core import MAX_DEPTH, Decision, Observation
from faser.costs import StepCost
from faser.requests import PRIOR
from faser.tapes import Tape

LARGEST_BATCH = 1024

Doubles = NDArray[np.float64]


def geometric(acceptance: float) -> Doubles:
    """[K + 1] tokens per step at each K when every drafted token is right with probability `acceptance` = a.

    1 + a + ... + a^K = (1 - a^(K + 1)) / (1 - a), from Leviathan et al., arXiv 2211.17192.
    """
    return np.cumsum(acceptance ** np.arange(MAX_DEPTH + 1.0))


def tokens_per_step(tape: Tape) -> Doubles:
    """[K + 1] tokens of a request-step at each K, over the whole of every recorded request.

    Each request starts past its first token, which comes with its prompt: a step at K gets the right ones of K drafted
    tokens and one more, or what is left.
    """
    first, ends = tape.offsets[:-1] + 1, tape.offsets[1:]
    tokens = int((ends - first).sum())
    if not tokens:
        return np.ones(MAX_DEPTH + 1)
    steps = tape.steps_left[:, first[first < ends]].sum(axis=1)
    return np.asarray(tokens / steps, np.float64)


class Schedule:
    """`table[n]` is K for n running requests; the last entry serves any larger batch."""

    blind = True

    def __init__(self, table: Sequence[int]) -> None:
        self.table = list(table)

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
    def from_cost(cls, cost: StepCost, tokens: ArrayLike | None = None, context: float = 0.0) -> Schedule:
        """The table with most tokens per ms: the argmax over K of n x tokens[K] / ms(n (1 + K) rows, K drafted).

        tokens: [K + 1] tokens of a request-step at each K, as of `tokens_per_step` or `geometric`; unless given, those
        of the acceptance that is assumed before any verdict. context: tokens of each request in the KV cache.
        """
        worth = np.asarray(geometric(PRIOR) if tokens is None else tokens, np.float64)
        if worth.shape != (MAX_DEPTH + 1,):
            raise ValueError(f"tokens has shape {worth.shape}; allowed: ({MAX_DEPTH + 1},), one for each K")
        n, k = np.arange(1, LARGEST_BATCH + 1)[:, None], np.arange(MAX_DEPTH + 1)
        best = (n * worth / cost.ms(rows=n * (1 + k), batch=n, depth=k, context=n * context)).argmax(axis=1).tolist()
        return cls([best[0], *best])

    def ranges(self) -> list[tuple[int, int, int]]:
        """(first batch size, last one, K), without gaps; the last K serves any larger batch."""
        changes = [n for n in range(2, len(self.table)) if self.table[n] != self.table[n - 1]]
        starts = [1, *changes]
        ends = [*(n - 1 for n in changes), max(len(self.table) - 1, LARGEST_BATCH)]
        return [(first, last, self.table[first]) for first, last in zip(starts, ends, strict=True)]

    def vllm_option(self) -> str:
        """What vLLM takes as `num_speculative_tokens_per_batch_size`: JSON [[first, last, K], ...]."""
        return json.dumps(self.ranges())

    def __str__(self) -> str:
        """What `parse` takes."""
        return ",".join(f"{first}-{last}={length}" for first, last, length in self.ranges())

    def decide(self, observation: Observation) -> Decision:
        length = self.table[min(observation.running, len(self.table) - 1)]
        return Decision(np.full(observation.running, length), length)
