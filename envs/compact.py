"""A small action in place of one length per slot: how sure a token must be, how deep to draft, and the frontier.

One decision: the threshold is a level of a `Discrete`, not a number of a `Box`. Stable-baselines3 takes neither tuples
nor dicts as actions, so a number and two choices cannot be one action without a policy class of one's own, while three
choices in a `MultiDiscrete` train as they are. Nothing is lost: the levels are the ones that `faser.worth.row_price`
tells apart, so `goodput` is one of the policies over these actions, to the bit.

    env = CompactAction(gymnasium.make("faser/Speculation-v0"))
    model = PPO("MlpPolicy", env)
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Floats
from faser.envs.episodes import F, L
from faser.worth import BINS

Actions = NDArray[np.int64]

LEVELS = BINS + 1
"""Thresholds 0, 1 / BINS, ..., 1. At 0 every drafted token is verified, at 1 none."""

SURVIVAL = REQUEST_FEATURES.index("survival_1")


def compact_action(threshold: float, draft_depth: int, frontier: int = 0) -> Actions:
    """[3] the compact action with the level that is nearest to `threshold`. ValueError: a threshold out of [0, 1]."""
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}; allowed: 0 to 1")
    return np.array([round(threshold * BINS), draft_depth, frontier])


def expand(flat: Floats, actions: Actions) -> Actions:
    """[E, S + 2] the actions of `SpeculationEnv` that the compact ones [E, 3] mean, under observations [E, ...].

    A slot's length is the number of its drafted tokens whose survival is over the threshold; survival falls along a
    draft, so these are its first ones. ValueError: not three choices, or a level that is none; depth and frontier are
    checked where they are carried out.
    """
    if actions.shape != (len(flat), 3):
        raise ValueError(f"actions have shape {actions.shape}; {(len(flat), 3)} expected")
    level = actions[:, 0]
    if not 0 <= level.min() <= level.max() < LEVELS:
        raise ValueError(f"threshold levels span {level.min()}..{level.max()}; allowed: 0..{LEVELS - 1}")
    slots = (flat.shape[1] - L) // (F + 1)
    survival = flat[:, : slots * F].reshape(len(flat), slots, F)[:, :, SURVIVAL : SURVIVAL + MAX_DEPTH]
    threshold = (level / BINS).astype(np.float32)
    lengths = np.count_nonzero(survival > threshold[:, None, None], axis=2)
    return np.concatenate([lengths, actions[:, 1:]], axis=1)


class CompactAction(gymnasium.ActionWrapper[Floats, Actions, Actions]):
    """`MultiDiscrete([LEVELS, K + 1, W + 1])`: threshold level, draft depth, frontier; see `expand`.

    Wraps `SpeculationEnv` below anything that changes its observations.
    """

    def __init__(self, env: gymnasium.Env[Floats, Actions]) -> None:
        """ValueError: the spaces of `env` are not those of `SpeculationEnv`."""
        super().__init__(env)
        self.action_space = _space(env.observation_space, env.action_space)
        self._flat: Floats | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Floats, dict[str, Any]]:
        self._flat, info = self.env.reset(seed=seed, options=options)
        return self._flat.copy(), info

    def step(self, action: Actions) -> tuple[Floats, SupportsFloat, bool, bool, dict[str, Any]]:
        self._flat, reward, terminated, truncated, info = super().step(action)
        return self._flat.copy(), reward, terminated, truncated, info

    def action(self, action: Actions) -> Actions:
        """[S + 2] what `action` [3] means now. ResetNeeded: before the first reset."""
        if self._flat is None:
            raise gymnasium.error.ResetNeeded("Cannot call env.step() before calling env.reset()")
        expanded: Actions = expand(self._flat[None], np.asarray(action)[None])[0]
        return expanded


class CompactActionVector(gymnasium.vector.VectorActionWrapper[Floats, Actions, Actions, NDArray[np.float64]]):
    """The same over `SpeculationVectorEnv`: actions [E, 3]."""

    def __init__(self, env: gymnasium.vector.VectorEnv[Floats, Actions, NDArray[np.float64]]) -> None:
        """ValueError: the spaces of `env` are not those of `SpeculationVectorEnv`."""
        super().__init__(env)
        self.single_action_space = _space(env.single_observation_space, env.single_action_space)
        self.action_space = batch_space(self.single_action_space, env.num_envs)
        self._flat: Floats | None = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        self._flat, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]  # its type lacks lists
        return self._flat.copy(), info

    def step(
        self, actions: Actions
    ) -> tuple[Floats, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], dict[str, Any]]:
        self._flat, rewards, terminated, truncated, info = super().step(actions)
        return self._flat.copy(), rewards, terminated, truncated, info

    def actions(self, actions: Actions) -> Actions:
        """[E, S + 2] what `actions` [E, 3] mean now. ResetNeeded: before the first reset."""
        if self._flat is None:
            raise gymnasium.error.ResetNeeded("Cannot call env.step() before calling env.reset()")
        return expand(self._flat, np.asarray(actions))


def _space(seen: gymnasium.Space[Any], native: gymnasium.Space[Any]) -> gymnasium.spaces.MultiDiscrete:
    """The compact space, if `seen` and `native` are an observation and an action space of `SpeculationEnv`."""
    shape = seen.shape or (0,)
    slots, rest = divmod(shape[0] - L, F + 1)
    asked = gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * (max(slots, 0) + 1) + [MAX_FRONTIER + 1])
    if len(shape) != 1 or slots < 1 or rest or native != asked:
        raise ValueError(f"spaces are {seen} and {native}; allowed: those of SpeculationEnv")
    return gymnasium.spaces.MultiDiscrete([LEVELS, MAX_DEPTH + 1, MAX_FRONTIER + 1])
