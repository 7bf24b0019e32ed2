"""One simulated engine, or many at once under policies: `Engines` with a decision for each.

`Simulator` is an `Engines` of one, for whoever takes single steps. `replay` runs a policy for each of several traces
side by side to their ends, which is how figures are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.core import Capabilities, Decision, Ints, Observation, Policy, StepOutcome, checked
from faser.costs import StepCost
from faser.envs.advance import Advance
from faser.envs.baseline import without_speculation
from faser.envs.effects import Pruning
from faser.envs.engines import Engines
from faser.envs.summary import Ledger, Summary
from faser.envs.trace import Trace
from faser.tapes import Tape

__all__ = ["Simulator", "Step", "capacity", "replay", "run", "without_speculation"]


@dataclass(frozen=True, slots=True)
class Step:
    """One simulated step.

    outcome: rows are the requests that decoded, as in the observation before it, but for any that gave way. tokens:
    emitted, first ones included. system_s: integral over the step of the number of requests in the system. finished_s:
    [m] times in system of the requests that finished.
    """

    outcome: StepOutcome
    tokens: int
    system_s: float
    finished_s: NDArray[np.float64]

    @classmethod
    def of(cls, advance: Advance, engine: int) -> Step:
        """What happened in one engine."""
        rows = slice(advance.starts[engine], advance.starts[engine + 1])
        outcome = StepOutcome(
            seconds=float(advance.seconds[engine]),
            verified=advance.verified[rows],
            accepted=advance.accepted[rows],
            draft_depth=int(advance.depth[engine]),
            prefill_tokens=int(advance.prefill_tokens[engine]),
        )
        finished_s = advance.finished_s[advance.finished == engine]
        return cls(outcome, int(advance.tokens[engine]), float(advance.system_s[engine]), finished_s)


class Simulator:
    """S slots over one `Trace`. `start`, then `observe` and `step` until `done`. Arguments: those of `Engines`."""

    def __init__(self, tape: Tape, cost: StepCost, **settings: Any) -> None:
        self.engines = Engines(tape, cost, **settings)
        self.tape, self.cost, self.size = tape, cost, self.engines.size

    def start(self, trace: Trace) -> None:
        """Put the clock at the first arrival of `trace`."""
        self.trace = trace
        self.engines.start(0, trace)

    @property
    def slots(self) -> Ints:
        """Slots that decode in the next step: the rows of its observation."""
        return self.engines.slots

    @property
    def now(self) -> float:
        """The clock, s."""
        return float(self.engines.now[0])

    @property
    def done(self) -> bool:
        """All requests have finished."""
        return bool(self.engines.done[0])

    @property
    def waiting(self) -> int:
        """Arrived requests without a slot."""
        return int(self.engines.waiting[0])

    @property
    def in_system(self) -> int:
        """Requests that have arrived and not finished."""
        return int(self.engines.in_system[0])

    @property
    def time_in_system_s(self) -> NDArray[np.float64]:
        """[n] of each request, NaN while it has not finished."""
        return self.engines.time_in_system_s[0, : len(self.trace)]

    def observe(self) -> Observation:
        """What a policy sees before the next step; rows are `slots`."""
        return self.engines.observe().of(0)

    def step(self, decision: Decision) -> Step:
        """Carry out a checked decision (`faser.core.checked`); `done` must be false."""
        depth, frontier = np.array([[decision.draft_depth], [decision.frontier]])
        return Step.of(self.engines.step(np.asarray(decision.lengths), depth, frontier), 0)


def capacity(tape: Tape, cost: StepCost, slots: int) -> float:
    """Requests per second that `slots` slots finish without speculation, when always full.

    Each request takes its mean output length in steps, of S rows and, evenly spread, the prompts of those that follow.
    """
    outputs, prompts = float(tape.output_tokens.mean()), float(tape.prompt_tokens.mean())
    context = slots * (prompts + outputs / 2)
    prefill = slots * prompts / outputs
    ms = cost.step_ms(rows=slots + prefill, batch=slots, context=context, prefill=prefill)
    return 1e3 * slots / (outputs * ms)


Truth = Callable[[], Ints]
"""`Engines.truth` of one engine: what the policy `oracle` is told, and others leave alone."""


def replay(
    make: Callable[[Truth], Policy],
    traces: Sequence[Trace],
    tape: Tape,
    cost: StepCost,
    *,
    capabilities: Capabilities | None = None,
    **settings: Any,
) -> list[Summary]:
    """Each of `traces` to its end under a policy of its own, which `make` builds. A faulty decision raises
    `DecisionError`. settings: those of `Engines`.
    """
    allowed = capabilities or Capabilities()
    pruning = Pruning() if allowed.pruning else None
    engines = Engines(tape, cost, engines=len(traces), pruning=pruning, **settings)
    ledger = Ledger(len(traces))
    policies = [make(partial(engines.truth, i)) for i in range(len(traces))]
    for i, trace in enumerate(traces):
        engines.start(i, trace)
    depth, frontier = np.zeros((2, len(traces)), np.int64)
    while len(live := np.flatnonzero(~engines.done)):
        seen = engines.observe()
        lengths = np.zeros(len(seen.requests), np.int64)
        for i in live.tolist():
            decision = checked(policies[i].decide(seen.of(i)), int(engines.running[i]), allowed)
            lengths[seen.starts[i] : seen.starts[i + 1]] = decision.lengths
            depth[i], frontier[i] = decision.draft_depth, decision.frontier
        ledger.add(engines.step(lengths, depth, frontier))
    return [
        ledger.summary(
            i,
            engines.time_in_system_s[i, : len(trace)],
            without_speculation(trace, tape, cost, **settings),
            engines.latency_target_s,
        )
        for i, trace in enumerate(traces)
    ]


def run(policy: Policy, trace: Trace, tape: Tape, cost: StepCost, **settings: Any) -> Summary:
    """`replay` of one trace."""
    return replay(lambda _: policy, [trace], tape, cost, **settings)[0]
