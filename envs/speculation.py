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
from faser.envs.timeline import Picture, Timeline


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
    | 1 | frontier: how many of these are drafted while the step verifies |

    Depth and frontier are clamped to `capabilities`, the frontier to 0 by default: no engine can do that yet, and what
    it and early pruning would bring is known roughly (`faser.envs.effects`). Entries of slots that are not present are
    ignored.

    ## Rewards
    `objective`, or an object as `reward`. The default `time_in_system` is minus (integral of the number of requests in
    the system over the step) / (that integral over a whole episode without speculation on the same arrivals). So the
    return of an episode is minus the ratio of mean times in system: above -1 is better than no speculation.

    ## Starting state
    An empty engine at the first of `requests` arrivals, drawn anew at each reset. Idle gaps are skipped.

    ## Episode end
    Terminated when every request has finished; truncated after `max_steps`.

    ## Info
    | key | from | content |
    |---|---|---|
    | load | reset, step | offered load of the episode over the capacity without speculation |
    | running | reset, step | requests that decode in the next step |
    | waiting | reset, step | requests in the queue |
    | time | reset, step | s on the simulated clock: when the next step starts |
    | step_ms | step | duration of the step, ms |
    | tokens | step | output tokens emitted, all requests together |
    | verified | step | drafted tokens verified |
    | accepted | step | drafted tokens accepted |
    | depth | step | tokens drafted per request at the step's end |
    | lengths | step | int [K + 1]: how many requests verified 0 to K tokens |
    | episode_summary | end | dict: the numbers of `faser.envs.summary.Summary` |

    ## Rendering
    `render_mode="rgb_array"`: `render()` gives uint8 [720, 960, 3], a timeline of the episode so far over simulated
    seconds: requests running and waiting; the share of requests that verified 0 to K tokens, and the depth drafted;
    tokens per second of work. Needs matplotlib (`pip install faser-serve[bench]`). Without a mode steps cost no more.

    ## Arguments
    | name | default | meaning |
    |---|---|---|
    | pair | "llama2-13b" | a name of `faser.models`, or "PROFILE,TAPE": names or files |
    | slots | 64 | requests that run at once |
    | requests | 192 | requests of an episode |
    | load | (0.05, 1.2) | offered load over the capacity without speculation; a range: log-uniform |
    | arrivals | "mixed" | a name in `faser.envs.arrivals.ARRIVALS`, or an `Arrivals` |
    | acceptance | "tape" | the pair's tape, a `Tape`, or a number: i.i.d. acceptance with that probability |
    | part | "train" | half of the tape's requests: "train", "eval", or "all" |
    | objective | "time_in_system" | a name in `faser.envs.rewards.REWARDS` |
    | reward | None | a `Reward` in its place |
    | capabilities | None | what the engine can do: depth, frontier, pruning; None: `Capabilities()` |
    | max_batched_tokens | 2048 | rows of a step at most |
    | max_steps | 50000 | truncation |
    | cost | None | a `StepCost` in place of the pair's profile |
    | render_mode | None | None or "rgb_array"; single environment only |

    `reset(seed=)` fixes everything that follows. `reset(options={"load": x, "seed": n})` sets the load of this episode
    and draws this episode alone from seed n.

    ## Variants
    `gymnasium.make` and `gymnasium.make_vec` take each; arguments given to them come first.

    | id | pair | slots | requests | load |
    |---|---|---|---|---|
    | faser/Speculation-v0 | llama2-13b | 64 | 192 | (0.05, 1.2) |
    | faser/Speculation-smollm2-v0 | smollm2 | 32 | 96 | (0.1, 1.3) |
    | faser/Speculation-llama2-13b-v0 | llama2-13b | 128 | 384 | (0.1, 1.3) |
    | faser/Speculation-mistral-7b-v0 | mistral-7b | 128 | 384 | (0.1, 1.3) |

    `faser.envs.compact.CompactAction` makes of any of them one with three choices a step, for algorithms that cannot
    learn one length per slot.

    ## Version history
    | version | change |
    |---|---|
    | v0 | first release |
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  # theirs

    def __init__(self, *, render_mode: str | None = None, **arguments: Any) -> None:
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode is {render_mode!r}; allowed: None, 'rgb_array'")
        self.render_mode = render_mode
        self._timeline = Timeline() if render_mode else None
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
        info = _of_one(self.episodes.state())
        if self._timeline is not None:
            self._timeline.start(info)
        return self.episodes.observation()[0], info

    def step(self, action: NDArray[np.int64]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        advance, reward, terminated, truncated = self.episodes.step(np.asarray(action)[None])
        info = _of_one(self.episodes.info(advance))
        if self._timeline is not None:
            self._timeline.add(info)
        if terminated[0] or truncated[0]:
            info["episode_summary"] = self.episodes.summary(0)
        return self.episodes.observation()[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> Picture | None:
        """[720, 960, 3] uint8, the episode so far; None, and a warning, without a render mode."""
        if self._timeline is None:
            gymnasium.logger.warn("render() without a render_mode; make the environment with render_mode='rgb_array'")
            return None
        if not self._timeline.started:
            raise gymnasium.error.ResetNeeded("Cannot call env.render() before calling env.reset()")
        return self._timeline.draw()


def _of_one(info: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The entries of the only engine, as plain numbers where they are numbers."""
    return {name: value[0].copy() if value.ndim > 1 else value[0].item() for name, value in info.items()}
