"""The clairvoyant verifies what is right and nothing else, and drafts what the next step can use."""

from __future__ import annotations

import numpy as np
import pytest

from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Capabilities, Decision, Ints, Observation, checked
from faser.costs import Curve, StepCost
from faser.envs.advance import Advance
from faser.envs.arrivals import Poisson
from faser.envs.engines import Engines
from faser.envs.trace import sample_trace
from faser.policies import KNOWN, PolicyError, make_policy
from faser.policies.oracle import AHEAD, OraclePolicy
from faser.tapes import Tape

FLAT = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 2.0), (8.0, 8.0)), draft=Curve((1.0,), (0.1,)))
DEAR = StepCost(name="t", device="t", source="t", verify=Curve((1.0,), (8.0,)), draft=Curve((1.0,), (6.0,)))
KNEE = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 4.0, 5.0), (8.0, 8.0, 24.0)))


def seen(drafted: list[int]) -> Observation:
    requests = np.zeros((len(drafted), len(REQUEST_FEATURES)), np.float32)
    requests[:, REQUEST_FEATURES.index("drafted")] = np.array(drafted) / MAX_DEPTH
    requests[:, REQUEST_FEATURES.index("acceptance_fast")] = 0.5
    return Observation(requests, np.zeros(len(LOAD_FEATURES), np.float32))


def ahead(*rows: str) -> Ints:
    """[N, AHEAD] of outputs that go on as these 0s and 1s say, the token of the next position first."""
    table = np.full((len(rows), AHEAD), -1)
    for i, row in enumerate(rows):
        for j in range(min(AHEAD, len(row))):
            run = len(row[j:]) - len(row[j:].lstrip("1"))
            table[i, j] = min(run, len(row) - 1 - j)
    return table


def test_it_verifies_the_right_tokens_among_the_drafted_and_drafts_the_longest_next_run() -> None:
    truth = ahead("110111110000", "0110000", "111")
    decision = OraclePolicy(FLAT, lambda: truth).decide(seen([7, 7, 2]))
    assert decision.lengths.tolist() == [2, 0, 2]
    # past 2 right ones and one of the target's: 11111; past the target's own: 11; the third one ends
    assert decision.draft_depth == 5


def test_it_takes_first_tokens_first_and_stops_where_rows_get_dear() -> None:
    truth = ahead("1110", "1110")
    decision = OraclePolicy(KNEE, lambda: truth).decide(seen([3, 3]))
    assert decision.lengths.tolist() == [1, 1]


def test_it_drafts_nothing_that_the_next_step_cannot_use() -> None:
    truth = ahead("100000", "00000")
    decision = OraclePolicy(FLAT, lambda: truth).decide(seen([3, 3]))
    assert decision.lengths.tolist() == [1, 0]
    assert decision.draft_depth == 0


@pytest.mark.parametrize("rows", [[], ["1", "1"]])
def test_where_the_next_requests_are_unknown_it_drafts_what_usually_pays(rows: list[str]) -> None:
    decisions = [OraclePolicy(cost, lambda: ahead(*rows)).decide(seen([1] * len(rows))) for cost in (FLAT, DEAR)]
    assert all(decision.lengths.shape == (len(rows),) for decision in decisions)
    assert [decision.draft_depth for decision in decisions] == [6, 0]  # at an acceptance of 0.6


def test_a_truth_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"truth has shape \(1, 9\); \(2, 9\) expected"):
        OraclePolicy(FLAT, lambda: ahead("1")).decide(seen([1, 1]))


def replayed(name: str, load: float) -> tuple[list[Advance], float]:
    tape = Tape.iid(0.6, requests=32, seed=4)
    cost = StepCost(
        name="t", device="t", source="t", verify=Curve((1.0, 24.0, 96.0), (8.0, 8.0, 16.0)), draft=Curve((1.0,), (0.4,))
    )
    engines = Engines(tape, cost, slots=16)
    engines.start(0, sample_trace(Poisson(), np.random.default_rng(2), 32, load, tape))
    policy = OraclePolicy(cost, lambda: engines.truth(0)) if name == "oracle" else make_policy(name, cost)
    steps = []
    while not engines.done[0]:
        observation = engines.observe().of(0)
        decision: Decision = checked(policy.decide(observation), observation.running, Capabilities())
        steps.append(engines.step(decision.lengths, np.array([decision.draft_depth])))
    return steps, sum(float(step.system_s[0]) for step in steps)


@pytest.mark.parametrize("load", [2.0, 20.0])
def test_in_the_simulator_no_verified_token_is_ever_rejected_and_no_rule_is_faster(load: float) -> None:
    steps, system_s = replayed("oracle", load)
    assert sum(int(step.verified.sum()) for step in steps) > 1000
    assert all((step.verified == step.accepted).all() for step in steps)
    for rule in ("goodput", "schedule", "static:3"):
        assert system_s < replayed(rule, load)[1]


def test_by_name_it_says_that_it_needs_the_simulator_and_servers_are_not_offered_it() -> None:
    with pytest.raises(PolicyError, match=r"policy 'oracle'.*simulator only") as error:
        make_policy("oracle", FLAT)
    assert "\n" not in str(error.value)
    assert not any("oracle" in name for name in KNOWN)
