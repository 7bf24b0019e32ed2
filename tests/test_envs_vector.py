"""The vector environment is the single one several times: the same episodes, and Gymnasium's ways at their ends."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import faser.envs  # noqa: F401  # registers the environment
from faser.costs import Curve, StepCost
from faser.envs.speculation import SpeculationEnv
from faser.envs.vector import SpeculationVectorEnv
from faser.train.worlds import Worlds

COST = StepCost(
    name="test", device="none", source="made up", verify=Curve((64.0, 65.0), (8.0, 8.04)), draft=Curve((1.0,), (0.3,))
)
SMALL: dict[str, Any] = {"slots": 8, "requests": 12, "acceptance": 0.7, "cost": COST, "load": (0.3, 1.5)}


def actions(flat: np.ndarray) -> np.ndarray:
    """Any function of an observation of 8 slots."""
    return np.concatenate([(flat[:8] * 7).astype(np.int64), [int(flat.sum() * 10) % 8, 0]])


def test_make_vec_gives_what_single_environments_of_the_same_seeds_give() -> None:
    vector = gymnasium.make_vec("faser/Speculation-v0", num_envs=3, **SMALL)
    assert isinstance(vector.unwrapped, SpeculationVectorEnv)
    seen, _ = vector.reset(seed=5)
    assert seen.shape == vector.observation_space.shape
    singles = [SpeculationEnv(**SMALL) for _ in range(3)]
    alone = [env.reset(seed=5 + i)[0] for i, env in enumerate(singles)]
    ends = 0
    while ends < 5:
        assert np.array_equal(seen, np.stack(alone))
        chosen = np.stack([actions(flat) for flat in alone])
        seen, rewards, terminated, truncated, info = vector.step(chosen)
        for i, env in enumerate(singles):
            alone[i], reward, over, cut, mine = env.step(chosen[i])
            assert (rewards[i], terminated[i], truncated[i]) == (reward, over, cut)
            assert info["step_ms"][i] == mine["step_ms"]
            assert info["lengths"][i].tolist() == mine["lengths"].tolist()
            if over:
                ends += 1
                assert np.array_equal(info["final_obs"][i], alone[i])
                assert info["final_info"]["episode_summary"][i] == mine["episode_summary"]
                assert info["final_info"]["load"][i] == info["load"][i] == mine["load"]
                assert info["final_info"]["time"][i] == mine["time"]
                alone[i] = env.reset()[0]
    vector.close()


def test_each_engine_can_have_a_load_and_a_length_of_its_own() -> None:
    vector = SpeculationVectorEnv(2, **{**SMALL, "load": [0.3, (1.2, 1.5)], "requests": [5, 12]})
    _, info = vector.reset(seed=0)
    assert info["load"][0] == pytest.approx(0.3)
    assert 1.2 <= info["load"][1] <= 1.5
    assert [len(trace) for trace in vector.episodes.traces if trace is not None] == [5, 12]
    with pytest.raises(ValueError, match="load and requests are for 3 and 2 engines; there are 2"):
        SpeculationVectorEnv(2, **{**SMALL, "load": [0.3, 0.3, 0.3]})


def test_worlds_of_several_sizes_look_alike_and_report_the_ends_of_episodes() -> None:
    worlds = Worlds([SpeculationVectorEnv(2, **SMALL), SpeculationVectorEnv(1, **{**SMALL, "slots": 4, "load": 0.3})])
    worlds.seed(3)
    seen = worlds.reset()
    single = SpeculationEnv(**{**SMALL, "slots": 4, "load": 0.3})
    alone, _ = single.reset(seed=5)
    returned, ended = 0.0, []
    while not ended:
        assert seen.shape == (3, worlds.observation_space.shape[0])
        assert np.array_equal(np.sort(seen[2][seen[2] > 0]), np.sort(alone[alone > 0]))  # no more than empty slots
        seen, rewards, dones, infos = worlds.step(np.full((3, 10), 2))
        alone, reward, over, _, info = single.step(np.full(6, 2))
        returned += reward
        assert rewards[2] == pytest.approx(reward)
        assert dones[2] == over
        ended = [i for i in infos[2:] if "episode" in i]
    assert ended[0]["episode"]["r"] == pytest.approx(returned)
    assert ended[0]["episode_summary"] == info["episode_summary"]
    assert ended[0]["terminal_observation"].shape == worlds.observation_space.shape
    worlds.close()
