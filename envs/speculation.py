"""`faser/Speculation-v0`: speculation in a loaded LLM server as a Gymnasium environment.

One decision: observation and action are flat arrays over S slots, so that any vector-observation algorithm can train on
it, while `pack` and `unpack` turn them into the `Observation` that every policy of this project takes.
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
    Floats,
    Ints,
    Observation,
    checked,
)
from faser.costs import StepCost
from faser.envs.arrivals import ARRIVALS, Arrivals, sample_trace
from faser.envs.rewards import REWARDS, Reward
from faser.envs.simulator import Simulator, Step, capacity, without_speculation
from faser.envs.summary import Ledger
from faser.models import measured
from faser.tapes import Tape

F, L = len(REQUEST_FEATURES), len(LOAD_FEATURES)


def pack(observation: Observation, slots: Ints, size: int) -> Floats:
    """The flat form [size * F + L + size] float32 of an observation whose rows sit in `slots` [N] of `size` slots."""
    flat = np.zeros(size * F + L + size, np.float32)
    flat[: size * F].reshape(size, F)[slots] = observation.requests
    flat[size * F : size * F + L] = observation.load
    flat[size * F + L :][slots] = 1.0
    return flat


def unpack(flat: Floats) -> tuple[Observation, Ints]:
    """Inverse of `pack`: the observation over present rows, in slot order, and their slots [N]."""
    size, rest = divmod(len(flat) - L, F + 1)
    if rest or flat.ndim != 1:
        raise ValueError(f"observation has shape {flat.shape}; S x {F + 1} + {L} numbers expected")
    slots = np.flatnonzero(flat[size * F + L :] > 0.5)
    return Observation(flat[: size * F].reshape(size, F)[slots], flat[size * F : size * F + L]), slots


class SpeculationEnv(gymnasium.Env[NDArray[np.float32], NDArray[np.int64]]):
    """How far to speculate, for every request of a batch, step by step.

    ## Description
    One step is one step of an LLM engine with continuous batching (`faser.envs.simulator`): it verifies drafted tokens
    of the running requests, computes prompts of new ones in what is left of its budget, and drafts for the next step.
    The clock is a measured cost profile; acceptances and confidences are recorded from real text (`faser.tapes`).

    ## Observation space
    `Box(0, 1, (S * F + L + S,), float32)`, the state before the step; S = slots, K = 7 tokens.

    | entries | content |
    |---|---|
    | S * F | slot after slot, the REQUEST_FEATURES of `faser.core`; 0 for a slot without a decoding request |
    | L | the LOAD_FEATURES of `faser.core` |
    | S | presence: 1 for a slot with a decoding request |

    `RequestTable.observe` says how each feature is made. A slot whose prompt is still being computed is not present. No
    slot need be present: then only the depth matters.

    ## Action space
    `MultiDiscrete([K + 1] * S + [K + 1, W + 1])`

    | entries | content |
    |---|---|
    | S | length: at most how many of the slot's drafted tokens are verified now; more than drafted means all |
    | 1 | draft depth: tokens drafted for every request at the step's end, for the next step |
    | 1 | frontier: NO EFFECT YET, at any value: the simulator does not overlap drafting with verifying |

    Depth and frontier are clamped to `capabilities`. Entries of slots that are not present are ignored.

    ## Rewards
    `objective`, or an object as `reward`. The default `time_in_system` is minus (integral of the number of requests in
    the system over the step) / (that integral over a whole episode without speculation on the same arrivals). So the
    return of an episode is minus the ratio of mean times in system: above -1 is better than no speculation.

    ## Starting state
    An empty engine at the first of `requests` arrivals, drawn anew at each reset. Idle gaps are skipped.

    ## Episode end
    Terminated when every request has finished; truncated after `max_steps`.

    ## Info
    step_ms, tokens (emitted), verified, accepted, depth, lengths (histogram [K + 1] of tokens verified per request),
    running, waiting, time (s), load; at the end also episode_summary: the numbers of `faser.envs.summary.Summary`.

    ## Arguments
    | name | default | meaning |
    |---|---|---|
    | pair | "llama2-13b" | a name of `faser.models`: its cost profile and tape |
    | slots | 64 | requests that run at once |
    | requests | 192 | requests of an episode |
    | load | (0.05, 1.2) | offered load over the capacity without speculation; a range: log-uniform |
    | arrivals | "mixed" | a name in `faser.envs.arrivals.ARRIVALS`, or an `Arrivals` |
    | acceptance | "tape" | the pair's tape, a `Tape`, or a number: i.i.d. acceptance with that probability |
    | part | "train" | half of the tape's requests: "train", "eval", or "all" |
    | objective | "time_in_system" | a name in `faser.envs.rewards.REWARDS` |
    | reward | None | a `Reward` in its place |
    | capabilities | Capabilities() | what the engine can do |
    | max_batched_tokens | 2048 | rows of a step at most |
    | max_steps | 50000 | truncation |
    | cost | None | a `StepCost` in place of the pair's profile |

    `reset(seed=)` fixes everything that follows. `reset(options={"load": x, "seed": n})` sets the load of this episode
    and draws this episode alone from seed n.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # the name and type are Gymnasium's

    def __init__(
        self,
        *,
        pair: str = "llama2-13b",
        slots: int = 64,
        requests: int = 192,
        load: float | tuple[float, float] = (0.05, 1.2),
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
        for name, count in (("slots", slots), ("requests", requests), ("max_steps", max_steps)):
            if count < 1:
                raise ValueError(f"{name} is {count}; allowed: 1 or more")
        if isinstance(arrivals, str) and arrivals not in ARRIVALS:
            raise ValueError(f"arrivals is {arrivals!r}; allowed: {', '.join(ARRIVALS)}, or an object")
        if objective not in REWARDS:
            raise ValueError(f"objective is {objective!r}; allowed: {', '.join(REWARDS)}")
        measured_cost, tape = measured(pair)
        self.load = _load_range(load)
        self.arrivals = ARRIVALS[arrivals] if isinstance(arrivals, str) else arrivals
        self.reward = reward or REWARDS[objective]
        self.capabilities = capabilities or Capabilities()
        self.slots, self.requests, self.max_steps = slots, requests, max_steps
        self.tape = _tape(acceptance, tape, part)
        self.cost = cost or measured_cost
        self.simulator = Simulator(self.tape, self.cost, slots=slots, max_batched_tokens=max_batched_tokens)
        self.capacity = capacity(self.tape, self.cost, slots)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (slots * F + L + slots,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * slots + [MAX_DEPTH + 1, MAX_FRONTIER + 1])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        options = dict(options or {})
        low, high = _load_range(options.pop("load", self.load))
        chosen = options.pop("seed", None)
        if options:
            raise ValueError(f"reset options hold {', '.join(map(repr, options))}; allowed: load, seed")
        rng = self.np_random if chosen is None else np.random.default_rng(chosen)
        self.episode_load = float(np.exp(rng.uniform(np.log(low), np.log(high))))
        rate = self.episode_load * self.capacity
        trace = sample_trace(self.arrivals, rng, self.requests, rate, self.tape)
        self.baseline = without_speculation(self.simulator, trace)
        self.simulator.start(trace)
        self.ledger = Ledger()
        return self._observation(), {"load": self.episode_load, **self._state()}

    def step(self, action: NDArray[np.int64]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        simulator = self.simulator
        lengths = np.asarray(action[: self.slots])[simulator.slots]
        decision = Decision(lengths, int(action[self.slots]), int(action[self.slots + 1]))
        step = simulator.step(checked(decision, len(lengths), self.capabilities))
        self.ledger.add(step.outcome, step.tokens, step.system_s)
        terminated = simulator.done
        truncated = not terminated and self.ledger.steps >= self.max_steps
        info = self._info(step)
        if terminated or truncated:
            info["episode_summary"] = asdict(self.ledger.summary(simulator.time_in_system_s, self.baseline))
        return self._observation(), self.reward(step, self.baseline), terminated, truncated, info

    def _observation(self) -> Floats:
        return pack(self.simulator.observe(), self.simulator.slots, self.slots)

    def _state(self) -> dict[str, Any]:
        simulator = self.simulator
        return {"running": len(simulator.slots), "waiting": simulator.waiting, "time": simulator.now}

    def _info(self, step: Step) -> dict[str, Any]:
        outcome = step.outcome
        return {
            "step_ms": outcome.seconds * 1e3,
            "tokens": step.tokens,
            "verified": int(outcome.verified.sum()),
            "accepted": int(outcome.accepted.sum()),
            "depth": outcome.draft_depth,
            "lengths": np.bincount(outcome.verified, minlength=MAX_DEPTH + 1),
            "load": self.episode_load,
            **self._state(),
        }


def _load_range(load: float | tuple[float, float]) -> tuple[float, float]:
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
