"""Whatever a policy does, the engine gets a decision, and the tally says why it was not the policy's."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from faser.controller import Controller, ControllerConfig
from faser.core import LOAD_FEATURES, REQUEST_FEATURES, Capabilities, Decision, Observation

N = 3
OBSERVATION = Observation(np.zeros((N, len(REQUEST_FEATURES)), np.float32), np.zeros(len(LOAD_FEATURES), np.float32))
CONFIG = ControllerConfig(deadline_ms=1000, fallback_length=2, bench_after=3)


class Scripted:
    """A policy that does what a function says."""

    def __init__(self, act: Callable[[], Decision]) -> None:
        self._act = act

    def decide(self, observation: Observation) -> Decision:
        assert observation is OBSERVATION
        return self._act()


def good() -> Decision:
    return Decision(np.array([1, 2, 3]), 5)


def raises() -> Decision:
    raise ZeroDivisionError("oops")


def controller(act: Callable[[], Decision], config: ControllerConfig = CONFIG) -> Controller:
    return Controller(Scripted(act), Capabilities(max_depth=4), config)


def test_a_good_policy_is_obeyed() -> None:
    c = controller(good)
    decision = c.decide(OBSERVATION)
    assert (decision.lengths.tolist(), decision.draft_depth) == ([1, 2, 3], 4)
    assert (c.tally.decisions, dict(c.tally.fallbacks)) == (1, {})


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (raises, "raised"),
        (lambda: None, "raised"),
        (lambda: Decision(np.array([1, 2]), 1), "shape"),
        (lambda: Decision(np.array([1, -2, 3]), 1), "range"),
        (lambda: Decision(np.array([1, np.nan, 3]), 1), "nan"),
    ],
)
def test_a_fault_costs_a_static_length_and_is_counted(act: Callable[[], Decision], reason: str) -> None:
    c = controller(act)
    decision = c.decide(OBSERVATION)
    assert (decision.lengths.tolist(), decision.draft_depth) == ([2, 2, 2], 2)
    assert (c.tally.decisions, dict(c.tally.fallbacks)) == (0, {reason: 1})


def test_faults_in_a_row_bench_the_policy_and_one_good_step_resets_the_count() -> None:
    acts = iter([raises, raises, good, raises, raises, raises, good])
    c = controller(lambda: next(acts)())
    for _ in range(5):
        c.decide(OBSERVATION)
    assert not c.benched
    c.decide(OBSERVATION)
    assert c.benched
    c.decide(OBSERVATION)
    assert dict(c.tally.fallbacks) == {"raised": 5, "benched": 1}


def test_a_policy_that_hangs_costs_one_deadline_and_then_nothing_until_it_returns() -> None:
    release, calls = threading.Event(), []

    def hang() -> Decision:
        calls.append(1)
        release.wait(30)
        return good()

    c = controller(hang, ControllerConfig(deadline_ms=20, fallback_length=1, bench_after=100))
    for _ in range(5):
        assert c.decide(OBSERVATION).lengths.tolist() == [1, 1, 1]
    assert len(calls) == 1  # it was not asked again while it hung
    assert dict(c.tally.fallbacks) == {"deadline": 5}
    release.set()
    for _ in range(50):  # until the late answer is in
        if c.decide(OBSERVATION).lengths.tolist() == [1, 2, 3]:
            break
        time.sleep(0.02)
    assert c.tally.decisions == 1


@pytest.mark.parametrize(
    "kwargs", [{"deadline_ms": 0}, {"deadline_ms": float("nan")}, {"fallback_length": 8}, {"bench_after": 0}]
)
def test_limits_out_of_range_are_refused_by_name(kwargs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        ControllerConfig(**kwargs)  # type: ignore[arg-type]  # faults on purpose
