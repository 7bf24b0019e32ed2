"""`LiveEngines`: one real engine behind the surface of the simulator's `Engines`, on the wall clock.

One decision: a step is open (its requests added, its observation made, the engine waiting) from the end of the one
before, or from the next arrival if nothing runs. So an action finds the engine where its observation was made, and what
arrives while an agent thinks comes with the next step, as in a server.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from faser.acceptance import shipped_for
from faser.core import Decision, Ints, Observation, Observations
from faser.costs import StepCost
from faser.envs.advance import Advance
from faser.envs.trace import Trace
from faser.models import prepare
from faser.requests import RequestTable
from faser.tapes import Tape

if TYPE_CHECKING:
    from faser.serving.stepwise import Asked, Done, StepwiseEngine


class LiveEngines:
    """One real engine behind the surface of `Engines`: see there for names that are not said here.

    texts: what each request of the trace has written, token ids. tracked: requests that the engine still kept anything
    of when those of the last episode had been dropped.
    """

    count = 1

    def __init__(
        self,
        pair: str,
        tape: Tape,
        cost: StepCost,
        *,
        slots: int,
        max_batched_tokens: int,
        dtype: str,
        greedy: bool,
        latency_target_s: float = 20.0,
    ) -> None:
        self.pair, self.tape, self.cost, self.size = pair, tape, cost, slots
        self.max_batched_tokens, self.dtype, self.greedy = max_batched_tokens, dtype, greedy
        self.latency_target_s = latency_target_s
        self._engine: StepwiseEngine | None = None
        self.tracked = 0
        self._slot: dict[str, int] = {}
        empty = RequestTable(1, capacity=slots)
        nothing: dict[str, Any] = {"now": 0.0, "waiting": 0, "kv_usage": 0.0, "prefill_tokens": 0, "step_ms": 0.0}
        self._idle = empty.observe(np.zeros(0, np.int64), cost, **nothing)
        self._clear(Trace(np.zeros(1), np.zeros(1, np.int64)))

    def start(self, engine: int, trace: Trace) -> None:  # noqa: ARG002  # there is but one
        """Drop what runs, and put the clock at the first arrival of `trace`."""
        if self._engine is not None and self._engine.alive:
            self.tracked = self._engine.drop_all()
        else:
            self._engine = self._launched()
        self._clear(trace)
        self._epoch, self._origin = (clock() - self.now[0] for clock in (time.time, time.monotonic))
        self._open()

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
            self._place(self._idle, [], 0)

    @property
    def started(self) -> bool:
        """Whether there is an engine."""
        return self._engine is not None

    @property
    def done(self) -> NDArray[np.bool_]:
        return np.array([self._finished == len(self._trace)])

    @property
    def waiting(self) -> Ints:
        return np.array([self._waiting])

    @property
    def running(self) -> Ints:
        return np.array([len(self.slots)])

    @property
    def owner(self) -> Ints:
        return np.zeros(len(self.slots), np.int64)

    def observe(self) -> Observations:
        """Of the step that is open; of an empty engine when `done`."""
        starts = np.array([0, len(self.slots)])
        return Observations(self._seen.requests, self._seen.load[None], starts)

    def step(self, lengths: Ints, depth: Ints, frontier: Ints | None = None) -> Advance:
        """As `Engines.step`; returns when the step is over and the next one is open, or all is `done`. frontier: 0."""
        assert frontier is None or not frontier.any()
        if self.done[0]:
            return _standstill()
        assert self._engine is not None
        began, owner = self.now[0], self.owner
        done = self._engine.carry_out(Decision(lengths, int(depth[0])))
        self.now[0] = ended = time.monotonic() - self._origin
        coming = self._trace.arrival[(self._trace.arrival > began) & (self._trace.arrival <= ended)]
        in_system = int(np.searchsorted(self._trace.arrival, began, side="right")) - self._finished
        system_s = in_system * (ended - began) + float((ended - coming).sum())
        finished_s = self._take(done)
        advance = Advance(
            seconds=np.array([ended - began]),
            tokens=np.array([sum(map(len, done.written.values()))]),
            system_s=np.array([system_s]),
            prefill_tokens=np.array([done.prefill_tokens]),
            batch=np.array([done.batch]),
            depth=depth,
            verified=done.verified,
            accepted=done.accepted,
            starts=np.array([0, len(owner)]),
            owner=owner,
            finished=np.zeros(len(finished_s), np.int64),
            finished_s=finished_s,
        )
        self._open()
        return advance

    def _launched(self) -> StepwiseEngine:
        from faser.serving.settings import Settings
        from faser.serving.stepwise import Plan, StepwiseEngine

        pair = prepare(self.pair)
        assert pair.profile is not None  # `measured` has found it
        return StepwiseEngine(
            Plan(
                target=str(pair.target),
                draft=str(pair.draft),
                settings=Settings(
                    policy="none",
                    profile=pair.profile,
                    predictor=shipped_for(pair.tape),
                ),
                cost=self.cost,
                max_batch=self.size,
                max_batched_tokens=self.max_batched_tokens,
                dtype=self.dtype,
            )
        )

    def _clear(self, trace: Trace) -> None:
        """Nothing of `trace` has come."""
        self._trace = trace
        self.now = trace.arrival[:1].copy()
        self.time_in_system_s = np.full((1, len(trace)), np.nan)
        self.texts: list[list[int]] = [[] for _ in range(len(trace))]
        self._sent = self._finished = 0
        self._place(self._idle, [], 0)

    def _open(self) -> None:
        """Wait until there is something to do, and take the next step up to its decision."""
        assert self._engine is not None
        if self.done[0]:
            return self._place(self._idle, [], 0)
        if self._finished == self._sent:
            coming = self._trace.arrival[self._sent]
            time.sleep(max(0.0, coming - (time.monotonic() - self._origin)))
            self.now[0] = max(self.now[0], coming)
        due = int(np.searchsorted(self._trace.arrival, self.now[0], side="right"))
        seen = self._engine.open([self._asked(i) for i in range(self._sent, due)])
        self._sent = due
        return self._place(seen.observation, seen.rows, seen.waiting)

    def _place(self, observation: Observation, rows: list[str], waiting: int) -> None:
        """Give the requests `rows` their slots: those that they had, or the first free ones."""
        had = self._slot
        self._slot = {row: had[row] for row in rows if row in had}
        free = iter(sorted({*range(self.size)} - {*self._slot.values()}))
        self._slot |= {row: next(free) for row in rows if row not in had}
        self.slots: Ints = np.array([self._slot[row] for row in rows], np.int64)
        self._seen, self._waiting = observation, waiting

    def _asked(self, i: int) -> Asked:
        """Request i of the trace."""
        from faser.serving.stepwise import Asked

        row = int(self._trace.row[i])
        return Asked(
            name=str(i),
            prompt=self.tape.text(row)[0],
            max_tokens=int(self.tape.max_tokens[row]),
            temperature=0.0 if self.greedy else float(self.tape.temperature[row]),
            seed=i,
            arrival=float(self._epoch + self._trace.arrival[i]),
        )

    def _take(self, done: Done) -> NDArray[np.float64]:
        """Note what was written and who finished: their times in system."""
        for name, tokens in done.written.items():
            self.texts[int(name)] += tokens
        ended = np.array([int(name) for name in done.finished], np.int64)
        self.time_in_system_s[0, ended] = self.now[0] - self._trace.arrival[ended]
        self._finished += len(ended)
        finished_s: NDArray[np.float64] = self.time_in_system_s[0, ended]
        return finished_s


def _standstill() -> Advance:
    """A step of an engine that is done."""
    none, nothing = np.zeros(1, np.int64), np.zeros(0, np.int64)
    return Advance(
        seconds=np.zeros(1),
        tokens=none,
        system_s=np.zeros(1),
        prefill_tokens=none,
        batch=none,
        depth=none,
        verified=nothing,
        accepted=nothing,
        starts=np.zeros(2, np.int64),
        owner=nothing,
        finished=nothing,
        finished_s=np.zeros(0),
    )
