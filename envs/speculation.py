"""`faser/Speculation-v0`: speculation in a loaded LLM server as a Gymnasium environment.

One decision: observation and action are flat arrays over S slots, so that any vector-observation algorithm can train on
it, while `pack` and `unpack` turn them into the `Observation` that every policy of this project takes.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from faser.core import Floats, Ints, Observation
from faser.envs.episodes import Episodes, F, L, load_range, pack_all


def pack(observation: Observation, slots: Ints, size: int) -> Floats:
    """The flat form [size * F + L + size] float32 of an observation whose rows sit in `slots` [N] of `size` slots."""
    flat: Floats = pack_all(observation.requests, observation.load[None], np.zeros_like(slots), slots, size)[0]
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

    def __init__(self, **arguments: Any) -> None:
        self.episodes = Episodes(**arguments)
        self.observation_space = self.episodes.observation_space
        self.action_space = self.episodes.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        options = dict(options or {})
        load = load_range(options.pop("load")) if "load" in options else None
        chosen = options.pop("seed", None)
        if options:
            raise ValueError(f"reset options hold {', '.join(map(repr, options))}; allowed: load, seed")
        self.episodes.begin(0, self.np_random if chosen is None else np.random.default_rng(chosen), load)
        return self.episodes.observation()[0], _of_one(self.episodes.state())

    def step(self, action: NDArray[np.int64]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        advance, reward, terminated, truncated = self.episodes.step(np.asarray(action)[None])
        info = _of_one(self.episodes.info(advance))
        if terminated[0] or truncated[0]:
            info["episode_summary"] = self.episodes.summary(0)
        return self.episodes.observation()[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info


def _of_one(info: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The entries of the only engine, as plain numbers where they are numbers."""
    return {name: value[0].copy() if value.ndim > 1 else value[0].item() for name, value in info.items()}
