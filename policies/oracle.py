"""A clairvoyant, for the simulator only: it is told which drafted tokens are right.

Myopic-clairvoyant: knowing the truth, it takes the most tokens per ms of this step, and drafts what gives the most in
the next. It is a ceiling for rules of the goodput kind, whose only fault would then be not to know; it is no proof of
optimality. A schedule that knew the truth and the arrivals and looked further ahead could end sooner.

Lengths: all right tokens are alike, so of the R right ones among those drafted, m are verified, m maximising
(N + m) / ms(N + m rows): first ones first. None that would be rejected ever is. Depth: D maximising the same over the
requests of this step that go on, the right tokens of the next step being known too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from faser.core import MAX_DEPTH, Decision, Ints, Observation
from faser.costs import StepCost
from faser.policies.schedule import geometric
from faser.requests import CONTEXT_SCALE, PRIOR

AHEAD = MAX_DEPTH + 2
"""Columns of the truth: now, and after each number of tokens that a step can emit."""


class OraclePolicy:
    """`truth()`: [N, AHEAD] int. For each row of the observation, and from j = 0, 1, ... output tokens further on, how
    many draft tokens in a row are worth verifying: those that are right, but for an output's last one, which the target
    gives anyway. 0 where the first one is wrong, -1 past the end of the output.
    """

    def __init__(self, cost: StepCost, truth: Callable[[], Ints]) -> None:
        self._cost, self._truth = cost, truth

    def decide(self, observation: Observation) -> Decision:
        n, truth = observation.running, self._truth()
        if truth.shape != (n, AHEAD):
            raise ValueError(f"truth has shape {truth.shape}; {(n, AHEAD)} expected")
        held = np.minimum(observation.request("context").astype(np.float64), 0.999)
        context = CONTEXT_SCALE * float((held / (1.0 - held)).sum())
        share = min(observation.of_load("prefill_share"), 0.99)
        right = np.minimum(truth[:, 0], observation.drafted)
        lengths = self._lengths(right, n * share / (1.0 - share), context)
        after = truth[np.arange(n), lengths + 1]
        return Decision(lengths, self._depth(after[after >= 0], context))

    def _lengths(self, right: Ints, prefill: float, context: float) -> Ints:
        """Prompts in the step make its rows dearer, but their own time is spent anyway and prices nothing."""
        n, total = len(right), int(right.sum())
        if not total:
            return np.zeros(n, np.int64)
        extra = np.arange(total + 1)
        rows_ms = self._cost.ms(rows=n + prefill + extra, batch=n, context=context, prefill=prefill)
        start_ms = self._cost.step_ms(rows=n, batch=n, context=context)
        m = int(np.argmax((n + extra) / (rows_ms - rows_ms[0] + start_ms)))
        row, place = np.nonzero(np.arange(MAX_DEPTH) < right[:, None])
        chosen = row[np.argsort(place, kind="stable")[:m]]
        return np.bincount(chosen, minlength=n).astype(np.int64)

    def _depth(self, after: Ints, context: float) -> int:
        """after: right tokens in a row of each request that goes on, after this step."""
        n, depths = len(after), np.arange(MAX_DEPTH + 1)
        if not n:  # only prompts go on, and what will come of them is not known
            return int(np.argmax(geometric(PRIOR) / self._cost.ms(rows=1 + depths, batch=1, depth=depths)))
        gained = (after[:, None] >= depths[1:]).sum(axis=0)
        rows = n + np.concatenate([[0], gained.cumsum()])
        return int(np.argmax(rows / self._cost.ms(rows=rows, batch=n, depth=depths, context=context)))
