"""What is known of each running request, as arrays; the one place where an `Observation` is made.

The simulator and the live engine both keep a `RequestTable` of S slots, so that a policy sees the same numbers in both.
Rows of an observation are the slots that it was asked for, in that order. A server has one engine; the simulator runs
E side by side, and what it is told of each is an array [E].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from faser.acceptance import Predictor
from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Floats, Ints, Observation, Observations
from faser.costs import StepCost
from faser.worth import depth_values, row_price

FAST, SLOW = 0.2, 0.02
"""Weight of one drafted token's verdict in the two acceptance averages (about the last 5 and the last 50 tokens)."""

MOVES = tuple(1.0 - (1.0 - weight) ** np.arange(MAX_DEPTH + 1) for weight in (FAST, SLOW))
"""How far each average moves, [K + 1] by the number of judged tokens."""

PRIOR, FORGET = 0.6, 0.001
"""Acceptance assumed before an engine's first verdict; and the pull back to it per step without any, so that an
engine that stopped speculating after a hard stretch does not believe in it for ever."""

GAIN = 0.2
"""Weight of the latest draft in what a request's drafts bring."""

POWERS = np.arange(1, MAX_DEPTH + 1)

CONTEXT_SCALE, BUDGET_SCALE = 1024.0, 64.0
"""Tokens at which the features `context` and `budget`, each x / (x + scale), are one half."""


class RequestTable:
    """S slots of per-request state. Slots are chosen by the caller; `admit` resets one.

    confidence: [S, K] float32, drafts' largest softmax probabilities; drafted: [S] how many are valid.
    acceptance_fast, acceptance_slow, last_accepted: [S] see `record`.
    gain: [S, 2, K] averages, over its drafts, of the survival of the tokens worth verifying, and of how many are.
    context: [S] tokens in the KV cache; generated, max_tokens: [S] output tokens so far, and at most.
    unseen: [S] bool, whether the confidences are not those of the drafts that are there: see `observe`.
    arrival: [S] seconds, on the caller's clock. excluded: [S] bool, sampled under a grammar, penalties or the like:
    kept out of `acceptance`, the estimate that all share.
    """

    def __init__(
        self,
        slots: int,
        *,
        capacity: int,
        engines: int = 1,
        latency_target_s: float = 20.0,
        predictor: Predictor | None = None,
    ) -> None:
        """slots: of all engines. capacity: requests that can run at once in an engine, the unit of the load features.
        latency_target_s: see `observe`. predictor: what confidences are worth; None takes them at their word.
        """
        self.capacity = capacity
        self.latency_target_s = latency_target_s
        self.acceptance = np.full(engines, PRIOR)  # [E] mean over an engine's verdicts; where a new request starts
        self.confidence = np.zeros((slots, MAX_DEPTH), np.float32)
        self.gain = np.zeros((slots, 2, MAX_DEPTH), np.float32)
        self.stepped = np.zeros(slots, np.bool_)  # since it was observed last: looking twice changes nothing
        self.drafted = np.zeros(slots, np.int64)
        self.unseen = np.zeros(slots, np.bool_)
        self.acceptance_fast = np.zeros(slots, np.float32)
        self.acceptance_slow = np.zeros(slots, np.float32)
        self.last_accepted = np.zeros(slots, np.float32)
        self.context = np.zeros(slots, np.int64)
        self.generated = np.zeros(slots, np.int64)
        self.max_tokens = np.ones(slots, np.int64)
        self.arrival = np.zeros(slots, np.float64)
        self.excluded = np.zeros(slots, np.bool_)
        self.temperature = np.zeros(slots, np.float32)
        self.predictor = predictor

    def admit(
        self,
        slot: int | Ints,
        *,
        context: ArrayLike,
        max_tokens: ArrayLike,
        arrival: ArrayLike,
        excluded: ArrayLike = False,
        temperature: ArrayLike = 0.0,
        engine: int | Ints = 0,
    ) -> None:
        """Start a request in `slot`, or in several: `context` prompt tokens, at most `max_tokens` to come, arrived at
        `arrival` s in `engine`.
        """
        self.confidence[slot] = 0.0
        self.drafted[slot] = 0
        self.unseen[slot] = False
        self.acceptance_fast[slot] = self.acceptance_slow[slot] = self.acceptance[engine]
        self.last_accepted[slot] = self.acceptance[engine]
        self.gain[slot, 0] = self.acceptance[engine, None] ** POWERS
        self.gain[slot, 1] = 1.0
        self.context[slot] = context
        self.generated[slot] = 0
        self.max_tokens[slot] = max_tokens
        self.arrival[slot] = arrival
        self.excluded[slot] = excluded
        self.temperature[slot] = temperature
        self.stepped[slot] = True

    def reset(self, engine: int) -> None:
        """Forget what the verdicts of `engine` said of all requests."""
        self.acceptance[engine] = PRIOR

    def grow(self) -> range:
        """Double the slots; returns the new ones."""
        old = len(self.drafted)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and array is not self.acceptance:
                setattr(self, name, np.concatenate([array, array]))
        return range(old, 2 * old)

    def draft(self, slots: Ints, confidence: Floats, drafted: Ints) -> None:
        """New drafts of `slots` [N]: `confidence` [N, K] (ignored past `drafted` [N])."""
        self.confidence[slots] = confidence * (np.arange(MAX_DEPTH) < drafted[:, None])
        self.drafted[slots] = drafted
        self.stepped[slots] = True

    def record(self, slots: Ints, verified: Ints, accepted: Ints, owner: Ints | None = None) -> None:
        """Verdicts of one step on `slots` [N] of the engines `owner` [N]: `accepted` of `verified` drafted tokens.

        Only tokens up to the first rejection were really judged: accepted + 1, or all of them. Each average moves by
        its weight per judged token; a step that verified nothing moves none (it is not 0 % acceptance).
        """
        self.stepped[slots] = True
        judged = np.minimum(accepted + 1, verified)
        rate = accepted / np.maximum(judged, 1)
        for average, moves in zip((self.acceptance_fast, self.acceptance_slow), MOVES, strict=True):
            old = average[slots]
            average[slots] = old + moves[judged] * (rate - old)
        seen = judged > 0
        self.last_accepted[slots] = np.where(seen, accepted / np.maximum(verified, 1), self.last_accepted[slots])
        owner, engines = np.zeros_like(slots) if owner is None else owner, len(self.acceptance)
        counted = seen & ~self.excluded[slots]
        tokens = np.bincount(owner, judged * counted, engines)
        mean = np.bincount(owner, accepted * counted, engines) / np.maximum(tokens, 1)
        requests = np.maximum(np.bincount(owner, ~self.excluded[slots], engines), 1)
        moved = np.where(tokens > 0, 1.0 - (1.0 - SLOW) ** (tokens / requests), FORGET)
        self.acceptance += moved * (np.where(tokens > 0, mean, PRIOR) - self.acceptance)

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
        """The observation of a single engine: `observe_all` with one number in place of each array."""
        numbers = {"now": now, "waiting": waiting, "kv_usage": kv_usage}
        numbers |= {"prefill_tokens": prefill_tokens, "step_ms": step_ms}
        arrays = {name: np.array([value], np.float64) for name, value in numbers.items()}
        return self.observe_all(slots, np.zeros_like(slots), cost, **arrays).of(0)

    def observe_all(
        self,
        slots: Ints,
        owner: Ints,
        cost: StepCost,
        *,
        now: ArrayLike,
        waiting: ArrayLike,
        kv_usage: ArrayLike,
        prefill_tokens: ArrayLike,
        step_ms: ArrayLike,
    ) -> Observations:
        """The observations over `slots` [M], which `owner` [M] sorts by engine: the requests that decode in the step
        about to run. All else is [E].

        now: seconds. waiting: queued requests. kv_usage: share of KV blocks in use. prefill_tokens: prompt tokens
        expected in this step. step_ms: duration of the last step (0 before the first).

        Request features: `confidence_j` and `survival_j`, the chance that the first j are all accepted, by the
        predictor, or without one the running product of the confidences (both 0 past the drafted tokens; of unseen
        drafts what the averages say of any); `drafted` over K; the averages of `record`; `context` and `budget` (output
        tokens left) as x / (x + scale); `lateness`, seconds in system over the latency target, at most 1; `excluded`, 0
        or 1.

        Load features: `running` = N / capacity; `waiting` = w / (w + capacity); `kv_usage`; `prefill_share` of the
        rows when nothing is verified; `step_floor`, the cost model's step of one row over the last step (1: as fast as
        when idle). Three numbers carry the cost model, each the survival at which the choice breaks even in tokens per
        ms: `verify_cost`, one more row at no speculation, N x (ms of a row) / (ms of the step); `verify_cost_full`, the
        same when every request verifies K; `draft_cost`, one more draft step, (its ms) / (ms of the step). And what
        most tokens per ms would ask for, see `faser.worth`: `row_price`, the survival above which to verify, and
        `depth_value_d` for a draft depth of 0 to K.
        """
        context = self.context[slots]
        budget = np.maximum(self.max_tokens[slots] - self.generated[slots], 0)
        late = (np.asarray(now)[owner] - self.arrival[slots]) / self.latency_target_s
        requests = np.empty((len(slots), len(REQUEST_FEATURES)), np.float32)
        requests[:, :MAX_DEPTH] = self.confidence[slots]
        survival = requests[:, MAX_DEPTH : 2 * MAX_DEPTH]
        if self.predictor is None:
            survival[:, 0] = requests[:, 0]
            for j in range(1, MAX_DEPTH):
                np.multiply(survival[:, j - 1], requests[:, j], out=survival[:, j])
        else:
            survival[:] = self.predictor.survival(
                requests[:, :MAX_DEPTH],
                acceptance_fast=self.acceptance_fast[slots],
                acceptance_slow=self.acceptance_slow[slots],
                last_accepted=self.last_accepted[slots],
                temperature=self.temperature[slots],
            )
        if (unseen := self.unseen[slots]).any():
            there = self.drafted[slots[unseen], None] >= POWERS
            rate = self._rate(slots[unseen])
            requests[unseen, :MAX_DEPTH] = rate * there
            survival[unseen] = rate**POWERS * there
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
        n = np.bincount(owner, minlength=len(self.acceptance))
        starts = np.concatenate(([0], n.cumsum()))
        total = np.bincount(owner, context, len(n)).astype(np.float64)
        prefill, waiting, step_ms = (np.asarray(x, np.float64) for x in (prefill_tokens, waiting, step_ms))
        price = row_price(survival, owner, cost, running=n, prefill_tokens=prefill, context=total)
        floor = cost.step_ms(rows=1, batch=1)
        of_load = (
            n / self.capacity,
            waiting / (waiting + self.capacity),
            np.asarray(kv_usage),
            prefill / np.maximum(n + prefill, 1),
            np.where(step_ms > 0, floor / np.maximum(step_ms, 1e-9), 1.0),
            *cost.break_even(batch=np.maximum(n, 1), prefill_tokens=prefill, context=total),
            price,
            *depth_values(self._gains(slots, owner, survival, price, starts), cost, running=n, context=total).T,
        )
        load = np.stack(of_load, axis=1).astype(np.float32)
        assert load.shape[1] == len(LOAD_FEATURES)
        return Observations(np.clip(requests, 0.0, 1.0, out=requests), np.clip(load, 0.0, 1.0, out=load), starts)

    def _rate(self, slots: Ints) -> Floats:
        """[N, 1] what share of any drafted tokens `slots` [N] would accept, by their averages."""
        rate: Floats = 0.5 * (self.acceptance_fast[slots] + self.acceptance_slow[slots])[:, None]
        return rate

    def _gains(
        self, slots: Ints, owner: Ints, survival: Floats, price: NDArray[np.float64], starts: Ints
    ) -> NDArray[np.float64]:
        """[E, 2, K] what each place of a draft brings to all requests of an engine: see `depth_values`.

        Each request's averages move by what was just drafted for it, and for the places beyond by what its acceptance
        says of them. An engine without requests is as if one came, like those before it.
        """
        guess = self._rate(slots) ** POWERS
        worth = np.where(self.drafted[slots][:, None] >= POWERS, survival, guess)
        verified = worth > price[owner, None]
        gain = self.gain[slots]
        weight = GAIN * self.stepped[slots][:, None, None]
        gain += weight * (np.stack((worth * verified, verified), axis=1) - gain)
        self.gain[slots] = gain
        self.stepped[slots] = False
        ended = np.concatenate([gain, np.zeros((1, 2, MAX_DEPTH))])  # so that starts may be at the end
        sums = np.add.reduceat(ended, starts[:-1], axis=0)
        empty = (starts[1:] == starts[:-1])[:, None, None]
        coming = self.acceptance[:, None] ** POWERS
        return np.where(empty, np.stack((coming, np.ones_like(coming)), axis=1), sums)
