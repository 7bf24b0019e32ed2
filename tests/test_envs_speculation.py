"""The Gymnasium environment keeps its contract: spaces, checkers, determinism, and what a return means."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import faser.envs  # noqa: F401  # registers the environment
from faser.core import LOAD_FEATURES, MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Capabilities, Observation
from faser.costs import Curve, StepCost
from faser.envs.rewards import REWARDS
from faser.envs.speculation import SpeculationEnv, pack, unpack
from faser.tapes import Tape

ID = "faser/Speculation-v0"
F, L = len(REQUEST_FEATURES), len(LOAD_FEATURES)
COST = StepCost(
    name="test", device="none", source="made up", verify=Curve((64.0, 65.0), (8.0, 8.04)), draft=Curve((1.0,), (0.3,))
)
SMALL: dict[str, Any] = {"slots": 8, "requests": 12, "acceptance": 0.7, "cost": COST, "load": (0.3, 1.5)}


def make(**changes: Any) -> Any:
    return gymnasium.make(ID, **{**SMALL, **changes})


def play(env: Any, action: Any, seed: int = 0, **options: Any) -> tuple[float, dict[str, Any], list[float]]:
    """An episode under a fixed action, or a function of the flat observation: return, last info, rewards."""
    flat, _ = env.reset(seed=seed, options=options or None)
    rewards: list[float] = []
    while True:
        chosen = action(flat) if callable(action) else action
        flat, reward, terminated, truncated, info = env.step(chosen)
        rewards.append(reward)
        if terminated or truncated:
            return sum(rewards), info, rewards


def fixed(k: int, slots: int = 8) -> np.ndarray:
    return np.array([k] * (slots + 1) + [0])


def test_gymnasiums_checker_has_nothing_to_say() -> None:
    check_env(make().unwrapped, skip_render_check=True)


def test_stable_baselines3s_checker_has_nothing_to_say() -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(make().unwrapped)


def test_the_spaces_are_those_of_the_contract() -> None:
    env = gymnasium.make(ID, pair="llama2-13b", acceptance=0.6)
    assert env.observation_space == gymnasium.spaces.Box(0.0, 1.0, (64 * F + L + 64,), np.float32)
    assert env.action_space == gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * 65 + [MAX_FRONTIER + 1])
    env.close()


def test_an_observation_survives_packing() -> None:
    rng = np.random.default_rng(0)
    observation = Observation(rng.random((3, F), np.float32), rng.random(L, np.float32))
    slots = np.array([1, 4, 5])
    flat = pack(observation, slots, 6)
    assert flat.shape == (6 * F + L + 6,)
    assert flat.dtype == np.float32
    assert np.array_equal(flat[F : 2 * F], observation.requests[0])
    assert flat[-6:].tolist() == [0, 1, 0, 0, 1, 1]
    back, where = unpack(flat)
    assert np.array_equal(back.requests, observation.requests)
    assert np.array_equal(back.load, observation.load)
    assert where.tolist() == [1, 4, 5]
    with pytest.raises(ValueError, match="numbers expected"):
        unpack(flat[:-1])


def random_episode(env: Any, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    flat, _ = env.reset(seed=seed)
    seen: list[Any] = [flat.tobytes()]
    while True:
        flat, reward, terminated, truncated, info = env.step(rng.integers(0, env.action_space.nvec))
        seen += [flat.tobytes(), reward, terminated, info["step_ms"], info["time"]]
        if terminated or truncated:
            return [*seen, repr(info["episode_summary"])]


def test_a_seed_fixes_an_episode_bit_for_bit_and_the_ones_after_it() -> None:
    first, second = make(), make()
    assert random_episode(first, 5) == random_episode(second, 5)
    assert random_episode(first, 6) != random_episode(second, 5)
    first.reset(seed=5)
    second.reset(seed=5)
    assert np.array_equal(first.reset()[0], second.reset()[0])
    assert first.unwrapped.episodes.load == second.unwrapped.episodes.load


def test_options_set_the_load_and_the_arrivals_of_one_episode_only() -> None:
    env, plain = make(), make()
    env.reset(seed=1)
    plain.reset(seed=1)
    _, info = env.reset(options={"load": 0.9, "seed": 3})
    assert info["load"] == pytest.approx(0.9)
    trace = env.unwrapped.episodes.traces[0]
    env.reset(options={"seed": 3, "load": 0.9})
    assert np.array_equal(trace.arrival, env.unwrapped.episodes.traces[0].arrival)
    env.reset()
    plain.reset()
    assert np.array_equal(env.unwrapped.episodes.traces[0].arrival, plain.unwrapped.episodes.traces[0].arrival)
    with pytest.raises(ValueError, match="reset options hold 'laod'; allowed: load, seed"):
        env.reset(options={"laod": 1})


def test_no_speculation_returns_minus_one_and_good_speculation_more() -> None:
    none, info, _ = play(make(), fixed(0))
    assert none == pytest.approx(-1.0, rel=1e-9)
    assert info["episode_summary"]["ratio_to_none"] == pytest.approx(1.0, rel=1e-9)
    good, info, rewards = play(make(), fixed(3))
    assert good > -0.9
    assert good == pytest.approx(-info["episode_summary"]["ratio_to_none"])
    assert max(rewards) < 0.0
    useless, _, _ = play(make(acceptance=0.0), fixed(7))
    assert useless < -1.1


def test_a_frontier_and_pruning_act_only_where_the_engine_can() -> None:
    tape: dict[str, Any] = {"pair": "llama2-13b", "acceptance": "tape", "cost": None}
    ahead = np.append(fixed(3)[:-1], 4)
    returns = {
        name: play(make(**tape, capabilities=capabilities), action)[0]
        for name, capabilities, action in (
            ("plain", None, fixed(3)),
            ("clamped", None, ahead),
            ("ahead", Capabilities(max_frontier=4), ahead),
            ("pruning", Capabilities(pruning=True), fixed(3)),
        )
    }
    assert returns["clamped"] == returns["plain"]
    assert len({*returns.values()}) == 3
    with pytest.raises(ValueError, match="pruning needs a tape with ranks of early layers"):
        make(capabilities=Capabilities(pruning=True))


def test_the_return_is_the_ratio_of_mean_times_in_system() -> None:
    summaries = [play(make(), fixed(k), seed=4)[1]["episode_summary"] for k in (0, 4)]
    none, some = (s["mean_time_in_system_s"] for s in summaries)
    assert play(make(), fixed(4), seed=4)[0] == pytest.approx(-some / none, rel=1e-9)


def test_info_adds_up_to_the_summary() -> None:
    env = make()
    env.reset(seed=2)
    rng, infos = np.random.default_rng(2), []
    while True:
        _, _, terminated, _, info = env.step(rng.integers(0, env.action_space.nvec))
        infos.append(info)
        assert info["lengths"].shape == (MAX_DEPTH + 1,)
        assert info["lengths"] @ np.arange(MAX_DEPTH + 1) == info["verified"]
        assert 0 <= info["accepted"] <= info["verified"]
        if terminated:
            break
    total = {key: sum(i[key] for i in infos) for key in ("tokens", "step_ms", "verified", "accepted", "depth")}
    visits, summary = sum(i["lengths"].sum() for i in infos), infos[-1]["episode_summary"]
    assert (infos[-1]["running"], infos[-1]["waiting"]) == (0, 0)
    assert "episode_summary" not in infos[0]
    assert summary["tokens_per_s"] == pytest.approx(1e3 * total["tokens"] / total["step_ms"])
    assert summary["mean_length"] == pytest.approx(total["verified"] / visits)
    assert summary["mean_accepted"] == pytest.approx(total["accepted"] / visits)
    assert summary["mean_depth"] == pytest.approx(total["depth"] / len(infos))
    assert summary["p99_time_in_system_s"] >= summary["mean_time_in_system_s"] > 0


def test_what_was_asked_of_absent_slots_does_not_matter() -> None:
    def junk(flat: np.ndarray) -> np.ndarray:
        action = np.full(10, 7)
        action[unpack(flat)[1]] = 2
        action[8:] = 3, 4
        return action

    assert play(make(), junk)[2] == play(make(), np.array([2] * 8 + [3, 0]))[2]


def test_depth_is_clamped_to_what_the_engine_can_do() -> None:
    _, info, _ = play(make(capabilities=Capabilities(max_depth=2)), fixed(7))
    assert info["episode_summary"]["mean_depth"] == 2.0


def test_an_episode_is_cut_at_max_steps() -> None:
    _, info, rewards = play(make(max_steps=5), fixed(0))
    assert len(rewards) == 5
    assert info["episode_summary"]["finished"] < 12


def test_a_load_above_capacity_queues_and_a_low_one_does_not() -> None:
    waiting = {}
    for load in (0.05, 3.0):
        env = make(load=load, requests=40)
        env.reset(seed=0)
        over, most = False, 0
        while not over:
            _, _, over, _, info = env.step(fixed(0))
            most = max(most, info["waiting"])
        waiting[load] = most
    assert waiting[0.05] <= 4
    assert waiting[3.0] > 12


@pytest.mark.parametrize("objective", REWARDS)
def test_every_objective_prefers_a_good_draft_used_to_one_unused(objective: str) -> None:
    def total(k: int) -> float:
        env = make(objective=objective, load=1.5, requests=40, acceptance=0.9)
        if objective == "slo":
            env.unwrapped.episodes.reward = type(env.unwrapped.episodes.reward)(target_s=1.2)
        return play(env, fixed(k))[0]

    assert total(5) > total(0)


def test_the_throughput_return_is_the_inverse_speed_up() -> None:
    assert play(make(objective="throughput"), fixed(0))[0] == pytest.approx(-1.0, rel=1e-9)


def test_training_and_evaluation_see_other_requests() -> None:
    tape = Tape.iid(0.5, requests=20)
    tapes = [make(acceptance=tape, part=part).unwrapped.episodes.tape for part in ("train", "eval", "all")]
    assert [len(t) for t in tapes] == [10, 10, 20]
    assert tapes[0].confidence.tobytes() != tapes[1].confidence.tobytes()


def test_shipped_pairs_name_profiles_and_tapes() -> None:
    env = SpeculationEnv(pair="llama2-13b", requests=4)
    assert env.episodes.cost.name == "h200-llama2-13b"
    assert len(env.episodes.tape) >= 50
    with pytest.raises(ValueError, match="pair is 'gpt'; allowed: llama2-13b, mistral-7b, smollm2"):
        SpeculationEnv(pair="gpt")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"slots": 0}, "slots is 0; allowed: 1 or more"),
        ({"requests": 0}, "requests is 0"),
        ({"load": 0.0}, "load is 0.0; allowed: a number above 0"),
        ({"load": (1.0, 0.5)}, "load is (1.0, 0.5)"),
        ({"load": float("nan")}, "load is nan"),
        ({"arrivals": "often"}, "arrivals is 'often'; allowed: poisson"),
        ({"objective": "joy"}, "objective is 'joy'; allowed: time_in_system"),
        ({"acceptance": "high"}, "acceptance is 'high'"),
        ({"acceptance": 1.5}, "rate is 1.5; allowed: 0 to 1"),
        ({"part": "half"}, "part is 'half'; allowed: all, train, eval"),
        ({"max_batched_tokens": 4}, "max_batched_tokens is 4; allowed: 8 (slots) or more"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make(**wrong)
