"""The live loop without the engine: who is running, what was drafted, what to do, what came of it.

Knows requests by id and keeps them in a `RequestTable`; the scheduler feeds it. All per-request state of FASER in a
server is here, and `forget` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from faser.ab.arms import NOBODY, ArmedController
from faser.acceptance import Predictor
from faser.controller import Controller
from faser.core import MAX_DEPTH, Decision, Floats, Ints, StepOutcome
from faser.costs import StepCost
from faser.live.history import History
from faser.requests import RequestTable
from faser.serving.metrics import StepMetrics
from faser.serving.step_log import StepLog


class Row(NamedTuple):
    """A request that decodes in the coming step. arrival: seconds since the epoch; temperature: of its sampling.

    A tuple, since as many as there are requests are made twice a step.
    """

    request_id: str
    context: int
    generated: int
    max_tokens: int
    drafted: int
    arrival: float
    temperature: float
    excluded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that is over. arrival: seconds since the epoch; prompt, tokens: how many it brought and got.

    excluded: from what is learned of all. texts: more of its line in the log, see `--faser-log-prompts`.
    """

    request_id: str
    arrival: float
    prompt: int
    tokens: int
    status: str
    excluded: bool = False
    texts: dict[str, Any] = field(default_factory=dict)


LONGEST_NAME = 80
"""Of a request, in the log: a client may choose any; its end is vLLM's own."""


class SpeculationLoop:
    """One engine's loop: `decide` before a step, `record` after its verdicts, `draft` after its drafting."""

    def __init__(
        self,
        controller: Controller | ArmedController,
        cost: StepCost,
        *,
        capacity: int,
        log: StepLog | None = None,
        predictor: Predictor | None = None,
        arms: ArmedController | None = None,
    ) -> None:
        """arms: the controller, if it has several."""
        self.controller, self._arms = controller, arms
        self.cost = cost
        self._log = log
        self.metrics = StepMetrics()
        self.history = History()
        self._table = RequestTable(2 * capacity, capacity=capacity, predictor=predictor)
        self._slot: dict[str, int] = {}
        self._sums = np.zeros((3, 2 * capacity), np.int64)  # by slot: tokens drafted, verified, accepted
        self._first: dict[str, float] = {}  # when a request's first token came, seconds since the epoch
        self._free = list(range(2 * capacity))
        self._rows: dict[str, int] = {}  # request id -> row of the step under way
        self._slots: Ints = np.zeros(0, np.int64)
        self._generated: list[int] = []  # output tokens of each row, and context tokens of all, as the step began:
        self._context = 0  # a slot may have a new request before the step is accounted for
        self._drafted: list[int] = []  # at the end of the step, by row
        self._written: list[int] = []  # tokens that it added to outputs, by row
        self._depth = 0
        self._waiting, self._kv_usage = 0, 0.0
        self._told: dict[str, Any] = {"policy": ""}  # of the decision of the step under way
        self._outcome: StepOutcome | None = None
        self._endings: list[dict[str, Any]] = []  # lines of requests that ended in the step under way
        self._started = self._ended = 0.0
        self._step_ms = 0.0
        if arms is not None and arms.split is not None:
            self._write({"kind": "split", "t": round(time.time(), 4), **arms.split.to_json()})

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
        decision = self.controller.decide(observation, [row.request_id for row in rows])
        self._told = self.controller.told()
        self.metrics.count_decision(self.controller.tally)
        self._rows = {row.request_id: i for i, row in enumerate(rows)}
        self._generated = [row.generated for row in rows]
        self._drafted, self._written = [0] * len(rows), [0] * len(rows)
        self._context = sum(row.context for row in rows)
        self._depth, self._waiting, self._kv_usage = decision.draft_depth, waiting, kv_usage
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
        self._sums[1:, self._slots] += (verified, accepted)
        self._ended = time.perf_counter()
        self._outcome = StepOutcome(self._ended - self._started, verified, accepted, self._depth, prefill_tokens)

    def draft(self, rows: Sequence[Row], confidence: Floats) -> None:
        """New drafts at the end of the step: `confidence` [N, depth] of `rows` [N], valid up to its `drafted`."""
        padded = np.zeros((len(rows), MAX_DEPTH), np.float32)
        padded[:, : confidence.shape[1]] = confidence
        drafted = np.array([row.drafted for row in rows], np.int64)
        slots = np.array([self._slot_of(row) for row in rows], np.int64)
        self._table.draft(slots, padded, drafted)
        self._sums[0, slots] += drafted
        for row in rows:
            if (i := self._rows.get(row.request_id)) is not None:
                self._drafted[i] = row.drafted
        self.metrics.count_drafted(int(drafted.sum()))

    def wrote(self, tokens: dict[str, tuple[int, bool]]) -> None:
        """What the step added to outputs: request id -> (tokens, whether it goes on). What is accepted past a request's
        end is not in it.
        """
        now = time.time()
        self._written = [tokens.get(request, (0, True))[0] for request in self._rows]
        for request, (count, goes_on) in tokens.items():
            if count and goes_on and request not in self._first:
                self._first[request] = now

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

    def finish(self, ended: Ended) -> None:
        """Log a request that has ended in whatever way, after the step in which it did, and forget it."""
        now, slot = time.time(), self._slot.get(ended.request_id)
        first = self._first.get(ended.request_id, now) if ended.tokens else None
        drafted, verified, accepted = (0, 0, 0) if slot is None else self._sums[:, slot].tolist()
        line = {
            "kind": "request",
            "t": round(now, 4),
            "request": ended.request_id[-LONGEST_NAME:],
            **(NOBODY if self._arms is None else self._arms.leave(ended.request_id)),
            "arrival": round(ended.arrival, 4),
            "ttft": None if first is None else round(max(first - ended.arrival, 0.0), 4),
            "seconds": round(max(now - ended.arrival, 0.0), 4),
            "prompt": ended.prompt,
            "tokens": ended.tokens,
            "drafted": drafted,
            "verified": verified,
            "accepted": accepted,
            "status": ended.status,
            "excluded": ended.excluded,
            **ended.texts,
        }
        self.forget(ended.request_id)
        self._endings.append(line)

    def forget(self, request_id: str) -> None:
        """Drop all state of a request."""
        self._first.pop(request_id, None)
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
        """Account for the last step and log who ended since. With requests left it took until `now`, when the next
        begins.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            self._count(outcome, now)
        endings, self._endings = self._endings, []
        for line in endings:
            self._write(line)

    def _count(self, outcome: StepOutcome, now: float | None) -> None:
        ended = now if now is not None and self._slot else self._ended
        outcome = replace(outcome, seconds=ended - self._started)
        self._step_ms = 1000.0 * outcome.seconds
        started = time.time() - (time.perf_counter() - self._started)
        self.metrics.count_step(outcome)
        self.history.add(
            outcome,
            started,
            written=sum(self._written),
            waiting=self._waiting,
            kv_usage=self._kv_usage,
            policy=self._told["policy"],
            arm=self._told.get("arm") or "",
        )
        for arm, rows in self._arm_rows():
            self.metrics.count_arm(arm, outcome.verified[rows], outcome.accepted[rows])
        if self._log is None and self._arms is None:
            return  # nobody wants a line
        self._write(
            {
                "kind": "step",
                "t": round(started, 4),
                "ms": round(self._step_ms, 3),
                **self._told,
                "running": len(outcome.verified),
                "waiting": self._waiting,
                "prefill": outcome.prefill_tokens,
                "context": self._context,
                "depth": outcome.draft_depth,
                "verified": outcome.verified.tolist(),
                "accepted": outcome.accepted.tolist(),
                "drafted": self._drafted,
                "written": self._written,
                "request": [name[-LONGEST_NAME:] for name in self._rows],
                "generated": self._generated,
            }
        )

    def _arm_rows(self) -> Iterator[tuple[str, Any]]:
        """The arms of the step under way, and an index of the rows of each."""
        if (arm := self._told.get("arm")) is not None:
            yield arm, slice(None)
        elif arms := self._told.get("arms"):
            of = np.array(arms)
            for arm in dict.fromkeys(arms):
                yield arm, of == arm

    def _write(self, line: dict[str, Any]) -> None:
        """A line of the log, for whoever wants it."""
        if self._arms is not None and self._arms.split is not None:
            self._arms.records.add(line)
        if self._log is not None:
            self._log.write(**line)
            self.metrics.count_lost(self._log.lost)

    def _slot_of(self, row: Row) -> int:
        slot = self._slot.get(row.request_id)
        if slot is not None:
            return slot
        if not self._free:
            self._free.extend(self._table.grow())
            self._sums = np.concatenate([self._sums, self._sums], axis=1)
        slot = self._slot[row.request_id] = self._free.pop()
        self._sums[:, slot] = 0
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
