"""The rule policies do what they say, and the registry refuses what it does not know."""

import numpy as np
import pytest

from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Observation
from faser.costs import Curve, StepCost
from faser.policies import KNOWN, PolicyError, make_policy
from faser.policies.schedule import Schedule

FLAT = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 2.0), (8.0, 8.0)))


def observation(survival: list[list[float]], acceptance: float = 0.6) -> Observation:
    n = len(survival)
    requests = np.zeros((n, len(REQUEST_FEATURES)), np.float32)
    for i, row in enumerate(survival):
        requests[i, MAX_DEPTH : MAX_DEPTH + len(row)] = row
        requests[i, REQUEST_FEATURES.index("drafted")] = len(row) / MAX_DEPTH
    for name in ("acceptance_fast", "acceptance_slow"):
        requests[:, REQUEST_FEATURES.index(name)] = acceptance
    return Observation(requests, np.zeros(len(LOAD_FEATURES), np.float32))


def test_the_schedule_falls_with_the_batch() -> None:
    # eight times dearer past 64 rows, like a GPU that becomes compute-bound
    cost = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 64.0, 128.0), (8.0, 8.0, 16.0)))
    policy = Schedule.from_cost(cost)
    depths = [policy.decide(observation([[0.5]] * n)).draft_depth for n in (1, 8, 16, 32, 64, 200)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == MAX_DEPTH
    assert depths[-1] == 0


def test_a_schedule_can_be_written_down() -> None:
    policy = Schedule.parse("1-2=4,3-4=1")
    assert [policy.decide(observation([[0.5]] * n)).draft_depth for n in (0, 1, 2, 3, 4, 5, 9)] == [4, 4, 4, 1, 1, 0, 0]


def test_ema_moves_with_acceptance_and_does_not_flip_at_the_threshold() -> None:
    policy = make_policy("ema:0.5:0.35:1,3,5,7", FLAT)
    high = [policy.decide(observation([[0.5]], acceptance=0.95)).draft_depth for _ in range(4)]
    assert high[-1] == 7
    low = [policy.decide(observation([[0.5]], acceptance=0.2)).draft_depth for _ in range(5)]
    assert low[-1] == 1
    edge = 0.5 ** (1 / 3)  # survival of tier 3's last token is one half
    depths = [policy.decide(observation([[0.5]], edge + d)).draft_depth for d in (0.01, -0.01) * 10]
    assert len(set(depths[1:])) == 1


def test_excluded_requests_have_no_say_in_the_tier_of_ema() -> None:
    policy = make_policy("ema:0.5:0.35:1,3,5,7", FLAT)
    mixed = observation([[0.5]] * 4, acceptance=0.95)
    mixed.requests[1:, REQUEST_FEATURES.index("acceptance_fast")] = 0.0
    mixed.requests[1:, REQUEST_FEATURES.index("excluded")] = 1.0
    assert [policy.decide(mixed).draft_depth for _ in range(4)][-1] == 7
    mixed.requests[0, REQUEST_FEATURES.index("excluded")] = 1.0
    assert policy.decide(mixed).draft_depth == 7  # none is left to judge by: the tier stays


def test_ema_verifies_of_each_request_what_its_own_acceptance_bears() -> None:
    policy = make_policy("ema:0.3:0.2:1,2,4,6", FLAT)
    mixed = observation([[0.5] * 6] * 3)
    for _ in range(6):
        policy.decide(observation([[0.5] * 6] * 3, acceptance=0.95))
    for name in ("acceptance_fast", "acceptance_slow"):
        mixed.requests[:, REQUEST_FEATURES.index(name)] = [0.1, 0.7, 0.95]
    decision = policy.decide(mixed)
    assert decision.lengths.tolist() == [1, 4, 6]  # 0.1 bears no tier and gets the first; 0.7 ** 4 = 0.24
    assert decision.draft_depth == 4  # the batch left its tier: 0.58 ** 6 = 0.04


@pytest.mark.parametrize(
    "spec", ["ema:2", "ema:0.3:0.4", "ema:0.5:0.3:0,2", "ema:0.5:0.3:3,2", "ema:0.5:0.3:8", "ema:x"]
)
def test_tiers_that_cannot_be_are_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(PolicyError, match=f"policy {spec}: .*allowed: ") as error:
        make_policy(spec, FLAT)
    assert "\n" not in str(error.value)


def test_random_lengths_are_seeded_and_cover_the_range() -> None:
    first, second = (make_policy("random:3", FLAT) for _ in range(2))
    seen = set()
    for _ in range(60):
        a, b = first.decide(observation([[0.5]] * 4)), second.decide(observation([[0.5]] * 4))
        assert a.lengths.tolist() == b.lengths.tolist()
        seen |= set(a.lengths.tolist()) | {a.draft_depth}
    assert seen == set(range(MAX_DEPTH + 1))


@pytest.mark.parametrize(
    "spec", ["none", "static:3", "schedule", "schedule:1-8=2", "ema", "goodput", "random:1", "bandit", "gp_lcb"]
)
def test_every_policy_decides_with_no_request_running(spec: str) -> None:
    decision = make_policy(spec, FLAT).decide(observation([]))
    assert decision.lengths.shape == (0,)
    assert 0 <= decision.draft_depth <= MAX_DEPTH


def test_an_unknown_policy_gets_the_list_of_known_ones() -> None:
    with pytest.raises(PolicyError) as error:
        make_policy("statc:4", FLAT)
    assert all(name in str(error.value) for name in KNOWN)


@pytest.mark.parametrize(
    "spec",
    [
        "static",
        "static:8",
        "static:-1",
        "static:x",
        "none:1",
        "ema:2",
        "goodput:x",
        "random:x",
        "schedule:4",
        "schedule:2-8=1",
    ],
)
def test_a_bad_argument_is_refused_in_one_line_that_names_it(spec: str) -> None:
    with pytest.raises(PolicyError) as error:
        make_policy(spec, FLAT)
    assert "\n" not in str(error.value)
    assert spec.partition(":")[0] in str(error.value)
