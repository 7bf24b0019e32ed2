"""Many `faser/Speculation-v0` at once: one set of engines side by side, which costs little more than a single one.

`gymnasium.make_vec("faser/Speculation-v0", num_envs=32, ...)` makes it. An episode that ends begins anew in the same
step: its last observation and info are `final_obs` and `final_info`, as Gymnasium's SAME_STEP mode has it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from faser.core import Floats
from faser.envs.episodes import Episodes

Actions = NDArray[np.int64]
Flags = NDArray[np.bool_]


class SpeculationVectorEnv(gymnasium.vector.VectorEnv[Floats, Actions, NDArray[np.float64]]):
    """E = num_envs episodes side by side; arguments, spaces, rewards and info: those of `SpeculationEnv`, [E, ...].

    load, requests: one for all, or a list of E. Seeds: one number n gives n, n + 1, ... to the episodes' generators.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # name and type are theirs

    def __init__(self, num_envs: int = 1, *, render_mode: None = None, **arguments: Any) -> None:
        """ValueError: a bad argument, named, with what is allowed."""
        if render_mode is not None:
            raise ValueError(f"render_mode is {render_mode!r}; allowed: None in a vector; render a single environment")
        self.num_envs = num_envs
        self.episodes = Episodes(engines=num_envs, **arguments)
        self.single_observation_space = self.episodes.observation_space
        self.single_action_space = self.episodes.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rngs = [np.random.default_rng() for _ in range(num_envs)]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        if options:
            raise ValueError(f"reset options hold {', '.join(map(repr, options))}; allowed: none in a vector")
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        for i, one in enumerate(seeds):
            if one is not None:
                self._rngs[i] = gymnasium.utils.seeding.np_random(one)[0]
            self.episodes.begin(i, self._rngs[i])
        return self.episodes.observation(), self.episodes.state()

    def step(  # type: ignore[override]  # Gymnasium has one type for rewards and for flags
        self, actions: Actions
    ) -> tuple[Floats, NDArray[np.float64], Flags, Flags, dict[str, Any]]:
        episodes = self.episodes
        advance, rewards, terminated, truncated = episodes.step(np.asarray(actions))
        info: dict[str, Any] = episodes.info(advance)
        over = np.flatnonzero(terminated | truncated)
        if len(over):
            last = episodes.observation()
            final, summaries = np.full(self.num_envs, None), np.full(self.num_envs, None)
            for i in over.tolist():
                final[i], summaries[i] = last[i], episodes.summary(i)
                episodes.begin(i, self._rngs[i])
            ended = terminated | truncated
            info["final_info"] = {**info, "episode_summary": summaries, "_episode_summary": ended}
            info |= {"_final_info": ended, "final_obs": final, "_final_obs": ended}
        return episodes.observation(), rewards, terminated, truncated, info
