"""The same arrivals without speculation, which every figure is relative to: from event to event, not step by step.

Between an admission and the next, or the end of a request, steps without speculation differ in their context only, and
their time is a sum in closed form. So a baseline takes a hundredth of an episode. Same results as `Engines` with
lengths and depth 0 (a test holds them equal); if the KV cache could run out on the way, it is `Engines` that is asked.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left

import numpy as np

from faser.costs import StepCost
from faser.envs.advance import Doubles
from faser.envs.engines import BLOCK, LOOKAHEAD, Engines
from faser.envs.summary import Baseline
from faser.envs.trace import Trace
from faser.tapes import Tape


def without_speculation(
    trace: Trace,
    tape: Tape,
    cost: StepCost,
    *,
    slots: int = 64,
    max_batched_tokens: int = 2048,
    kv_tokens: int = 131_072,
) -> Baseline:
    """`trace` when nothing is ever drafted. See `Engines` for the rest."""
    replay = _Replay(trace, tape, cost, slots, max_batched_tokens, kv_tokens)
    if replay.run():
        return Baseline(
            system_s=replay.system_s, busy_s=replay.busy_ms / 1e3, requests=len(trace), time_in_system_s=replay.finished
        )
    engines = Engines(tape, cost, slots=slots, max_batched_tokens=max_batched_tokens, kv_tokens=kv_tokens)
    engines.start(0, trace)
    system_s = busy_s = 0.0
    while not engines.done[0]:
        step = engines.step(np.zeros(len(engines.slots), np.int64), np.zeros(1, np.int64))
        system_s += float(step.system_s[0])
        busy_s += float(step.seconds[0])
    finished = engines.time_in_system_s[0, : len(trace)]
    return Baseline(system_s=system_s, busy_s=busy_s, requests=len(trace), time_in_system_s=finished)


class _Replay:
    """One engine at depth 0, its state in plain numbers. Decode steps are counted; a request ends at a known count."""

    def __init__(
        self, trace: Trace, tape: Tape, cost: StepCost, slots: int, max_batched_tokens: int, kv_tokens: int
    ) -> None:
        self.arrival: list[float] = [*trace.arrival.tolist(), float("inf")]
        self.prompt: list[int] = tape.prompt_tokens[trace.row].tolist()
        self.output: list[int] = tape.output_tokens[trace.row].tolist()
        self.longest = max(self.prompt)
        self.slots, self.budget, self.blocks = slots, max_batched_tokens, kv_tokens // BLOCK
        self.verify: list[float] = cost.verify(np.arange(max_batched_tokens + 1)).tolist()
        self.request: list[float] = cost.request(np.arange(2 * slots + 1)).tolist()
        self.context_ms, self.logits_ms, self.host_ms = cost.context_ms, cost.logits_ms, cost.host_ms
        self.now, self.system_s, self.busy_ms = self.arrival[0], 0.0, 0.0
        self.finished: Doubles = np.full(len(trace), np.nan)
        self.full = False  # whether the KV cache might have run out
        self.arrived = self.admitted = self.steps = self.context = self.ended = 0
        self.ends: list[tuple[int, int]] = []  # (count of decode steps at its end, request), a heap
        self.chunk: tuple[int, int] | None = None  # request whose prompt is under way, tokens left of it

    def run(self) -> bool:
        """To the end of the trace; False if the KV cache might run out."""
        self._pass(0.0)
        while self.ended < len(self.prompt):
            if self.arrived == self.ended:  # idle: straight to the next arrival
                self.now = self.arrival[self.arrived]
                self._pass(0.0)
            waiting = self.arrived > self.admitted and self._held() < self.slots
            if self.chunk or waiting:
                self._step()
            else:
                self._leap()
            if self.full:
                return False
        return True

    def _held(self) -> int:
        return len(self.ends) + (self.chunk is not None)

    def _next(self) -> int:
        """Blocks, at most, of prompts that may be admitted in the next step."""
        return (self.budget + int(self.longest)) // BLOCK + 1

    def _step(self) -> None:
        """One step with prompts in it."""
        decoding = len(self.ends)
        room = left = self.budget - decoding
        requests = 0
        ready: list[int] = []
        while left and (self.chunk or (self.arrived > self.admitted and self._held() + len(ready) < self.slots)):
            if self.chunk is None:
                self.chunk = (self.admitted, self.prompt[self.admitted])
                self.admitted += 1
            request, tokens = self.chunk
            done = min(tokens, left)
            left -= done
            requests += 1
            self.chunk = (request, tokens - done) if done < tokens else None
            if self.chunk is None:
                ready.append(request)
        ms = self.verify[decoding + room - left] + self.request[decoding + requests] + self.context_ms * self.context
        ms += self.logits_ms * decoding
        self.steps += 1
        self.context += decoding
        self._pass(max(ms, self.host_ms))
        for request in ready:
            heapq.heappush(self.ends, (self.steps + self.output[request] - 1, request))
            self.context += self.prompt[request]
        self._release()

    def _leap(self) -> None:
        """As many steps as change nothing but the context."""
        n = len(self.ends)
        steps = self.ends[0][0] - self.steps
        first = self.verify[n] + self.request[n] + self.logits_ms * n + self.context_ms * self.context
        more = self.context_ms * n

        def ms(count: int) -> float:
            slow = 0 if first >= self.host_ms or not more else min(count, int(-((first - self.host_ms) // more)))
            if first < self.host_ms and not more:
                return count * self.host_ms
            return slow * self.host_ms + (count - slow) * first + more * (count * (count - 1) - slow * (slow - 1)) / 2

        if n < self.slots and self.arrived < len(self.prompt):  # the first step after an arrival may admit it
            gap = (self.arrival[self.arrived] - self.now) * 1e3
            steps = min(steps, 1 + bisect_left(range(1, steps), gap, key=ms))
        self.steps += steps
        self.context += n * steps
        self._pass(ms(steps))
        self._release()

    def _pass(self, ms: float) -> None:
        self.system_s += (self.arrived - self.ended) * ms / 1e3
        self.busy_ms += ms
        self.now += ms / 1e3
        while self.arrival[self.arrived] <= self.now:
            self.system_s += self.now - self.arrival[self.arrived]
            self.arrived += 1

    def _release(self) -> None:
        # While they are still there: every request at its end has a block that is not full, and one to grow into.
        blocks = self.context // BLOCK + (LOOKAHEAD // BLOCK + 3) * self._held() + self._next()
        self.full |= blocks > self.blocks
        while self.ends and self.ends[0][0] <= self.steps:
            _, request = heapq.heappop(self.ends)
            self.finished[request] = self.now - self.arrival[request]
            self.context -= self.prompt[request] + self.output[request] - 1
            self.ended += 1
