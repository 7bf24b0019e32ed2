"""The live loop without the engine: who is running, what was drafted, what to do, what came of it.

Knows requests by id and keeps them in a `RequestTable`; the scheduler feeds it. All per-request state of FASER in a
server is here, and `forget` ends it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
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


class Newcomer(NamedTuple):
    """What stays the same of a request. arrival: seconds since the epoch; temperature: of its sampling."""

    max_tokens: int
    arrival: float
    temperature: float
    excluded: bool


class Rows(NamedTuple):
    """N requests that decode in the coming step, or that were just drafted for. Columns: there are many, twice a step.

    newcomer: what stays the same of a row; asked for once a request.
    """

    ids: list[str]
    context: list[int]
    generated: list[int]
    drafted: list[int]
    newcomer: Callable[[int], Newcomer]


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
NOTHING = (0, 0)
"""The verdict of a row that verified nothing."""
PAUSE_MS, PAUSE_MOVE, PAUSE_DRIFT, MOST_PAUSE_MS = 2.0, 0.1, 0.001, 20.0
"""How long a device is taken to stand still between a step and one that waited for it, until measured; the weight of a
measurement; the way back to that at each step that does not wait; and the longest measurement that counts, as longer
ones tell of something else.
"""


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step of N rows, from its decision on. started, ended: on time.perf_counter's clock.

    generated: output tokens of each row and, summed up, context tokens, as it began: a slot may have a new request
    before the step is accounted for. written, drafted: request id -> tokens that it added to the output, drafted at its
    end. outcome: once there are verdicts.
    """

    started: float
    ended: float
    ids: list[str]
    slots: Ints
    generated: list[int]
    context: int
    waiting: int
    kv_usage: float
    depth: int
    fresh: bool
    told: dict[str, Any]
    written: dict[str, tuple[int, bool]] = field(default_factory=dict)
    drafted: dict[str, int] = field(default_factory=dict)
    outcome: StepOutcome | None = None


class SpeculationLoop:
    """One engine's loop: `decide` before a step, `record` after its verdicts, `draft` after its drafting.

    The next step may be decided before the verdicts of this one are there; verdicts come in the order of decisions.
    What a step leaves for people, metrics and log, waits for `account`, which is best called while the GPU works on the
    next one.
    """

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
        self._flying: deque[_Step] = deque()  # decided, without verdicts
        self._step: _Step | None = None  # the last one with verdicts, until the next one has them or begins
        self._ended = 0.0  # when it did
        self._waited_from: float | None = None  # since when the device waits for the step just decided
        self._pause_ms = PAUSE_MS
        self._over: _Step | None = None  # to be accounted for
        self._endings: list[dict[str, Any]] = []  # lines of requests that ended in the step under way
        self._gone: list[dict[str, Any]] = []  # and in the one to be accounted for
        self._step_ms = 0.0
        if arms is not None and arms.split is not None:
            self._write({"kind": "split", "t": round(time.time(), 4), **arms.split.to_json()})

    def decide(self, rows: Rows, *, waiting: int, kv_usage: float, prefill_tokens: int) -> Decision:
        """What to do in the step about to run, for `rows` [N]. See `RequestTable.observe` for the rest.

        With a step under way neither its verdicts are known nor the confidences of the drafts that this one is about.
        """
        now, fresh = time.perf_counter(), not self._flying
        if fresh:
            waited_from = self._ended if self._step is not None and rows.ids else None
            self._end_step(now)
            self._waited_from = waited_from
        else:
            self._pause_ms += PAUSE_DRIFT * (PAUSE_MS - self._pause_ms)
        slots, table = self._slots_of(rows), self._table
        table.unseen[slots] = not fresh
        table.context[slots] = rows.context
        table.generated[slots] = rows.generated
        table.drafted[slots] = rows.drafted
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
        decision = self.controller.decide(observation, rows.ids)
        step = _Step(
            started=now,
            ended=now,
            ids=rows.ids,
            slots=slots,
            generated=rows.generated,
            context=sum(rows.context),
            waiting=waiting,
            kv_usage=kv_usage,
            depth=decision.draft_depth,
            fresh=fresh,
            told=self.controller.told(),
        )
        self._flying.append(step)
        return decision

    def waits(self, requests: int, depth: int, prefill_tokens: int) -> bool:
        """Whether the next decision is better made once the step under way is over, which drafts `depth` tokens for
        each of `requests`: if verifying none of them beside prompts saves more than the device stands still for it.
        """
        if not depth or self.controller.blind:
            return False
        rows = prefill_tokens + np.array((requests, requests * (1 + depth)))
        fewest, most = self.cost.ms(rows=rows, batch=max(requests, 1), prefill=prefill_tokens)
        return bool(most - fewest > self._pause_ms)

    def record(self, verdicts: dict[str, tuple[int, int]], *, prefill_tokens: int) -> None:
        """The step's verdicts, request id -> (verified, accepted), and the prompt tokens that it computed.

        A row without a verdict verified nothing; one of a request that has ended since says nothing of another.
        """
        if self._step is not None:
            self._end_step()
        step = self._step = self._flying.popleft()
        pairs = [verdicts.get(request, NOTHING) for request in step.ids]
        verified, accepted = np.array(pairs, np.int64).reshape(-1, 2).T
        there = [self._slot.get(request) == slot for request, slot in zip(step.ids, step.slots.tolist(), strict=True)]
        slots = step.slots[there]
        self._table.record(slots, verified[there], accepted[there])
        self._sums[1:, slots] += (verified[there], accepted[there])
        step.started = max(step.started, self._ended)
        self._ended = step.ended = time.perf_counter()
        step.outcome = StepOutcome(step.ended - step.started, verified, accepted, step.depth, prefill_tokens)

    def draft(self, rows: Rows, confidence: Floats) -> None:
        """New drafts at the end of the step: `confidence` [N, depth] of `rows` [N], valid up to their `drafted`."""
        padded = np.zeros((len(rows.ids), MAX_DEPTH), np.float32)
        padded[:, : confidence.shape[1]] = confidence
        drafted, slots = np.array(rows.drafted, np.int64), self._slots_of(rows)
        self._table.draft(slots, padded, drafted)
        self._sums[0, slots] += drafted
        if self._step is not None:
            self._step.drafted = dict(zip(rows.ids, rows.drafted, strict=True))
        self.metrics.count_drafted(int(drafted.sum()))

    def wrote(self, tokens: dict[str, tuple[int, bool]]) -> None:
        """What the step added to outputs: request id -> (tokens, whether it goes on). What is accepted past a request's
        end is not in it.
        """
        now = time.time()
        if self._step is not None:
            self._step.written = tokens
        for request, (count, goes_on) in tokens.items():
            if count and goes_on and request not in self._first:
                self._first[request] = now

    def end_of_drafting(self) -> None:
        """The step ends here rather than at `record`."""
        if self._step is not None:
            self._step.ended = time.perf_counter()

    def account(self) -> None:
        """A step has begun: count and log the last one that is over, and who ended in it. Harmless if that is done."""
        if self._waited_from is not None:
            pause_ms = 1000.0 * (time.perf_counter() - self._waited_from)
            if pause_ms <= MOST_PAUSE_MS:
                self._pause_ms += PAUSE_MOVE * (pause_ms - self._pause_ms)
            self._waited_from = None
        self.metrics.count_decision(self.controller.tally)
        step, self._over = self._over, None
        if step is not None and step.outcome is not None:
            self._count(step, step.outcome)
        endings, self._gone = self._gone, []
        for line in endings:
            self._write(line)

    @property
    def tracked(self) -> int:
        """Requests that anything is known of."""
        return len(self._slot)

    def restart(self) -> None:
        """Forget the steps and the verdicts so far; requests are forgotten as they end."""
        self._step_ms = 0.0
        if self._step is not None:
            self._step.outcome = None
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
        self.account()
        self.controller.close()
        if self._log is not None:
            self._log.close()

    def _end_step(self, now: float | None = None) -> None:
        """The step under way is over. With requests left it took until `now`, when the next begins."""
        self.account()  # of the one before, if nobody did
        step, self._step = self._step, None
        if step is not None and step.outcome is not None:
            self._ended = ended = now if now is not None and self._slot else step.ended
            step.outcome = replace(step.outcome, seconds=ended - step.started)
            self._step_ms = 1000.0 * step.outcome.seconds
        self._over = step
        self._gone, self._endings = self._endings, []

    def _count(self, step: _Step, outcome: StepOutcome) -> None:
        written = [step.written.get(request, (0, True))[0] for request in step.ids]
        started = time.time() - (time.perf_counter() - step.started)
        self.metrics.count_step(outcome)
        self.history.add(
            outcome,
            started,
            written=sum(written),
            waiting=step.waiting,
            kv_usage=step.kv_usage,
            policy=step.told["policy"],
            arm=step.told.get("arm") or "",
        )
        for arm, rows in _arm_rows(step.told):
            self.metrics.count_arm(arm, outcome.verified[rows], outcome.accepted[rows])
        if self._log is None and self._arms is None:
            return  # nobody wants a line
        self._write(
            {
                "kind": "step",
                "t": round(started, 4),
                "ms": round(1000.0 * outcome.seconds, 3),
                **step.told,
                "running": len(step.ids),
                "waiting": step.waiting,
                "prefill": outcome.prefill_tokens,
                "context": step.context,
                "depth": step.depth,
                "fresh": step.fresh,
                "verified": outcome.verified.tolist(),
                "accepted": outcome.accepted.tolist(),
                "drafted": [step.drafted.get(request, 0) for request in step.ids],
                "written": written,
                "request": [name[-LONGEST_NAME:] for name in step.ids],
                "generated": step.generated,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        """A line of the log, for whoever wants it."""
        if self._arms is not None and self._arms.split is not None:
            self._arms.records.add(line)
        if self._log is not None:
            self._log.write(**line)
            self.metrics.count_lost(self._log.lost)

    def _slots_of(self, rows: Rows) -> Ints:
        slots = [self._slot.get(request) for request in rows.ids]
        if None in slots:
            slots = [self._admit(rows, i) if slot is None else slot for i, slot in enumerate(slots)]
        return np.array(slots, np.int64)

    def _admit(self, rows: Rows, i: int) -> int:
        if not self._free:
            self._free.extend(self._table.grow())
            self._sums = np.concatenate([self._sums, self._sums], axis=1)
        slot = self._slot[rows.ids[i]] = self._free.pop()
        self._sums[:, slot] = 0
        self._table.admit(slot, context=rows.context[i], **rows.newcomer(i)._asdict())
        self.metrics.set_tracked(self.tracked)
        return slot


def _arm_rows(told: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arms that `told` of a decision names, and an index of the rows of each."""
    if (arm := told.get("arm")) is not None:
        yield arm, slice(None)
    elif arms := told.get("arms"):
        of = np.array(arms)
        for arm in dict.fromkeys(arms):
            yield arm, of == arm
