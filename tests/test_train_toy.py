"""PPO with the set network must solve a toy whose optimum is known, from a start that is wrong about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv

from faser.core import LOAD_FEATURES, MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Capabilities
from faser.train.network import Batch, Logits
from faser.train.presets import Settings
from faser.train.run import Run, build
from faser.train.slot_policy import SlotDistribution, SlotPolicy

F, L, S = len(REQUEST_FEATURES), len(LOAD_FEATURES), 6
WAITING, VERIFY = LOAD_FEATURES.index("waiting"), LOAD_FEATURES.index("verify_cost")


class Toy(gymnasium.Env[NDArray[np.float32], NDArray[np.int64]]):
    """Spaces of `faser/Speculation-v0`; every step is a fresh draw.

    Reward: for each present slot, the sum of (confidence - break-even) over its length, so the best length is how many
    confidences exceed the break-even (they fall); and 1 for depth K when nothing waits, or depth 0 when something does.
    Survival is left 0, so the rule that training starts from verifies nothing.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (S * F + L + S,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([MAX_DEPTH + 1] * S + [MAX_DEPTH + 1, MAX_FRONTIER + 1])

    def _draw(self) -> NDArray[np.float32]:
        rng = self.np_random
        requests, load = np.zeros((S, F), np.float32), np.zeros(L, np.float32)
        self.present = rng.random(S) < 0.6
        requests[:, :MAX_DEPTH] = -np.sort(-rng.random((S, MAX_DEPTH)), axis=1)
        requests[:, REQUEST_FEATURES.index("drafted")] = 1.0
        requests[~self.present] = 0.0
        load[VERIFY] = rng.random()
        load[WAITING] = self.waits = float(rng.random() < 0.5)
        self.gain = np.cumsum(requests[:, :MAX_DEPTH] - load[VERIFY], axis=1) * self.present[:, None]
        self.gain = np.hstack([np.zeros((S, 1)), self.gain])
        self.steps += 1
        return np.concatenate([requests.ravel(), load, self.present.astype(np.float32)])

    def reset(
        self,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002  # Gymnasium's signature
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {}

    def step(self, action: NDArray[np.int64]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        assert not action[:S][~self.present].any()
        reward = float(self.gain[np.arange(S), action[:S]].sum())
        reward += float(action[S] == (0 if self.waits else MAX_DEPTH))
        self.best = float(self.gain.max(axis=1).sum()) + 1.0
        return self._draw(), reward, self.steps > 64, False, {}


def run(**settings: Any) -> Run:
    here = Path()
    return Run(models=[], seed=0, directory=here, out=here, logdir=here, settings=Settings(**settings))


def share_of_optimum(policy: SlotPolicy) -> float:
    """Reward of the policy's most probable actions over the best possible, on 500 fresh steps."""
    env = Toy()
    observation, _ = env.reset(seed=123)
    got = best = 0.0
    for _ in range(500):
        with torch.no_grad():
            action = policy._predict(torch.from_numpy(observation)[None], deterministic=True)
        observation, reward, *_ = env.step(action.numpy()[0])
        got, best = got + reward, best + env.best
    return got / best


def test_ppo_solves_a_toy_with_a_known_optimum() -> None:
    torch.set_num_threads(1)
    asked = run(rollout_steps=64, batch_size=128, envs=8, learning_rate=5e-3, gamma=0.0, target_kl=None)
    model = build(asked, DummyVecEnv([Toy] * 8))
    assert isinstance(model.policy, SlotPolicy)
    assert share_of_optimum(model.policy) < 0.2
    model.learn(24_000)
    assert share_of_optimum(model.policy) > 0.9


def some_batch(present: list[list[int]]) -> Batch:
    there = torch.tensor(present, dtype=torch.float32)
    rng = torch.Generator().manual_seed(0)
    requests = torch.rand(*there.shape, F, generator=rng) * there[..., None]
    load = torch.rand(len(present), L, generator=rng)
    return Batch.of(torch.cat([requests.flatten(1), load, there], dim=1))


def test_empty_slots_change_neither_log_probability_nor_entropy_nor_value() -> None:
    small, large = some_batch([[1, 1]]), some_batch([[0, 1, 0, 1, 0]])
    large = Batch(small.requests, large.owner, large.slot, small.load, small.count, large.slots)
    model = build(run(rollout_steps=8), DummyVecEnv([Toy] * 2))
    policy = model.policy
    assert isinstance(policy, SlotPolicy)
    a = SlotDistribution(policy.actor(small), small, slot_power=0.5)
    b = SlotDistribution(policy.actor(large), large, slot_power=0.5)
    torch.testing.assert_close(a.entropy(), b.entropy())
    torch.testing.assert_close(policy.critic(small), policy.critic(large))
    short, long = torch.tensor([[2, 3, 4, 0]]), torch.tensor([[7, 2, 7, 3, 7, 4, 0]])
    torch.testing.assert_close(a.log_prob(short), b.log_prob(long))


def test_log_probability_is_the_joint_one_and_samples_follow_it() -> None:
    rng = torch.Generator().manual_seed(0)
    batch = some_batch([[1, 1]])
    logits = Logits(torch.randn(2, 8, generator=rng), torch.randn(1, 8, generator=rng), torch.zeros(1, 5))
    joint = SlotDistribution(logits, batch, slot_power=0.0)
    action = torch.tensor([[3, 5, 1, 2]])
    p = [head.softmax(-1) for head in logits]
    expected = p[0][0, 3] * p[0][1, 5] * p[1][0, 1] * p[2][0, 2]
    torch.testing.assert_close(joint.log_prob(action).exp()[0], expected)
    halved = SlotDistribution(logits, batch, slot_power=1.0)
    rest = (p[1][0, 1] * p[2][0, 2]).log()
    torch.testing.assert_close(halved.log_prob(action)[0] - rest, (joint.log_prob(action)[0] - rest) / 2)
    torch.manual_seed(0)
    counts = torch.bincount(torch.cat([joint.sample()[:, 0] for _ in range(4000)]), minlength=8)
    chi = ((counts - 4000 * p[0][0]) ** 2 / (4000 * p[0][0])).sum()
    assert chi < 24.3  # 7 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("depth", "frontier"), [(7, 4), (3, 0)])
def test_what_the_engine_cannot_do_is_never_sampled(depth: int, frontier: int) -> None:
    asked = run(rollout_steps=8)
    limited = Run(
        models=[],
        seed=0,
        directory=Path(),
        out=Path(),
        logdir=Path(),
        settings=asked.settings,
        capabilities=Capabilities(max_depth=depth, max_frontier=frontier),
    )
    policy = build(limited, DummyVecEnv([Toy] * 2)).policy
    observation, _ = Toy().reset(seed=0)
    batch = torch.from_numpy(observation)[None].repeat(500, 1)
    with torch.no_grad():
        actions, _, log_prob = policy(batch)
    assert actions[:, S].max() <= depth
    assert actions[:, S + 1].max() == frontier
    assert torch.isfinite(log_prob).all()


def test_gradients_are_finite_where_choices_are_masked() -> None:
    model = build(run(rollout_steps=8), DummyVecEnv([Toy] * 2))
    observation, _ = Toy().reset(seed=0)
    flat = torch.from_numpy(observation)[None].repeat(4, 1)
    value, log_prob, entropy = model.policy.evaluate_actions(flat, torch.zeros(4, S + 2))
    assert entropy is not None
    (value.sum() + log_prob.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]  # torch has no type there
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.policy.parameters())
