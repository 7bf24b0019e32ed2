"""Episodes of E engines: what they are drawn from, and what both environments over them do.

One decision: a single environment and a vector of them share all but Gymnasium's bookkeeping, and an episode depends on
its own random generator only, so the same seed gives the same episode in both.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from faser.core import (
    LOAD_FEATURES,
    MAX_DEPTH,
    MAX_FRONTIER,
    REQUEST_FEATURES,
    Capabilities,
    Decision,
    DecisionError,
    Floats,
    Ints,
    checked,
)
from faser.costs import StepCost
from faser.envs.advance import Advance, Doubles
from faser.envs.arrivals import ARRIVALS, Arrivals
from faser.envs.baseline import without_speculation
from faser.envs.effects import Pruning
from faser.envs.engines import Engines
from faser.envs.rewards import REWARDS, Reward, Without
from faser.envs.simulator import capacity
from faser.envs.summary import Baseline, Ledger
from faser.envs.trace import Trace, sample_trace
from faser.models import measured
from faser.tapes import Tape

F, L = len(REQUEST_FEATURES), len(LOAD_FEATURES)

Load = float | tuple[float, float]


class Episodes:
    """The engines, their traces and what came of them. Arguments: those of `SpeculationEnv`, and `engines`.

    load, requests: one for all engines, or a list of E.
    """

    def __init__(
        self,
        *,
        engines: int = 1,
        pair: str = "llama2-13b",
        slots: int = 64,
        requests: int | list[int] = 192,
        load: Load | list[Load] = (0.05, 1.2),
        arrivals: str | Arrivals = "mixed",
        acceptance: str | float | Tape = "tape",
        part: str = "train",
        objective: str = "time_in_system",
        reward: Reward | None = None,
        capabilities: Capabilities | None = None,
        max_batched_tokens: int = 2048,
        max_steps: int = 50_000,
        cost: StepCost | None = None,
    ) -> None:
        self.requests = requests if isinstance(requests, list) else [requests] * engines
        for name, count in (("slots", slots), *(("requests", n) for n in self.requests), ("max_steps", max_steps)):
            if count < 1:
                raise ValueError(f"{name} is {count}; allowed: 1 or more")
        if isinstance(arrivals, str) and arrivals not in ARRIVALS:
            raise ValueError(f"arrivals is {arrivals!r}; allowed: {', '.join(ARRIVALS)}, or an object")
        if objective not in REWARDS:
            raise ValueError(f"objective is {objective!r}; allowed: {', '.join(REWARDS)}")
        measured_cost, tape = measured(pair)
        each: list[Load] = load if isinstance(load, list) else [load] * engines
        self.loads = [load_range(one) for one in each]
        if not len(self.loads) == len(self.requests) == engines:
            counts = f"{len(self.loads)} and {len(self.requests)}"
            raise ValueError(f"load and requests are for {counts} engines; there are {engines}")
        self.arrivals = ARRIVALS[arrivals] if isinstance(arrivals, str) else arrivals
        self.reward = reward or REWARDS[objective]
        self.capabilities = capabilities or Capabilities()
        self.max_steps, self.slots = max_steps, slots
        self.tape = _tape(acceptance, tape, part)
        self.cost = cost or measured_cost
        self._settings = {"slots": slots, "max_batched_tokens": max_batched_tokens}
        pruning = Pruning() if self.capabilities.pruning else None
        self.engines = Engines(self.tape, self.cost, engines=engines, pruning=pruning, **self._settings)
        self.capacity = capacity(self.tape, self.cost, slots)
        self.load = np.zeros(engines)
        self.ledger = Ledger(engines)
        self.traces: list[Trace | None] = [None] * engines
        self._baselines: list[Baseline | None] = [None] * engines
        self._without = Without(np.ones(engines), np.ones(engines), np.ones(engines))
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (slots * F + L + slots,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * slots + [MAX_DEPTH + 1, MAX_FRONTIER + 1])

    def begin(self, engine: int, rng: np.random.Generator, load: tuple[float, float] | None = None) -> None:
        """A new episode of `engine`, drawn from `rng`, at a load of the range given or its own."""
        low, high = load or self.loads[engine]
        chosen = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        trace = sample_trace(self.arrivals, rng, self.requests[engine], chosen * self.capacity, self.tape)
        baseline = without_speculation(trace, self.tape, self.cost, **self._settings)
        self.load[engine], self.traces[engine], self._baselines[engine] = chosen, trace, baseline
        for name in ("system_s", "busy_s", "requests"):
            getattr(self._without, name)[engine] = getattr(baseline, name)
        self.ledger.clear(engine)
        self.engines.start(engine, trace)

    def observation(self) -> Floats:
        """[E, S * F + L + S], see `SpeculationEnv`."""
        seen, engines = self.engines.observe(), self.engines
        return pack_all(seen.requests, seen.load, engines.owner, engines.slots % self.slots, self.slots)

    def step(self, actions: NDArray[np.int64]) -> tuple[Advance, Doubles, NDArray[np.bool_], NDArray[np.bool_]]:
        """Carry out `actions` [E, S + 2]: what happened, rewards, which episodes terminated, which were truncated.

        DecisionError: an action outside of the space.
        """
        engines, s = self.engines, self.slots
        if actions.shape[1:] != (s + 2,):
            raise DecisionError("shape", f"action has shape {actions.shape[1:]}; {(s + 2,)} expected")
        lengths = actions[engines.owner, engines.slots % s]
        chosen = checked(Decision(lengths, 0), len(lengths), self.capabilities)
        for each in {int(actions[:, s + 1].min()), int(actions[:, s + 1].max())}:
            depths = checked(Decision(actions[:, s], 0, each), engines.count, self.capabilities)
        frontier = np.minimum(actions[:, s + 1], self.capabilities.max_frontier)
        advance = engines.step(chosen.lengths, np.minimum(depths.lengths, self.capabilities.max_depth), frontier)
        self.ledger.add(advance)
        terminated = engines.done
        truncated = ~terminated & (self.ledger.steps >= self.max_steps)
        return advance, self.reward(advance, self._without), terminated, truncated

    def info(self, advance: Advance) -> dict[str, NDArray[Any]]:
        """What `SpeculationEnv` documents, [E] or [E, K + 1] each."""
        e, owner = self.engines.count, advance.owner
        lengths = np.bincount(owner * (MAX_DEPTH + 1) + advance.verified, minlength=e * (MAX_DEPTH + 1))
        return {
            "step_ms": advance.seconds * 1e3,
            "tokens": advance.tokens,
            "verified": np.bincount(owner, advance.verified, e).astype(np.int64),
            "accepted": np.bincount(owner, advance.accepted, e).astype(np.int64),
            "depth": advance.depth,
            "lengths": lengths.reshape(e, MAX_DEPTH + 1),
            **self.state(),
        }

    def state(self) -> dict[str, NDArray[Any]]:
        """load, running, waiting and time, [E] each."""
        engines = self.engines
        now = {"load": self.load, "running": engines.running, "waiting": engines.waiting, "time": engines.now}
        return {name: values.copy() for name, values in now.items()}

    def summary(self, engine: int) -> dict[str, Any]:
        """The numbers of `Summary`, of the episode of `engine` so far."""
        trace, baseline = self.traces[engine], self._baselines[engine]
        assert trace is not None
        assert baseline is not None
        times = self.engines.time_in_system_s[engine, : len(trace)]
        return asdict(self.ledger.summary(engine, times, baseline, self.engines.latency_target_s))


def pack_all(requests: Floats, load: Floats, owner: Ints, slots: Ints, size: int) -> Floats:
    """The flat form [E, size * F + L + size] of E observations: `requests` [M, F] sit in `slots` [M] of the engines
    `owner` [M]; load [E, L].
    """
    flat = np.zeros((len(load), size * (F + 1) + L), np.float32)
    flat[:, : size * F].reshape(len(load), size, F)[owner, slots] = requests
    flat[:, size * F : size * F + L] = load
    flat[owner, size * F + L + slots] = 1.0
    return flat


def load_range(load: Load) -> tuple[float, float]:
    """(low, high) of a load or of a range of them. ValueError: not positive, or not increasing."""
    low, high = load if isinstance(load, (tuple, list)) else (load, load)
    if not 0.0 < low <= high < np.inf:
        raise ValueError(f"load is {load}; allowed: a number above 0, or (low, high) with 0 < low <= high")
    return float(low), float(high)


def _tape(acceptance: str | float | Tape, recorded: Tape, part: str) -> Tape:
    if isinstance(acceptance, Tape):
        return acceptance.split(part)
    if isinstance(acceptance, str):
        if acceptance != "tape":
            raise ValueError(f"acceptance is {acceptance!r}; allowed: 'tape', a number from 0 to 1, or a Tape")
        return recorded.split(part)
    return Tape.iid(acceptance).split(part)
