"""Continuous batching with one-step draft lag, as vLLM V1 runs it, on a measured clock and recorded acceptances.

Two decisions. What is known of running requests lives in the live engine's own `RequestTable`, so that a policy sees
the same numbers in both; simulated are only the scheduler and the clock. And E engines run side by side in one set of
arrays, a step of all at once, since numpy's calls cost more than what a single engine has to compute.

- First come, first served, into S slots. Each step has a budget of rows: decoding requests first (1 + length each), the
  rest for prompts, in chunks; the request whose prompt ends in a step emits its first token in it and gets drafts too.
- The KV cache is blocks of BLOCK tokens. A request is admitted if its prompt fits; a running one takes blocks as it
  grows, LOOKAHEAD tokens ahead. When there are none left, the last admitted gives up its own and goes back to the head
  of the queue, to compute prompt and output again. Nobody is admitted in such a step.
- Lengths apply to what was drafted at the end of the step before; `draft_depth` is drafted at the end of this one.

What differs from vLLM, knowingly: a prompt takes its blocks whole, not chunk by chunk; when rows are short every
decoding request keeps its one; with a draft, vLLM leaves one row a request of a step's budget unused; and what is known
of a request is lost when it gives way.

Symbols: E engines, S slots each, M requests decoding in all of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from faser.acceptance import predictor_of
from faser.core import MAX_DEPTH, Ints, Observations
from faser.costs import StepCost
from faser.envs.advance import Advance, Doubles
from faser.envs.effects import Pruner, Pruning, ahead_ms
from faser.envs.trace import Trace
from faser.policies.oracle import AHEAD
from faser.requests import RequestTable
from faser.tapes import Tape

BLOCK = 16
LOOKAHEAD = MAX_DEPTH
"""Tokens ahead of a request for which vLLM holds blocks: as many as may be drafted."""


class Engines:
    """E engines of S slots over traces of one tape. `start` each, then `observe` and `step` while not all are `done`.

    now [E] s; table: of E x S slots, engine e's from e x S; slots [M]: those that decode in the next step, the rows of
    its observations; owner [M]: their engines; running [E].
    """

    def __init__(
        self,
        tape: Tape,
        cost: StepCost,
        *,
        engines: int = 1,
        slots: int = 64,
        max_batched_tokens: int = 2048,
        kv_tokens: int = 131_072,
        latency_target_s: float = 20.0,
        pruning: Pruning | None = None,
    ) -> None:
        """max_batched_tokens: rows of a step at most. kv_tokens: room in the KV cache. pruning: see
        `faser.envs.effects`. ValueError: cannot work.
        """
        for name, value in (("engines", engines), ("slots", slots)):
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed: 1 or more")
        if max_batched_tokens < slots:
            raise ValueError(f"max_batched_tokens is {max_batched_tokens}; allowed: {slots} (slots) or more")
        longest = int((tape.prompt_tokens + tape.output_tokens).max())
        if kv_tokens // BLOCK < _blocks(longest):
            raise ValueError(
                f"kv_tokens is {kv_tokens}; the longest request needs {BLOCK * _blocks(longest)}, "
                f"{LOOKAHEAD} tokens ahead of it and blocks of {BLOCK}"
            )
        self.tape, self.cost, self.count, self.size = tape, cost, engines, slots
        self.max_batched_tokens, self.kv_blocks = max_batched_tokens, kv_tokens // BLOCK
        self.latency_target_s = latency_target_s
        self._pruner = Pruner(pruning, tape, cost) if pruning is not None else None
        every = engines * slots
        self.table = RequestTable(
            every,
            capacity=slots,
            engines=engines,
            latency_target_s=latency_target_s,
            predictor=predictor_of(tape.target, tape.draft),
        )
        self.now = np.zeros(engines)
        self._total, self._arrived, self._admitted, self._finished = np.zeros((4, engines), np.int64)
        self._arrival = np.full((engines, 1), np.inf)  # [E, n + 1], inf past the last
        self.time_in_system_s = np.full((engines, 1), np.nan)  # [E, n + 1]
        self._row = np.zeros((engines, 1), np.int64)  # [E, n + 1] row of the tape
        self._prompts = np.zeros((engines, 1), np.int64)  # [E, n + 1] prompt tokens of all before
        self._again: dict[int, list[tuple[int, int]]] = {}  # preempted: engine -> (request, tokens written), next last
        self._request = np.zeros(every, np.int64)
        self._base = np.zeros(every, np.int64)  # first tape position
        self._left = np.zeros(every, np.int64)  # output tokens to come
        self._prompt_left = np.zeros(every, np.int64)
        self._blocks = np.zeros(every, np.int64)
        self._whole = np.zeros(every, np.int64)  # blocks of the request at its end
        self._turn = np.zeros(every, np.int64)  # order of admission
        self._turns = 0
        self._free = np.ones((engines, slots), np.bool_)
        self._used = np.zeros(engines, np.int64)
        self._chunk = np.full(engines, -1)  # slot of the one unfinished prompt
        self._decoding = np.zeros(every, np.bool_)
        self._last_ms = np.zeros(engines)
        self._place()

    def start(self, engine: int, trace: Trace) -> None:
        """Put `engine` at the first arrival of `trace`, empty."""
        n, wide = len(trace), self._arrival.shape[1]
        if n + 1 > wide:
            more = ((0, 0), (0, n + 1 - wide))
            self._arrival = np.pad(self._arrival, more, constant_values=np.inf)
            self.time_in_system_s = np.pad(self.time_in_system_s, more, constant_values=np.nan)
            self._row, self._prompts = np.pad(self._row, more), np.pad(self._prompts, more)
        self._arrival[engine], self._arrival[engine, :n] = np.inf, trace.arrival
        self.time_in_system_s[engine] = np.nan
        self._row[engine, :n] = trace.row
        self._prompts[engine, 1 : n + 1] = self.tape.prompt_tokens[trace.row].cumsum()
        self._total[engine] = n
        for counter in (self._arrived, self._admitted, self._finished, self._used, self._last_ms):
            counter[engine] = 0
        self._again.pop(engine, None)
        self._chunk[engine] = -1
        self._free[engine] = True
        self._decoding[engine * self.size : (engine + 1) * self.size] = False
        self.table.reset(engine)
        self.now[engine] = trace.arrival[0]
        self._place()
        self._arrive(np.zeros(self.count))

    @property
    def done(self) -> NDArray[np.bool_]:
        """[E] whether all requests have finished."""
        done: NDArray[np.bool_] = self._finished == self._total
        return done

    @property
    def waiting(self) -> Ints:
        """[E] requests in the queue, those that were preempted among them."""
        waiting = self._arrived - self._admitted
        for engine, requests in self._again.items():
            waiting[engine] += len(requests)
        return waiting

    @property
    def in_system(self) -> Ints:
        """[E] requests that have arrived and not finished."""
        return self._arrived - self._finished

    def observe(self) -> Observations:
        """What policies see before the next step."""
        waiting = self.waiting
        last = np.minimum(self._admitted + np.minimum(waiting, self._free.sum(axis=1)), self._arrived)
        rows = np.arange(self.count)
        pending = self._prompts[rows, last] - self._prompts[rows, self._admitted]
        for engine, requests in self._again.items():
            pending[engine] += sum(self._to_compute(engine, *request) for request in requests)
        chunked = np.flatnonzero(self._chunk >= 0)
        pending[chunked] += self._prompt_left[self._chunk[chunked]]
        return self.table.observe_all(
            self.slots,
            self.owner,
            self.cost,
            now=self.now,
            waiting=waiting,
            kv_usage=self._used / self.kv_blocks,
            prefill_tokens=np.minimum(pending, self.max_batched_tokens - self.running),
            step_ms=self._last_ms,
        )

    def truth(self, engine: int) -> Ints:
        """[N, AHEAD] what `OraclePolicy` documents, of the requests that decode in `engine`."""
        slots = self.slots[self._starts[engine] : self._starts[engine + 1]]
        ahead = np.arange(AHEAD)
        left = self._left[slots][:, None] - ahead
        at = np.where(left > 0, (self._base[slots] + self.table.generated[slots])[:, None] + ahead, 0)
        right: Ints = np.where(left > 0, np.minimum(self.tape.run_lengths[at], left - 1), -1)
        return right

    def step(self, lengths: Ints, depth: Ints, frontier: Ints | None = None) -> Advance:
        """Carry out checked decisions (`faser.core.checked`): lengths [M], depth and frontier (None: 0) [E]. Who is
        done stands still.
        """
        table, tape, e = self.table, self.tape, self.count
        lengths = np.minimum(lengths, table.drafted[self.slots])
        lengths, crowded = self._make_room(lengths)
        slots, owner, starts = self.slots, self.owner, self._starts
        verified = np.bincount(owner, lengths, e).astype(np.int64)
        if (self.running + verified > self.max_batched_tokens).any():
            lengths = self._fit(lengths)
            verified = np.bincount(owner, lengths, e).astype(np.int64)
        rows = self.running + verified
        context = np.bincount(owner, table.context[slots], e)
        prefill, prefilling, ready = self._prefill(self.max_batched_tokens - rows, ~crowded)
        batch = self.running + prefilling  # an engine drafts for every request in the step
        at = self._base[slots] + table.generated[slots]
        right = tape.run_lengths[at]
        accepted = np.minimum(right, lengths)
        asked = {"batch": batch, "depth": depth, "context": context, "prefill": prefill}
        if self._pruner is None:
            emitted = accepted + 1
            ms = self.cost.ms(rows=rows + prefill, **asked)
        else:
            whole = self._pruner.rows(at, lengths, right)
            accepted = np.minimum(accepted, whole)
            emitted = np.minimum(accepted + 1, whole)
            left = np.bincount(owner, whole, e).astype(np.int64)
            ms = self._pruner.ms(rows=rows + prefill, left=left + prefill, drafted=verified, **asked)
        if frontier is not None and frontier.any():
            hit = np.bincount(owner, right <= lengths, e) + prefilling == 0
            ms += ahead_ms(self.cost, frontier=frontier, depth=depth, hit=hit, batch=batch)
        ms[self.done] = 0.0
        emitted = np.minimum(emitted, self._left[slots])
        table.record(slots, lengths, accepted, owner)
        table.context[slots] += emitted
        table.generated[slots] += emitted
        self._left[slots] -= emitted
        table.generated[ready] += 1
        self._left[ready] -= 1
        tokens = np.bincount(owner, emitted, e).astype(np.int64) + np.bincount(ready // self.size, minlength=e)
        system_s = self._arrive(ms)
        finished, finished_s = self._release(np.concatenate((slots, ready)), changed=bool(len(ready)))
        alive = self.slots
        table.draft(alive, tape.probability[self._base[alive] + table.generated[alive]], depth[self.owner])
        self._last_ms = ms
        return Advance(
            seconds=ms / 1e3,
            tokens=tokens,
            system_s=system_s,
            prefill_tokens=prefill,
            batch=batch,
            depth=depth,
            verified=lengths,
            accepted=accepted,
            starts=starts,
            owner=owner,
            finished=finished,
            finished_s=finished_s,
            places=np.stack((at, at + emitted)),
        )

    def _place(self) -> None:
        """Take `slots` and what follows from it from who decodes."""
        self.slots: Ints = np.flatnonzero(self._decoding)
        self.owner: Ints = self.slots // self.size
        self.running: Ints = np.bincount(self.owner, minlength=self.count)
        self._starts = np.concatenate(([0], self.running.cumsum()))

    def _fit(self, lengths: Ints) -> Ints:
        """`lengths` cut, last slots first, so that the rows of decoding requests stay within the step's budget."""
        room = self.max_batched_tokens - self.running
        total = np.concatenate(([0], lengths.cumsum()))
        before = total[:-1] - total[self._starts[self.owner]]
        cut: Ints = np.clip(room[self.owner] - before, 0, lengths)
        return cut

    def _make_room(self, lengths: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Blocks for this step's tokens: the lengths of who still decodes, and [E] where one gave up its own."""
        crowded = np.zeros(self.count, np.bool_)
        while True:
            slots = self.slots
            held = self._blocks[slots]
            needed = np.maximum(np.minimum(_blocks(self.table.context[slots] + lengths), self._whole[slots]), held)
            used = self._used + np.bincount(self.owner, needed - held, self.count).astype(np.int64)
            short = np.flatnonzero(used > self.kv_blocks)
            if not len(short):
                self._blocks[slots], self._used = needed, used
                return lengths, crowded
            crowded[short] = True
            kept = np.ones(len(slots), np.bool_)
            for engine in short:
                slot = self._preempt(int(engine))
                kept[slots == slot] = False
            self._place()
            lengths = lengths[kept]

    def _preempt(self, engine: int) -> int:
        """The last admitted request of `engine` gives up its slot and blocks; returns the slot."""
        held = engine * self.size + np.flatnonzero(~self._free[engine])
        slot = int(held[self._turn[held].argmax()])
        if self._chunk[engine] == slot:
            self._chunk[engine] = -1
        request = int(self._request[slot])
        written = int(self.tape.output_tokens[self._row[engine, request]] - self._left[slot])
        self._again.setdefault(engine, []).append((request, written))
        self._decoding[slot] = False
        self._give_back(np.array([slot]))
        return slot

    def _give_back(self, slots: Ints) -> None:
        """Free `slots` and their blocks."""
        self._free.reshape(-1)[slots] = True
        np.subtract.at(self._used, slots // self.size, self._blocks[slots])
        self._blocks[slots] = 0

    def _prefill(self, room: Ints, may: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """Compute up to `room` [E] prompt tokens, admitting where `may` [E]: how many [E], of how many requests [E],
        and the slots that are complete.
        """
        left, requests, ready = room.copy(), np.zeros(self.count, np.int64), [np.zeros(0, np.int64)]
        while True:
            chunked = self._chunk >= 0
            new = ~chunked & may & self._admissible()
            go = np.flatnonzero((chunked | new) & (left > 0))
            if not len(go):
                return room - left, requests, np.concatenate(ready)
            self._admit(go[new[go]])
            slot = self._chunk[go]
            done = np.minimum(self._prompt_left[slot], left[go])
            self._prompt_left[slot] -= done
            left[go] -= done
            requests[go] += 1
            whole = self._prompt_left[slot] == 0
            self._chunk[go[whole]] = -1
            self._begin(slot[whole])
            ready.append(slot[whole])

    def _admissible(self) -> NDArray[np.bool_]:
        """[E] whether the next waiting request has a slot and blocks."""
        rows, width = np.arange(self.count), self._prompts.shape[1]
        after = np.minimum(self._admitted + 1, width - 1)
        tokens = self._prompts[rows, after] - self._prompts[rows, self._admitted]
        for engine, requests in self._again.items():
            if requests:
                tokens[engine] = self._to_compute(engine, *requests[-1])
        fits = _blocks(tokens - 1) <= self.kv_blocks - self._used  # the next token's room is not asked for yet
        return (self.waiting > 0) & self._free.any(axis=1) & fits

    def _to_compute(self, engine: int, request: int, written: int) -> int:
        """Tokens of a preempted request's prompt and output, which are computed again."""
        return int(self.tape.prompt_tokens[self._row[engine, request]]) + written

    def _admit(self, engines: Ints) -> None:
        """Give the next waiting request of each of `engines` a slot, as the prompt under way."""
        request, written = self._admitted[engines], np.zeros(len(engines), np.int64)
        for i, engine in enumerate(engines.tolist()) if self._again else ():
            if self._again.get(engine):
                request[i], written[i] = self._again[engine].pop()
                self._admitted[engine] -= 1
        self._admitted[engines] += 1
        slot = engines * self.size + self._free[engines].argmax(axis=1)
        row = self._row[engines, request]
        self._free.reshape(-1)[slot] = False
        self._chunk[engines] = slot
        self._request[slot], self._base[slot] = request, self.tape.offsets[row]
        self._left[slot] = self.tape.output_tokens[row] - written
        self._prompt_left[slot] = self.tape.prompt_tokens[row] + written
        self._blocks[slot] = _blocks(self._prompt_left[slot] - 1)
        self._whole[slot] = _blocks(self.tape.prompt_tokens[row] + self.tape.output_tokens[row])
        self._used[engines] += self._blocks[slot]
        self._turn[slot] = self._turns
        self._turns += 1

    def _begin(self, slots: Ints) -> None:
        """The prompts in `slots` are complete; only from here on are they in the table, as in the live engine."""
        if not len(slots):
            return
        engines, requests = slots // self.size, self._request[slots]
        row = self._row[engines, requests]
        written = self.tape.output_tokens[row] - self._left[slots]
        self.table.admit(
            slots,
            context=self.tape.prompt_tokens[row] + written,
            max_tokens=self.tape.max_tokens[row],
            arrival=self._arrival[engines, requests],
            temperature=self.tape.temperature[row],
            engine=engines,
        )
        self.table.generated[slots] = written

    def _arrive(self, ms: Doubles) -> Doubles:
        """Advance the clocks; returns the integrals of the number of requests in the system over that time [E]."""
        rows, seconds = np.arange(self.count), ms / 1e3
        system_s = self.in_system * seconds
        self.now += seconds
        while True:
            coming = self._arrival[rows, self._arrived]
            due = np.flatnonzero(coming <= self.now)
            if not len(due):
                return system_s
            system_s[due] += self.now[due] - coming[due]
            self._arrived[due] += 1

    def _release(self, slots: Ints, *, changed: bool) -> tuple[Ints, Doubles]:
        """Of `slots`, free those with nothing left, the rest decode: the engines of the former, times in system.

        changed: whether some of `slots` did not decode before.
        """
        ended = self._left[slots] == 0
        if not (changed or ended.any()):
            return np.zeros(0, np.int64), np.zeros(0)
        self._decoding[slots] = ~ended
        self._place()
        gone = slots[ended]
        engines, requests = gone // self.size, self._request[gone]
        seconds = self.now[engines] - self._arrival[engines, requests]
        self.time_in_system_s[engines, requests] = seconds
        self._give_back(gone)
        self._finished += np.bincount(engines, minlength=self.count)
        idle = np.flatnonzero((self.in_system == 0) & ~self.done)
        if len(idle):  # straight to the next arrival
            self.now[idle] = self._arrival[idle, self._arrived[idle]]
            self._arrive(np.zeros(self.count))
        return engines, seconds


def _blocks(tokens: NDArray[np.int64] | int) -> Ints:
    """Blocks of a request with `tokens` in the cache, with room for the next one and for LOOKAHEAD more."""
    return -(-(np.asarray(tokens, np.int64) + 1 + LOOKAHEAD) // BLOCK)
