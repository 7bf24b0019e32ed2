"""The environments that a training run learns in.

The decision: each environment keeps to its own band of load. Were the load drawn anew for each episode, quiet episodes,
which are ten times as long, would fill nearly all of PPO's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

import faser.envs  # noqa: F401  # registers the environment
from faser.core import MAX_DEPTH, MAX_FRONTIER
from faser.models import measured
from faser.train.network import F, L
from faser.train.presets import PRESETS
from faser.train.shaping import TokenPaid

Flat: TypeAlias = NDArray[np.float32]
Actions: TypeAlias = NDArray[np.int64]


class Padded(gymnasium.Wrapper[Flat, Actions, Flat, Actions]):
    """Slots that are always empty on top of an environment's own, so that engines of several sizes fit one network."""

    def __init__(self, env: gymnasium.Env[Flat, Actions], *, own: int, slots: int) -> None:
        """`own`: the environment's slots; `slots`: how many it shall seem to have."""
        super().__init__(env)
        self.own, self.more = own, slots - own
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (slots * (F + 1) + L,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * slots + [MAX_DEPTH + 1, MAX_FRONTIER + 1])

    def _pad(self, flat: Flat) -> Flat:
        split, none = self.own * F, np.zeros(self.more * F, np.float32)
        return np.concatenate([flat[:split], none, flat[split:], none[: self.more]])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Flat, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return self._pad(observation), info

    def step(self, action: Actions) -> tuple[Flat, SupportsFloat, bool, bool, dict[str, Any]]:
        own = np.concatenate([action[: self.own], action[-2:]])
        observation, reward, terminated, truncated, info = self.env.step(own)
        return self._pad(observation), reward, terminated, truncated, info


def make_worlds(models: Sequence[str], envs: int) -> VecEnv:
    """`envs` environments in this process: models in turn, and within a model its bands of load.

    ValueError if a model's profile or tape is not there.
    """
    slots = max(PRESETS[model].slots for model in models)
    bands = -(-envs // len(models))
    return DummyVecEnv([_maker(models[i % len(models)], i // len(models), bands, slots) for i in range(envs)])


def _maker(model: str, band: int, bands: int, slots: int) -> Callable[[], gymnasium.Env[Flat, Actions]]:
    preset = PRESETS[model]
    cost, tape = measured(model)
    low, high = preset.band(band, bands)
    reward = TokenPaid(cost=cost, acceptance=float(tape.split("train").match.mean()))

    def make() -> gymnasium.Env[Flat, Actions]:
        env = gymnasium.make(
            "faser/Speculation-v0",
            pair=model,
            slots=preset.slots,
            requests=preset.requests(high),
            load=(low, high),
            reward=reward,
            part="train",
            disable_env_checker=True,  # the tests run it; here it would check every step
        )
        return Monitor(Padded(env, own=preset.slots, slots=slots))

    return make
