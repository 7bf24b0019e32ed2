"""The environments that a training run learns in, as stable-baselines3 wants them.

The decision: each environment keeps to its own band of load. Were the load drawn anew for each episode, quiet episodes,
which are ten times as long, would fill nearly all of PPO's samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

from faser.core import MAX_DEPTH, MAX_FRONTIER
from faser.envs.vector import SpeculationVectorEnv
from faser.models import measured
from faser.train.network import F, L
from faser.train.presets import preset
from faser.train.shaping import StepsSaved

Flat: TypeAlias = NDArray[np.float32]


class Worlds(VecEnv):
    """Vectors of environments, side by side as one; all seem to have the slots of the largest.

    Infos hold what `faser.train.callbacks.Metrics` shows, and what stable-baselines3 asks of an episode's end.
    """

    def __init__(self, vectors: Sequence[SpeculationVectorEnv]) -> None:
        self.vectors = list(vectors)
        self.slots = max(vector.episodes.slots for vector in vectors)
        ends = np.cumsum([vector.num_envs for vector in vectors])
        self.parts = [slice(end - v.num_envs, end) for end, v in zip(ends.tolist(), vectors, strict=True)]
        observation = gymnasium.spaces.Box(0.0, 1.0, (self.slots * (F + 1) + L,), np.float32)
        action = gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * (self.slots + 1) + [MAX_FRONTIER + 1])
        self._returns, self._steps = np.zeros(ends[-1]), np.zeros(ends[-1], np.int64)
        self._actions: NDArray[np.int64] = np.zeros(0, np.int64)
        self.render_mode = None
        super().__init__(int(ends[-1]), observation, action)

    def reset(self) -> Flat:
        seeds = self._seeds
        parts = [v.reset(seed=list(seeds[p]))[0] for v, p in zip(self.vectors, self.parts, strict=True)]
        self._reset_seeds()
        self._returns[:], self._steps[:] = 0.0, 0
        return np.concatenate([self._padded(flat) for flat in parts])

    def step_async(self, actions: NDArray[np.int64]) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        flats, rewards, dones = [], np.zeros(self.num_envs, np.float32), np.zeros(self.num_envs, np.bool_)
        infos: list[dict[str, Any]] = []
        for vector, part in zip(self.vectors, self.parts, strict=True):
            mine, own = self._actions[part], vector.episodes.slots
            flat, reward, terminated, truncated, info = vector.step(np.hstack([mine[:, :own], mine[:, -2:]]))
            flats.append(self._padded(flat))
            rewards[part], dones[part] = reward, terminated | truncated
            shown = zip(info["lengths"], *(info[key].tolist() for key in SHOWN), strict=True)
            infos += [dict(zip(("lengths", *SHOWN), values, strict=True)) for values in shown]
            self._returns[part] += reward
            self._steps[part] += 1
            for i in np.flatnonzero(terminated | truncated).tolist():
                at = part.start + i
                infos[at] |= {
                    "terminal_observation": self._padded(info["final_obs"][i][None])[0],
                    "TimeLimit.truncated": bool(truncated[i]),
                    "episode_summary": info["final_info"]["episode_summary"][i],
                    "episode": {"r": float(self._returns[at]), "l": int(self._steps[at])},
                }
                self._returns[at], self._steps[at] = 0.0, 0
        return np.concatenate(flats), rewards, dones, infos

    def _padded(self, flat: Flat) -> Flat:
        """[E, own size] to [E, size of the largest]: empty slots after an environment's own."""
        own = (flat.shape[1] - L) // (F + 1)
        none = np.zeros((len(flat), (self.slots - own) * F), np.float32)
        return np.hstack([flat[:, : own * F], none, flat[:, own * F :], none[:, : self.slots - own]])

    def close(self) -> None:
        for vector in self.vectors:
            vector.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise NotImplementedError("environments side by side have no attributes of their own")  # abstract; PPO skips it

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("environments side by side have no methods of their own")  # abstract; PPO skips it

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:  # noqa: ARG002  # theirs
        return [False] * len(list(self._get_indices(indices)))


SHOWN = ("depth", "tokens", "step_ms", "load")


def make_worlds(models: Sequence[str], envs: int) -> Worlds:
    """`envs` environments: models in turn, and within a model its bands of load.

    ValueError if a model's profile or tape is not there.
    """
    bands = -(-envs // len(models))
    counts = [len(range(i, envs, len(models))) for i in range(len(models))]
    return Worlds([_vector(model, range(count), bands) for model, count in zip(models, counts, strict=True) if count])


def _vector(model: str, mine: Iterable[int], bands: int) -> SpeculationVectorEnv:
    own = preset(model)
    cost, tape = measured(model)
    loads = [own.band(band, bands) for band in mine]
    return SpeculationVectorEnv(
        len(loads),
        pair=model,
        slots=own.slots,
        requests=[own.requests(high) for _, high in loads],
        load=loads,
        reward=StepsSaved(cost=cost, tape=tape.split("train")),
        part="train",
    )
