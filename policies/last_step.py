"""How fast the last step was, from observations alone: what bandits are rewarded by.

An observation has neither tokens nor milliseconds in it, but both follow. The cost model's floor over `step_floor` is
the last step's time. A request's tokens are how far its context moved; the sum of context and budget never changes, so
it tells which row of the last observation is which of this one (where requests came or went, rows that share one are
left out). Only requests that are not `excluded` count: what a grammar lets through is no merit of a length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, Decision, Ints, Observation
from faser.costs import StepCost
from faser.requests import BUDGET_SCALE, CONTEXT_SCALE

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one step. gain: its decode tokens per ms over those that the cost model expects without speculation, > 0.

    requests: that decoded in it. verified: tokens verified of each, on average; drafted: at its end.
    """

    gain: float
    requests: int
    verified: float
    drafted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """context, key: [M], of the requests that count; verified: mean of those. requests, total, rows: of all, their
    number, context and rows in the target.
    """

    context: Doubles
    key: Ints
    requests: int
    total: float
    rows: float
    verified: float
    depth: int
    prompts: float


class LastStep:
    """Ask `speed` first, then tell what was `decided`, in each step.

    Contexts are exact up to some 90,000 tokens and budgets up to some 20,000; beyond, float32 features no longer tell
    neighbours apart and rows go unread.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._floor_ms = cost.step_ms(rows=1, batch=1)
        self._before: _Before | None = None

    def decided(self, observation: Observation, decision: Decision) -> None:
        """The step that is about to run."""
        n, share = observation.running, min(observation.of_load("prefill_share"), 0.999)
        context, key = _contexts(observation)
        counted = observation.request("excluded") == 0
        if not counted.any():
            self._before = None
            return
        verified = np.minimum(decision.lengths, observation.drafted)
        self._before = _Before(
            context=context[counted],
            key=key[counted],
            requests=n,
            total=float(context.sum()),
            rows=n + float(verified.sum()),
            verified=float(verified[counted].mean()),
            depth=decision.draft_depth,
            prompts=n * share / (1.0 - share),
        )

    def speed(self, observation: Observation) -> Speed | None:
        """Of the step before `observation`; None if nothing that counts decoded in it, or no request of it is left.

        Its tokens are the mean over the requests that are left, for all. The time of prompts, as the cost model has it,
        is taken off: it was spent whatever was decided.
        """
        before, floor = self._before, observation.of_load("step_floor")
        if before is None or not observation.running or floor <= 0.0:
            return None
        context, key = _contexts(observation)
        counted = observation.request("excluded") == 0
        moved = _moved(before, context[counted], key[counted])
        if not len(moved):
            return None
        n, total = before.requests, before.total
        ms = self._floor_ms / floor
        if before.prompts:
            asked = {"batch": n, "depth": before.depth, "context": total}
            prompts = np.array([before.prompts, 0.0])
            prompts_ms = self._cost.ms(rows=before.rows + prompts, prefill=prompts, **asked)
            ms = max(ms - float(prompts_ms[0] - prompts_ms[1]), 0.1 * self._floor_ms)
        without = n / self._cost.step_ms(rows=n, batch=n, context=total)
        gain = n * float(moved.mean()) / ms / without
        return Speed(gain=gain, requests=n, verified=before.verified, drafted=before.depth)


def _contexts(observation: Observation) -> tuple[Doubles, Ints]:
    """[N] tokens in the KV cache, and [N] what tells requests apart: those and the budget, which add up to the same in
    all steps of a request.
    """
    context = _inverse(observation.request("context"), CONTEXT_SCALE)
    return context, (context + _inverse(observation.request("budget"), BUDGET_SCALE)).astype(np.int64)


def _inverse(share: NDArray[np.float32], scale: float) -> Doubles:
    """x of x / (x + scale), whole."""
    held = np.minimum(share.astype(np.float64), 0.999_999)
    return np.rint(scale * held / (1.0 - held))


def _moved(before: _Before, context: Doubles, key: Ints) -> Doubles:
    """Tokens of the last step, of each request that is in both observations and cannot be taken for another."""
    if np.array_equal(before.key, key):  # nobody came or went
        moved = context - before.context
    else:
        old, old_at, old_count = np.unique(before.key, return_index=True, return_counts=True)
        new, new_at, new_count = np.unique(key, return_index=True, return_counts=True)
        _, i, j = np.intersect1d(old[old_count == 1], new[new_count == 1], assume_unique=True, return_indices=True)
        moved = context[new_at[new_count == 1][j]] - before.context[old_at[old_count == 1][i]]
    return np.asarray(moved[(moved >= 1) & (moved <= MAX_DEPTH + 1)])
