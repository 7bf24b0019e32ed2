"""The live loop without the engine: who is running, what was drafted, what to do, what came of it.

Knows requests by id and keeps them in a `RequestTable`; the scheduler feeds it. All per-request state of FASER in a
server is here, and `forget` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from faser.acceptance import Predictor
from faser.controller import Controller
from faser.core import MAX_DEPTH, Decision, Floats, Ints, StepOutcome
from faser.costs import StepCost
from faser.requests import RequestTable
from faser.serving.metrics import StepMetrics
from faser.serving.step_log import StepLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A request that decodes in the coming step. arrival: seconds since the epoch; temperature: of its sampling."""

    request_id: str
    context: int
    generated: int
    max_tokens: int
    drafted: int
    arrival: float
    temperature: float
    excluded: bool


class SpeculationLoop:
    """One engine's loop: `decide` before a step, `record` after its verdicts, `draft` after its drafting."""

    def __init__(
        self,
        controller: Controller,
        cost: StepCost,
        *,
        capacity: int,
        log: StepLog | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self.controller = controller
        self.cost = cost
        self._log = log
        self.metrics = StepMetrics()
        self._table = RequestTable(2 * capacity, capacity=capacity, predictor=predictor)
        self._slot: dict[str, int] = {}
        self._free = list(range(2 * capacity))
        self._rows: dict[str, int] = {}  # request id -> row of the step under way
        self._slots: Ints = np.zeros(0, np.int64)
        self._generated: list[int] = []  # output tokens of each row, and context tokens of all, as the step began:
        self._context = 0  # a slot may have a new request before the step is accounted for
        self._depth = 0
        self._waiting = 0
        self._policy = ""
        self._outcome: StepOutcome | None = None
        self._started = self._ended = 0.0
        self._step_ms = 0.0

    def decide(self, rows: Sequence[Row], *, waiting: int, kv_usage: float, prefill_tokens: int) -> Decision:
        """What to do in the step about to run, for `rows` [N]. See `RequestTable.observe` for the rest."""
        now = time.perf_counter()
        self._end_step(now)
        self._started = self._ended = now
        self._slots = slots = np.array([self._slot_of(row) for row in rows], np.int64)
        table = self._table
        table.context[slots] = [row.context for row in rows]
        table.generated[slots] = [row.generated for row in rows]
        table.drafted[slots] = [row.drafted for row in rows]
        table.confidence[slots] *= np.arange(MAX_DEPTH) < table.drafted[slots][:, None]
        observation = table.observe(
            slots,
            self.cost,
            now=time.time(),
            waiting=waiting,
            kv_usage=kv_usage,
            prefill_tokens=prefill_tokens,
            step_ms=self._step_ms,
        )
        decision = self.controller.decide(observation)
        self._policy = self.controller.name
        self.metrics.count_decision(self.controller.tally)
        self._rows = {row.request_id: i for i, row in enumerate(rows)}
        self._generated = [row.generated for row in rows]
        self._context = sum(row.context for row in rows)
        self._depth, self._waiting = decision.draft_depth, waiting
        return decision

    def record(self, verdicts: dict[str, tuple[int, int]], *, prefill_tokens: int) -> None:
        """The step's verdicts, request id -> (verified, accepted), and the prompt tokens that it computed.

        A row without a verdict verified nothing.
        """
        verified = np.zeros(len(self._rows), np.int64)
        accepted = np.zeros(len(self._rows), np.int64)
        for request_id, row in self._rows.items():
            verified[row], accepted[row] = verdicts.get(request_id, (0, 0))
        self._table.record(self._slots, verified, accepted)
        self._ended = time.perf_counter()
        self._outcome = StepOutcome(self._ended - self._started, verified, accepted, self._depth, prefill_tokens)

    def draft(self, rows: Sequence[Row], confidence: Floats) -> None:
        """New drafts at the end of the step: `confidence` [N, depth] of `rows` [N], valid up to its `drafted`."""
        padded = np.zeros((len(rows), MAX_DEPTH), np.float32)
        padded[:, : confidence.shape[1]] = confidence
        drafted = np.array([row.drafted for row in rows], np.int64)
        self._table.draft(np.array([self._slot_of(row) for row in rows], np.int64), padded, drafted)
        self.metrics.count_drafted(int(drafted.sum()))

    def end_of_drafting(self) -> None:
        """The step ends here rather than at `record`."""
        self._ended = time.perf_counter()

    @property
    def tracked(self) -> int:
        """Requests that anything is known of."""
        return len(self._slot)

    def restart(self) -> None:
        """Forget the steps and the verdicts so far; requests are forgotten as they end."""
        self._outcome, self._step_ms = None, 0.0
        self._table.reset(0)

    def forget(self, request_id: str) -> None:
        """Drop all state of a request that has ended in whatever way."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self.metrics.set_tracked(self.tracked)

    def close(self) -> None:
        """End the policy's thread and the log."""
        self._end_step()
        self.controller.close()
        if self._log is not None:
            self._log.close()

    def _end_step(self, now: float | None = None) -> None:
        """Account for the last step. With requests left it took until `now`, when the next begins."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        ended = now if now is not None and self._slot else self._ended
        outcome = replace(outcome, seconds=ended - self._started)
        self._step_ms = 1000.0 * outcome.seconds
        self.metrics.count_step(outcome)
        if self._log is not None:
            self._log.write(
                t=round(time.time() - (time.perf_counter() - self._started), 4),
                ms=round(self._step_ms, 3),
                policy=self._policy,
                running=len(outcome.verified),
                waiting=self._waiting,
                prefill=outcome.prefill_tokens,
                context=self._context,
                depth=outcome.draft_depth,
                verified=outcome.verified.tolist(),
                accepted=outcome.accepted.tolist(),
                request=[*self._rows],
                generated=self._generated,
            )

    def _slot_of(self, row: Row) -> int:
        slot = self._slot.get(row.request_id)
        if slot is not None:
            return slot
        if not self._free:
            self._free.extend(self._table.grow())
        slot = self._slot[row.request_id] = self._free.pop()
        self._table.admit(
            slot,
            context=row.context,
            max_tokens=row.max_tokens,
            arrival=row.arrival,
            excluded=row.excluded,
            temperature=row.temperature,
        )
        self.metrics.set_tracked(self.tracked)
        return slot
