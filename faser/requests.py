"""What is known of each running request, as arrays; the one place where an `Observation` is made.

The simulator and the live engine both keep a `RequestTable` of S slots, so that a policy sees the same numbers in both.
Rows of an observation are the slots that it was asked for, in that order.
"""

from __future__ import annotations

import numpy as np

from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Floats, Ints, Observation
from faser.costs import StepCost

FAST, SLOW = 0.2, 0.02
"""Weight of one drafted token's verdict in the two acceptance averages (about the last 5 and the last 50 tokens)."""

PRIOR, FORGET = 0.6, 0.001
"""Acceptance assumed before an engine's first verdict; and the pull back to it per step without any, so that an
engine that stopped speculating after a hard stretch does not believe in it for ever."""

CONTEXT_SCALE, BUDGET_SCALE = 1024.0, 64.0
"""Tokens at which the features `context` and `budget`, each x / (x + scale), are one half."""


class RequestTable:
    """S slots of per-request state. Slots are chosen by the caller; `admit` resets one.

    confidence: [S, K] float32, drafts' largest softmax probabilities; drafted: [S] how many are valid.
    acceptance_fast, acceptance_slow, last_accepted: [S] see `record`.
    context: [S] tokens in the KV cache; generated, max_tokens: [S] output tokens so far, and at most.
    arrival: [S] seconds, on the caller's clock. excluded: [S] bool, sampled under a grammar, penalties or the like:
    kept out of `acceptance`, the estimate that all share.
    """

    def __init__(self, slots: int, *, capacity: int, latency_target_s: float = 20.0) -> None:
        """capacity: requests that can run at once, the unit of the load features. latency_target_s: see `observe`."""
        self.capacity = capacity
        self.latency_target_s = latency_target_s
        self.acceptance = PRIOR  # mean over the engine's verdicts; where a new request starts
        self.confidence = np.zeros((slots, MAX_DEPTH), np.float32)
        self.drafted = np.zeros(slots, np.int64)
        self.acceptance_fast = np.zeros(slots, np.float32)
        self.acceptance_slow = np.zeros(slots, np.float32)
        self.last_accepted = np.zeros(slots, np.float32)
        self.context = np.zeros(slots, np.int64)
        self.generated = np.zeros(slots, np.int64)
        self.max_tokens = np.ones(slots, np.int64)
        self.arrival = np.zeros(slots, np.float64)
        self.excluded = np.zeros(slots, np.bool_)

    def admit(self, slot: int, *, context: int, max_tokens: int, arrival: float, excluded: bool = False) -> None:
        """Start a request in `slot`: `context` prompt tokens, at most `max_tokens` to come, arrived at `arrival` s."""
        self.confidence[slot] = 0.0
        self.drafted[slot] = 0
        self.acceptance_fast[slot] = self.acceptance_slow[slot] = self.acceptance
        self.last_accepted[slot] = self.acceptance
        self.context[slot] = context
        self.generated[slot] = 0
        self.max_tokens[slot] = max_tokens
        self.arrival[slot] = arrival
        self.excluded[slot] = excluded

    def grow(self) -> range:
        """Double the slots; returns the new ones."""
        old = len(self.drafted)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, array]))
        return range(old, 2 * old)

    def draft(self, slots: Ints, confidence: Floats, drafted: Ints) -> None:
        """New drafts of `slots` [N]: `confidence` [N, K] (ignored past `drafted` [N])."""
        valid = np.arange(MAX_DEPTH) < drafted[:, None]
        self.confidence[slots] = np.where(valid, confidence, 0.0)
        self.drafted[slots] = drafted

    def record(self, slots: Ints, verified: Ints, accepted: Ints) -> None:
        """Verdicts of one step on `slots` [N]: `accepted` of `verified` drafted tokens.

        Only tokens up to the first rejection were really judged: accepted + 1, or all of them. Each average moves by
        its weight per judged token; a step that verified nothing moves none (it is not 0 % acceptance).
        """
        judged = np.minimum(accepted + 1, verified)
        rate = accepted / np.maximum(judged, 1)
        for average, weight in ((self.acceptance_fast, FAST), (self.acceptance_slow, SLOW)):
            step = 1.0 - (1.0 - weight) ** judged
            average[slots] += step * (rate - average[slots])
        seen = judged > 0
        self.last_accepted[slots] = np.where(seen, accepted / np.maximum(verified, 1), self.last_accepted[slots])
        counted = seen & ~self.excluded[slots]
        tokens = int(judged[counted].sum())
        if tokens:
            mean = float(accepted[counted].sum()) / tokens
            self.acceptance += (1.0 - (1.0 - SLOW) ** (tokens / len(slots))) * (mean - self.acceptance)
        else:
            self.acceptance += FORGET * (PRIOR - self.acceptance)

    def observe(
        self,
        slots: Ints,
        cost: StepCost,
        *,
        now: float,
        waiting: int,
        kv_usage: float,
        prefill_tokens: int,
        step_ms: float,
    ) -> Observation:
        """The observation over `slots` [N]: the requests that decode in the step about to run.

        now: seconds. waiting: queued requests. kv_usage: share of KV blocks in use. prefill_tokens: prompt tokens
        expected in this step. step_ms: duration of the last step (0 before the first).

        Request features: `confidence_j` and their running product `survival_j` (0 past the drafted tokens); `drafted`
        over K; the averages of `record`; `context` and `budget` (output tokens left) as x / (x + scale); `lateness`,
        seconds in system over the latency target, at most 1; `excluded`, 0 or 1.

        Load features: `running` = N / capacity; `waiting` = w / (w + capacity); `kv_usage`; `prefill_share` of the
        rows when nothing is verified; `step_floor`, the cost model's step of one row over the last step (1: as fast as
        when idle). Three numbers carry the cost model, each the survival at which the choice breaks even in tokens per
        ms: `verify_cost`, one more row at no speculation, N x (ms of a row) / (ms of the step); `verify_cost_full`, the
        same when every request verifies K; `draft_cost`, one more draft step, (its ms) / (ms of the step).
        """
        n = len(slots)
        requests = np.empty((n, len(REQUEST_FEATURES)), np.float32)
        requests[:, :MAX_DEPTH] = self.confidence[slots]
        np.cumprod(requests[:, :MAX_DEPTH], axis=1, out=requests[:, MAX_DEPTH : 2 * MAX_DEPTH])
        context = self.context[slots]
        budget = np.maximum(self.max_tokens[slots] - self.generated[slots], 0)
        late = (now - self.arrival[slots]) / self.latency_target_s
        columns = (
            self.drafted[slots] / MAX_DEPTH,
            self.acceptance_fast[slots],
            self.acceptance_slow[slots],
            self.last_accepted[slots],
            context / (context + CONTEXT_SCALE),
            budget / (budget + BUDGET_SCALE),
            np.minimum(late, 1.0),
            self.excluded[slots],
        )
        for i, column in enumerate(columns, start=2 * MAX_DEPTH):
            requests[:, i] = column
        rows = max(n + prefill_tokens, 1)
        total = int(context.sum())
        load = np.array(
            [
                n / self.capacity,
                waiting / (waiting + self.capacity),
                kv_usage,
                prefill_tokens / rows,
                cost.step_ms(rows=1, batch=1) / step_ms if step_ms > 0 else 1.0,
                *cost.break_even(batch=max(n, 1), prefill_tokens=prefill_tokens, context=total),
            ],
            np.float32,
        )
        assert len(load) == len(LOAD_FEATURES)
        return Observation(np.clip(requests, 0.0, 1.0, out=requests), np.clip(load, 0.0, 1.0, out=load))
