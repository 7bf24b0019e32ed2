"""The environments that a training run learns in.

The decision: each environment keeps to its own band of load. Were the load drawn anew for each episode, quiet episodes,
which are ten times as long, would fill nearly all of PPO's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

import faser.envs  # noqa: F401  # registers the environment
from faser.costs import load_profile
from faser.envs.pairs import pair_named
from faser.tapes import load_tape
from faser.train.presets import PRESETS
from faser.train.shaping import TokenPaid


def make_worlds(models: Sequence[str], envs: int) -> VecEnv:
    """`envs` environments in this process: models in turn, and within a model its bands of load.

    ValueError, KeyError or TapeError if a model's profile or tape is not there.
    """
    slots = max(PRESETS[model].slots for model in models)  # one network input for all, so one number of slots
    bands = -(-envs // len(models))
    return DummyVecEnv([_maker(models[i % len(models)], i // len(models), bands, slots) for i in range(envs)])


def _maker(model: str, band: int, bands: int, slots: int) -> Callable[[], gymnasium.Env[Any, Any]]:
    preset, pair = PRESETS[model], pair_named(model)
    low, high = preset.band(band, bands)
    acceptance = float(load_tape(pair.tape).split("train").match.mean())
    reward = TokenPaid(cost=load_profile(pair.profile), acceptance=acceptance)

    def make() -> gymnasium.Env[Any, Any]:
        env = gymnasium.make(
            "faser/Speculation-v0",
            pair=model,
            slots=slots,
            requests=preset.requests(high),
            load=(low, high),
            reward=reward,
            part="train",
            disable_env_checker=True,  # the tests run it; here it costs a tenth of the time
        )
        return Monitor(env)

    return make
