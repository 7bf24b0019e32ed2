"""The compact action means what it says, and goodput is one of the policies over it, step for step."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import batch_space

import faser.envs  # noqa: F401  # registers the environment
from faser.core import LOAD_FEATURES, MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Observation
from faser.envs.compact import LEVELS, CompactAction, CompactActionVector, compact_action, expand
from faser.envs.speculation import SpeculationEnv, pack, unpack
from faser.policies.goodput import Goodput

ID = "faser/Speculation-v0"
SMALL: dict[str, Any] = {"slots": 16, "requests": 40, "load": 1.2}
FIRST = REQUEST_FEATURES.index("survival_1")


def goodputs_choice(flat: np.ndarray) -> np.ndarray:
    """The compact action that the observation's own numbers ask for."""
    observation, _ = unpack(flat)
    values = [observation.of_load(f"depth_value_{d}") for d in range(MAX_DEPTH + 1)]
    return compact_action(observation.of_load("row_price"), int(np.argmax(values)))


def native(flat: np.ndarray, slots: int) -> np.ndarray:
    """What goodput decides, as an action of the environment itself."""
    observation, where = unpack(flat)
    decision = Goodput().decide(observation)
    action = np.zeros(slots + 2, np.int64)
    action[where], action[slots], action[slots + 1] = decision.lengths, decision.draft_depth, decision.frontier
    return action


@pytest.mark.parametrize("pair", ["smollm2", "llama2-13b", "mistral-7b"])
def test_row_price_and_the_best_depth_make_it_goodput_step_for_step(pair: str) -> None:
    compact, plain = CompactAction(SpeculationEnv(pair=pair, **SMALL)), SpeculationEnv(pair=pair, **SMALL)
    flat, _ = compact.reset(seed=3)
    other, _ = plain.reset(seed=3)
    levels, lengths, over = set(), np.zeros(MAX_DEPTH + 1, np.int64), False
    while not over:
        assert np.array_equal(flat, other)
        action, asked = goodputs_choice(flat), native(other, 16)
        assert np.array_equal(compact.action(action), asked)
        flat, reward, over, _, info = compact.step(action)
        other, same, ended, _, mine = plain.step(asked)
        assert (reward, over) == (same, ended)
        levels.add(int(action[0]))
        lengths += info["lengths"]
    assert info["episode_summary"] == mine["episode_summary"]
    assert len(levels) > 3  # it was not always the same choice
    assert np.count_nonzero(lengths) > 3


def of_survivals(*survivals: list[float]) -> np.ndarray:
    requests = np.zeros((len(survivals), len(REQUEST_FEATURES)), np.float32)
    for row, values in zip(requests, survivals, strict=True):
        row[FIRST : FIRST + len(values)] = values
    load = np.zeros(len(LOAD_FEATURES), np.float32)
    return pack(Observation(requests, load), np.arange(len(survivals)) * 2, 5)[None]


@pytest.mark.parametrize(
    ("threshold", "lengths"),
    [(0.0, [3, 0, 1, 0, 0]), (0.25, [2, 0, 1, 0, 0]), (0.5, [1, 0, 1, 0, 0]), (1.0, [0, 0, 0, 0, 0])],
)
def test_a_length_is_the_tokens_over_the_threshold(threshold: float, lengths: list[int]) -> None:
    flat = of_survivals([0.9, 0.5, 0.25], [1.0])
    assert expand(flat, compact_action(threshold, 4, 1)[None]).tolist() == [[*lengths, 4, 1]]


def test_the_space_is_three_choices_whatever_the_slots() -> None:
    env = CompactAction(gymnasium.make(ID, **SMALL))
    assert env.action_space == gymnasium.spaces.MultiDiscrete([LEVELS, MAX_DEPTH + 1, MAX_FRONTIER + 1])
    assert env.observation_space == env.unwrapped.observation_space
    check_env(CompactAction(SpeculationEnv(**SMALL)), skip_render_check=True)


def test_a_vector_of_them_does_what_each_does_alone() -> None:
    iid = {**SMALL, "acceptance": 0.7}  # no predictor, whose last bit depends on how many rows it is given
    vector = CompactActionVector(gymnasium.make_vec(ID, num_envs=2, **iid))
    assert vector.action_space == batch_space(CompactAction(SpeculationEnv(**iid)).action_space, 2)
    singles = [CompactAction(SpeculationEnv(**iid)) for _ in range(2)]
    seen, _ = vector.reset(seed=7)
    alone = [env.reset(seed=7 + i)[0] for i, env in enumerate(singles)]
    ends = 0
    while ends < 3:
        assert np.array_equal(seen, np.stack(alone))
        actions = np.stack([goodputs_choice(flat) for flat in alone])
        seen, rewards, terminated, _, _ = vector.step(actions)
        for i, env in enumerate(singles):
            alone[i], reward, over, _, _ = env.step(actions[i])
            assert (rewards[i], terminated[i]) == (reward, over)
            if over:
                ends += 1
                alone[i] = env.reset()[0]


def test_a_caller_who_changes_its_observation_changes_no_action() -> None:
    first, second = (CompactAction(SpeculationEnv(**SMALL)) for _ in range(2))
    mine, _ = first.reset(seed=1)
    second.reset(seed=1)
    for _ in range(30):
        mine[:] = 0.0
        mine, reward, *_ = first.step(compact_action(0.3, 5))
        _, same, *_ = second.step(compact_action(0.3, 5))
        assert reward == same


def test_what_is_no_compact_action_is_refused() -> None:
    env = CompactAction(SpeculationEnv(**SMALL))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.action(compact_action(0.5, 3))
    env.reset(seed=0)
    for action, says in (
        (np.array([LEVELS, 3, 0]), f"threshold levels span {LEVELS}..{LEVELS}; allowed: 0..{LEVELS - 1}"),
        (np.array([-1, 3, 0]), "threshold levels span -1..-1"),
        (np.array([3, 0]), "actions have shape (1, 2); (1, 3) expected"),
        (np.array([3, MAX_DEPTH + 1, 0]), f"allowed: 0..{MAX_DEPTH}"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            env.step(action)
    with pytest.raises(ValueError, match=re.escape("threshold is 1.5; allowed: 0 to 1")):
        compact_action(1.5, 0)
    with pytest.raises(ValueError, match="allowed: those of SpeculationEnv"):
        CompactAction(CompactAction(SpeculationEnv(**SMALL)))


def test_stable_baselines3_trains_on_it_without_a_policy_of_our_own() -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    env = CompactAction(SpeculationEnv(slots=4, requests=6, acceptance=0.7))
    model = sb3.PPO("MlpPolicy", env, n_steps=64, batch_size=32, n_epochs=1, seed=0, device="cpu")
    model.learn(128)
    chosen, _ = model.predict(env.reset(seed=0)[0])
    assert env.action_space.contains(chosen)
