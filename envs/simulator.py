"""Continuous batching with one-step draft lag, as vLLM V1 runs it, on a measured clock and recorded acceptances.

One decision: what is known of running requests lives in the live engine's own `RequestTable`, so that a policy sees the
same numbers in both. What is simulated is only the scheduler and the clock:

- first come, first served, into S slots; each step has a budget of rows: decoding requests first (1 + length each), the
  rest for prompts, in chunks; the request whose prompt ends in a step emits its first token in it and gets drafts too;
- a request is admitted only if its prompt and its largest output fit in the KV cache beside all others. So nothing is
  ever preempted; a real engine admits more eagerly and preempts when it runs out;
- lengths apply to what was drafted at the end of the step before; `draft_depth` is drafted at the end of this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.core import Capabilities, Decision, Ints, Observation, Policy, StepOutcome, checked
from faser.costs import StepCost
from faser.envs.arrivals import Trace
from faser.envs.summary import Baseline, Ledger, Summary
from faser.requests import RequestTable
from faser.tapes import Tape


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated step.

    outcome: rows are the requests that decoded, as in the observation before it. tokens: emitted, first ones included.
    system_s: integral over the step of the number of requests in the system. finished_s: [m] times in system of the
    requests that finished.
    """

    outcome: StepOutcome
    tokens: int
    system_s: float
    finished_s: NDArray[np.float64]


class Simulator:
    """S slots over one `Trace`. `start`, then `observe` and `step` until `done`."""

    def __init__(
        self,
        tape: Tape,
        cost: StepCost,
        *,
        slots: int = 64,
        max_batched_tokens: int = 2048,
        kv_tokens: int = 131_072,
        latency_target_s: float = 20.0,
    ) -> None:
        """max_batched_tokens: rows of a step at most. kv_tokens: room in the KV cache."""
        if slots < 1:
            raise ValueError(f"slots is {slots}; allowed: 1 or more")
        if max_batched_tokens < slots:
            raise ValueError(f"max_batched_tokens is {max_batched_tokens}; allowed: {slots} (slots) or more")
        self._reserve = (tape.prompt_tokens + tape.max_tokens).astype(np.int64)  # KV tokens of a row at most
        if kv_tokens < self._reserve.max():
            raise ValueError(f"kv_tokens is {kv_tokens}; the longest request needs {self._reserve.max()}")
        self.tape, self.cost, self.size = tape, cost, slots
        self.max_batched_tokens, self.kv_tokens = max_batched_tokens, kv_tokens
        self.latency_target_s = latency_target_s

    def start(self, trace: Trace) -> None:
        """Put the clock at the first arrival of `trace`."""
        self.trace = trace
        self.table = RequestTable(self.size, capacity=self.size, latency_target_s=self.latency_target_s)
        self.time_in_system_s = np.full(len(trace), np.nan)
        self.now = float(trace.arrival[0])
        self._arrived = self._admitted = self._finished = 0
        self._prompt = self.tape.prompt_tokens[trace.row].astype(np.int64)
        self._prompts = np.concatenate(([0], self._prompt.cumsum()))
        self._needs = np.concatenate(([0], self._reserve[trace.row].cumsum()))
        self._free = list(range(self.size - 1, -1, -1))
        self._kv_free = self.kv_tokens
        self._request = np.zeros(self.size, np.int64)  # index into the trace
        self._base = np.zeros(self.size, np.int64)  # first tape position
        self._left = np.zeros(self.size, np.int64)  # output tokens to come
        self._chunked: tuple[int, int] | None = None  # slot and prompt tokens left of the one unfinished prompt
        self._last_ms = 0.0
        self.slots: Ints = np.zeros(0, np.int64)
        """Slots that decode in the next step: the rows of its observation."""
        self._arrive()

    @property
    def done(self) -> bool:
        """All requests have finished."""
        return self._finished == len(self.trace)

    @property
    def waiting(self) -> int:
        """Arrived requests without a slot."""
        return self._arrived - self._admitted

    @property
    def in_system(self) -> int:
        """Requests that have arrived and not finished."""
        return self._arrived - self._finished

    def observe(self) -> Observation:
        """What a policy sees before the next step; rows are `slots`."""
        cached = int(self.table.context[self.slots].sum())
        pending = int(self._prompts[self._admitted + self._admissible()] - self._prompts[self._admitted])
        if self._chunked:
            slot, prompt = self._chunked
            pending += prompt
            cached += int(self._prompt[self._request[slot]]) - prompt
        return self.table.observe(
            self.slots,
            self.cost,
            now=self.now,
            waiting=self.waiting,
            kv_usage=cached / self.kv_tokens,
            prefill_tokens=min(pending, self.max_batched_tokens - len(self.slots)),
            step_ms=self._last_ms,
        )

    def step(self, decision: Decision) -> Step:
        """Carry out a checked decision (`faser.core.checked`); `done` must be false."""
        slots, table, tape = self.slots, self.table, self.tape
        lengths = self._fit(np.minimum(decision.lengths, table.drafted[slots]))
        rows = len(slots) + int(lengths.sum())
        context = float(table.context[slots].sum()) if self.cost.context_ms else 0.0
        prefill_tokens, prefilling, ready = self._prefill(self.max_batched_tokens - rows)
        ms = self.cost.step_ms(
            rows=rows + prefill_tokens,
            batch=len(slots) + prefilling,  # an engine drafts for every request in the step
            depth=decision.draft_depth,
            context=context,
        )
        accepted = np.minimum(tape.run_lengths[self._base[slots] + table.generated[slots]], lengths)
        emitted = np.minimum(accepted + 1, self._left[slots])
        table.record(slots, lengths, accepted)
        table.context[slots] += emitted
        if ready:
            slots = np.concatenate((slots, np.array(ready, np.int64)))
            emitted = np.concatenate((emitted, np.ones(len(ready), np.int64)))
        table.generated[slots] += emitted
        self._left[slots] -= emitted
        system_s = self._pass(ms)
        finished_s = self._release(slots)
        alive = self.slots
        drafted = np.full(len(alive), decision.draft_depth)
        table.draft(alive, tape.probability[self._base[alive] + table.generated[alive]], drafted)
        self._last_ms = ms
        outcome = StepOutcome(ms / 1e3, lengths, accepted, decision.draft_depth, prefill_tokens)
        return Step(outcome, int(emitted.sum()), system_s, finished_s)

    def coast(self) -> tuple[float, float]:
        """As many steps without speculation as change nothing but the clock and the lengths, in one go.

        Returns their seconds and `system_s`; (0, 0) when a prompt is to be computed. Same results as `step` with
        lengths and depth 0, but for acceptance averages, much faster: it makes the baseline of an episode cheap.
        """
        slots = self.slots
        if not len(slots) or self._chunked or self._admissible():
            return 0.0, 0.0
        steps = int(self._left[slots].min())
        context = self.table.context[slots].sum() + len(slots) * np.arange(steps)
        ms = self.cost.ms(rows=len(slots), batch=len(slots), context=context)
        ends = self.now + ms.cumsum() / 1e3
        if self._free and self._arrived < len(self.trace):  # the first step after an arrival may admit it
            steps = min(steps, 1 + int(np.searchsorted(ends, self.trace.arrival[self._arrived])))
        self.table.context[slots] += steps
        self.table.generated[slots] += steps
        self._left[slots] -= steps
        self._last_ms, total = float(ms[steps - 1]), float(ms[:steps].sum())
        system_s = self._pass(total)
        self._release(slots)
        return total / 1e3, system_s

    def _fit(self, lengths: Ints) -> Ints:
        """`lengths` cut, last slots first, so that the rows of decoding requests stay within the step's budget."""
        room = self.max_batched_tokens - len(lengths)
        if lengths.sum() <= room:
            return lengths
        before = lengths.cumsum() - lengths
        return np.clip(room - before, 0, lengths)

    def _admissible(self) -> int:
        """Waiting requests that slots and KV cache have room for."""
        waiting = min(self.waiting, len(self._free))
        if not waiting:
            return 0
        needs = self._needs[self._admitted : self._admitted + waiting + 1] - self._needs[self._admitted]
        return int(np.searchsorted(needs, self._kv_free, side="right")) - 1

    def _prefill(self, room: int) -> tuple[int, int, list[int]]:
        """Compute up to `room` prompt tokens: how many, of how many requests, and the slots that are complete."""
        left, requests, ready = room, 0, []
        may_admit = self._admissible()
        while left > 0 and (self._chunked or may_admit):
            if not self._chunked:
                self._chunked = self._admit()
                may_admit -= 1
            slot, prompt = self._chunked
            done = min(prompt, left)
            left -= done
            requests += 1
            self._chunked = (slot, prompt - done) if done < prompt else None
            if not self._chunked:
                self._begin(slot)
                ready.append(slot)
        return room - left, requests, ready

    def _admit(self) -> tuple[int, int]:
        """Give the next waiting request a slot; returns it and its prompt tokens."""
        request, slot = self._admitted, self._free.pop()
        row, prompt = int(self.trace.row[request]), int(self._prompt[request])
        self._admitted += 1
        self._kv_free -= int(self._reserve[row])
        self._request[slot], self._base[slot] = request, self.tape.offsets[row]
        self._left[slot] = self.tape.output_tokens[row]
        return slot, prompt

    def _begin(self, slot: int) -> None:
        """The prompt in `slot` is complete; only from here on is the request in the table, as in the live engine."""
        request = self._request[slot]
        self.table.admit(
            slot,
            context=int(self._prompt[request]),
            max_tokens=int(self.tape.max_tokens[self.trace.row[request]]),
            arrival=float(self.trace.arrival[request]),
        )

    def _pass(self, ms: float) -> float:
        """Advance the clock; returns the integral of the number of requests in the system over that time."""
        present, first = self.in_system, self._arrived
        start, self.now = self.now, self.now + ms / 1e3
        self._arrive()
        late = self.now - self.trace.arrival[first : self._arrived]
        return present * (self.now - start) + float(late.sum())

    def _arrive(self) -> None:
        self._arrived = int(np.searchsorted(self.trace.arrival, self.now, side="right"))

    def _release(self, slots: Ints) -> NDArray[np.float64]:
        """Free those of `slots` with nothing left, keep the rest as `self.slots`; times in system of the former."""
        ended = self._left[slots] == 0
        if not ended.any():
            if len(slots) != len(self.slots):
                self.slots = np.sort(slots)
            return np.zeros(0)
        gone = slots[ended]
        self.slots = np.sort(slots[~ended])
        requests = self._request[gone]
        seconds = self.now - self.trace.arrival[requests]
        self.time_in_system_s[requests] = seconds
        self._free.extend(gone.tolist())
        self._kv_free += int(self._reserve[self.trace.row[requests]].sum())
        self._finished += len(gone)
        if not self.in_system and not self.done:  # idle: go straight to the next arrival
            self.now = float(self.trace.arrival[self._arrived])
            self._arrive()
        return np.asarray(seconds, np.float64)


def without_speculation(simulator: Simulator, trace: Trace) -> Baseline:
    """The same arrivals when nothing is ever drafted; the draft's KV cache is still kept in step, as at depth 0."""
    simulator.start(trace)
    system_s = busy_s = 0.0
    while not simulator.done:
        seconds, in_system = simulator.coast()
        if not seconds:
            step = simulator.step(Decision(np.zeros(len(simulator.slots), np.int64), 0))
            seconds, in_system = step.outcome.seconds, step.system_s
        busy_s += seconds
        system_s += in_system
    return Baseline(system_s=system_s, busy_s=busy_s, requests=len(trace))


def capacity(tape: Tape, cost: StepCost, slots: int) -> float:
    """Requests per second that `slots` slots finish without speculation, when always full.

    Each request takes its mean output length in steps, of S rows and, evenly spread, the prompts of those that follow.
    """
    outputs, prompts = float(tape.output_tokens.mean()), float(tape.prompt_tokens.mean())
    context = slots * (prompts + outputs / 2)
    ms = cost.step_ms(rows=slots * (1.0 + prompts / outputs), batch=slots, context=context)
    return 1e3 * slots / (outputs * ms)


def run(
    policy: Policy,
    trace: Trace,
    tape: Tape,
    cost: StepCost,
    *,
    slots: int = 64,
    max_batched_tokens: int = 2048,
    kv_tokens: int = 131_072,
    capabilities: Capabilities | None = None,
) -> Summary:
    """Replay `trace` under `policy` to its end. A faulty decision raises `DecisionError`."""
    simulator = Simulator(tape, cost, slots=slots, max_batched_tokens=max_batched_tokens, kv_tokens=kv_tokens)
    baseline = without_speculation(simulator, trace)
    simulator.start(trace)
    allowed, ledger = capabilities or Capabilities(), Ledger()
    while not simulator.done:
        decision = policy.decide(simulator.observe())
        step = simulator.step(checked(decision, len(simulator.slots), allowed))
        ledger.add(step.outcome, step.tokens, step.system_s)
    return ledger.summary(simulator.time_in_system_s, baseline)
