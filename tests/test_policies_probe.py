"""The probe holds each length and depth, walks all of them, and is had by name."""

from __future__ import annotations

import numpy as np
import pytest

from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Observation
from faser.costs import Curve, StepCost
from faser.policies import PolicyError, make_policy
from faser.policies.probe import Probe

COST = StepCost(name="", device="", source="", verify=Curve((1.0,), (1.0,)))
PAIRS = {(length, depth) for depth in range(MAX_DEPTH + 1) for length in range(depth + 1)}
ROUND = len(PAIRS) - 1 + 5


def seen(running: int = 2, prefill_share: float = 0.0) -> Observation:
    load = np.zeros(len(LOAD_FEATURES), np.float32)
    load[LOAD_FEATURES.index("prefill_share")] = prefill_share
    return Observation(np.zeros((running, len(REQUEST_FEATURES)), np.float32), load)


def walk(probe: Probe, steps: int) -> list[tuple[int, int]]:
    decisions = [probe.decide(seen()) for _ in range(steps)]
    assert all(d.lengths.tolist() == [d.lengths[0]] * 2 for d in decisions)
    return [(int(d.lengths[0]), d.draft_depth) for d in decisions]


def test_every_pair_is_held_as_long_as_asked_and_no_drafting_comes_every_eighth_time() -> None:
    walked = walk(Probe(3, seed=0), 3 * ROUND)
    held = walked[::3]
    assert walked == [pair for pair in held for _ in range(3)]
    assert sorted(set(held)) == sorted(PAIRS)
    assert held.count((0, 0)) == 5
    assert set(held[::8]) == {(0, 0)}
    assert walk(Probe(1, seed=0), 2 * ROUND) == held + held


def test_the_seed_is_the_order() -> None:
    assert walk(Probe(1, seed=1), 36) == walk(Probe(1, seed=1), 36)
    assert walk(Probe(1, seed=1), 36) != walk(Probe(1, seed=2), 36)


def test_steps_that_compute_nothing_do_not_count_and_prompts_do() -> None:
    probe = Probe(2, seed=0)
    first = [probe.decide(seen(0)).draft_depth for _ in range(5)]
    prompts = [probe.decide(seen(0, prefill_share=1.0)).draft_depth for _ in range(2)]
    assert len({*first, *prompts}) == 1
    assert walk(probe, 2) == walk(Probe(2, seed=0), 4)[2:]


def test_it_is_had_by_name() -> None:
    policy = make_policy("probe:4:7", COST)
    assert isinstance(policy, Probe)
    assert walk(policy, 80) == walk(Probe(4, 7), 80)


@pytest.mark.parametrize("spec", ["probe:0", "probe:x", "probe:2:x", "probe:2:1:1", "probe:-1"])
def test_a_probe_that_cannot_be_is_refused_in_a_line(spec: str) -> None:
    with pytest.raises(PolicyError, match="policy probe:") as error:
        make_policy(spec, COST)
    assert "\n" not in str(error.value)
    assert "allowed" in str(error.value)
