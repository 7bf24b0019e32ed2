"""The numpy policy decides as the torch network does, and the untrained network is the rule that it claims to be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser.bench.decide import main, random_observation, time_decisions
from faser.core import MAX_DEPTH, MAX_FRONTIER, Capabilities, Observation, checked
from faser.policies.goodput import Goodput
from faser.policies.learned import LearnedPolicy
from faser.policies.policy_file import PolicyFile, identity_normaliser, save
from faser.train.network import Actor, Batch, F, Logits

TOLERANCE = 1e-5  # float32 sums of some 70 products in another order, relative to the logit and absolute


def actor(noise: float, *, max_depth: int = MAX_DEPTH, max_frontier: int = MAX_FRONTIER) -> Actor:
    network = Actor(hidden=32, sharpness=8.0, depth_sharpness=20.0, max_depth=max_depth, max_frontier=max_frontier)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.empty_like(p).normal_(generator=rng), alpha=noise)
    return network


def frozen(network: Actor, **fields: Any) -> LearnedPolicy:
    return LearnedPolicy(PolicyFile(arrays=network.arrays(), **fields))


def flat(observation: Observation, slots: np.ndarray, size: int) -> torch.Tensor:
    """As `faser.envs` packs it."""
    requests, present = np.zeros((size, F), np.float32), np.zeros(size, np.float32)
    requests[slots], present[slots] = observation.requests, 1.0
    return torch.from_numpy(np.concatenate([requests.ravel(), observation.load, present]))[None]


def torch_logits(network: Actor, observation: Observation, seed: int = 0) -> Logits:
    """Rows in the observation's order, though its requests sit in random slots among empty ones."""
    n = observation.running
    slots = np.random.default_rng(seed).permutation(n + 5)[:n]
    with torch.no_grad():
        lengths, depth, frontier = network(Batch.of(flat(observation, slots, n + 5)))
    return Logits(lengths[torch.from_numpy(slots.argsort().argsort())], depth, frontier)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("running", [0, 1, 7, 64, 300])
def test_numpy_and_torch_agree(noise: float, running: int) -> None:
    network = actor(noise)
    policy = frozen(network, max_frontier=MAX_FRONTIER)
    rng = np.random.default_rng(running)
    for seed in range(10):
        observation = random_observation(rng, running)
        theirs = torch_logits(network, observation, seed)
        ours = policy.logits(observation)
        for a, b in zip(ours, (theirs.lengths, theirs.depth[0], theirs.frontier[0]), strict=True):
            np.testing.assert_allclose(a, b.numpy(), rtol=TOLERANCE, atol=TOLERANCE)
        decision = policy.decide(observation)
        picked = theirs.lengths.argmax(-1).numpy()
        if running:
            gap = np.diff(np.sort(theirs.lengths.numpy(), axis=1)[:, -2:], axis=1)[:, 0]
            clear = gap > 10 * TOLERANCE  # nearer ones may tie in one of the two
            assert clear.mean() > 0.9
            np.testing.assert_array_equal(decision.lengths[clear], picked[clear])
        assert decision.draft_depth == int(theirs.depth.argmax())
        assert decision.frontier == int(theirs.frontier.argmax())


def test_decisions_are_valid_and_within_what_was_drafted() -> None:
    policy = frozen(actor(1.0, max_depth=4, max_frontier=0), max_depth=4)
    rng = np.random.default_rng(0)
    seen = set()
    for running in (0, 1, 3, 200):
        for _ in range(20):
            observation = random_observation(rng, running)
            decision = policy.decide(observation)
            checked(decision, running, Capabilities(max_frontier=MAX_FRONTIER))
            assert (decision.lengths <= observation.drafted).all()
            assert decision.draft_depth <= 4
            assert decision.frontier == 0
            seen |= set(decision.lengths.tolist())
    assert len(seen) > 2


def test_the_order_of_requests_does_not_matter() -> None:
    policy, rng = frozen(actor(0.3)), np.random.default_rng(0)
    observation = random_observation(rng, 40)
    order = rng.permutation(40)
    shuffled = Observation(observation.requests[order], observation.load)
    a, b = policy.decide(observation), policy.decide(shuffled)
    np.testing.assert_array_equal(a.lengths[order], b.lengths)
    assert a.draft_depth == b.draft_depth


def test_deciding_leaves_the_observation_and_earlier_decisions_alone() -> None:
    policy, rng = frozen(actor(0.3)), np.random.default_rng(0)
    first, second = random_observation(rng, 64), random_observation(rng, 64)
    requests, load = first.requests.copy(), first.load.copy()
    first.requests.flags.writeable = first.load.flags.writeable = False
    before = policy.decide(first)
    lengths = before.lengths.copy()
    policy.decide(second)
    np.testing.assert_array_equal(before.lengths, lengths)
    np.testing.assert_array_equal(first.requests, requests)
    np.testing.assert_array_equal(first.load, load)


def test_the_untrained_network_decides_as_goodput_does() -> None:
    policy, rng = frozen(actor(0.0)), np.random.default_rng(0)
    seen = set()
    for running in (0, 1, 30, 100):
        for _ in range(10):
            observation = random_observation(rng, running)
            ours, rule = policy.decide(observation), Goodput().decide(observation)
            np.testing.assert_array_equal(ours.lengths, rule.lengths)
            assert ours.draft_depth == rule.draft_depth
            seen.add(ours.draft_depth)
    assert len(seen) > 3


def test_a_normaliser_is_applied() -> None:
    rng = np.random.default_rng(0)
    normaliser = identity_normaliser()
    normaliser["request_mean"] += rng.random(F, np.float32)
    normaliser["load_scale"] *= 2.0
    arrays = actor(0.2).arrays()
    observation = random_observation(rng, 9)
    plain = LearnedPolicy(PolicyFile(arrays=arrays))
    a, mean = plain._a, normaliser["request_mean"]
    h1 = (
        (observation.requests - mean) @ a["request_weight"]
        + observation.load / 2 @ a["request_load"]
        + a["request_bias"]
    )
    scaled = LearnedPolicy(PolicyFile(arrays=arrays, normaliser=normaliser))
    scaled.logits(observation)
    np.testing.assert_allclose(scaled._h1[:9], np.maximum(h1, 0), rtol=1e-4, atol=1e-4)


def test_deciding_needs_no_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from faser.policies.learned import LearnedPolicy\n"
        "from faser.policies.policy_file import PolicyFile, array_shapes\n"
        "from faser.bench.decide import random_observation\n"
        "arrays = {k: np.zeros(s, np.float32) for k, s in array_shapes(32).items()}\n"
        "LearnedPolicy(PolicyFile(arrays=arrays)).decide(random_observation(np.random.default_rng(0), 5))\n"
        "print([m for m in ('torch', 'stable_baselines3', 'faser.train') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_benchmark_times_every_decision() -> None:
    took = time_decisions(frozen(actor(0.0)), 16, 50)
    assert took.shape == (50,)
    assert (took > 0).all()


def test_the_benchmark_prints_a_table_and_refuses_a_bad_file(tmp_path: Path) -> None:
    save(PolicyFile(arrays=actor(0.1).arrays()), tmp_path / "p.pt")
    command = [sys.executable, "-m", "faser.bench.decide", "--decisions", "20", "--policy"]
    good = subprocess.run([*command, str(tmp_path / "p.pt")], capture_output=True, text=True)
    assert good.returncode == 0
    assert [line.split()[0] for line in good.stdout.splitlines()[2:]] == ["1", "16", "64", "256"]
    bad = subprocess.run([*command, str(tmp_path / "none.pt")], capture_output=True, text=True)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: policy ")
    assert bad.stderr.count("\n") == 1


def test_the_benchmark_refuses_no_decisions_and_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    for count in ("0", "99999999999999999"):
        with pytest.raises(SystemExit):
            main(["--decisions", count])
        assert f"--decisions: '{count}'; allowed: 1 to 1000000" in capsys.readouterr().err
