"""The reward of training pays what a step saves, by the tape; the steps saved add up to the same whatever was done."""

from __future__ import annotations

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.costs import Curve, StepCost
from faser.envs.advance import Advance
from faser.envs.engines import Engines
from faser.envs.rewards import Without
from faser.envs.trace import Trace
from faser.tapes import Tape
from faser.train.shaping import StepsSaved

COST = StepCost(name="x", device="x", source="x", verify=Curve((1.0, 2.0), (10.0, 11.0)), draft=Curve((1.0,), (1.0,)))
"""9 ms and 1 ms a row; 1 ms a draft step."""
FEW = Tape.iid(0.6, requests=12, prompt_tokens=(4, 9), output_tokens=(1, 40), seed=1)


def tape(match: list[int]) -> Tape:
    """Of one request."""
    return Tape(
        domains=("x",),
        domain=np.zeros(1, np.uint8),
        prompt_tokens=np.ones(1, np.int32),
        output_tokens=np.array([len(match)], np.int32),
        max_tokens=np.array([len(match)], np.int32),
        match=np.array(match, np.bool_),
        confidence=np.zeros((len(match), MAX_DEPTH), np.uint8),
        source="x",
    )


def alone(request: int) -> Engines:
    engines = Engines(FEW, COST, engines=1, slots=1)
    engines.start(0, Trace(np.zeros(1), np.array([request])))
    return engines


@pytest.mark.parametrize("depth", range(MAX_DEPTH + 1))
def test_the_steps_left_are_those_that_the_simulator_takes(depth: int) -> None:
    left = FEW.steps_left[depth]
    for request in range(len(FEW)):
        engines, steps = alone(request), 0
        while not engines.done[0]:
            steps += len(engines.slots)
            engines.step(np.full(len(engines.slots), depth), np.array([depth]))
        first = FEW.offsets[request] + 1  # the prompt's step writes a token, too
        assert steps == (left[first] if first < FEW.offsets[request + 1] else 0)


def test_the_steps_that_a_request_is_saved_add_up_to_the_same_whatever_is_decided() -> None:
    reward, rng = StepsSaved(cost=COST, tape=FEW), np.random.default_rng(0)
    for request in range(len(FEW)):
        for _ in range(3):
            engines, saved = alone(request), np.zeros(MAX_DEPTH + 1, np.int64)
            while not engines.done[0]:
                depth, lengths = rng.integers(0, 8, 1), rng.integers(0, 8, len(engines.slots))
                advance = engines.step(lengths, depth)
                for d in range(MAX_DEPTH + 1):
                    saved[d] += reward.saved(advance, np.full(len(advance.owner), d)).sum()
            first = FEW.offsets[request] + 1
            whole = FEW.steps_left[:, first] if first < FEW.offsets[request + 1] else 0
            assert (saved == whole).all()


def test_a_step_is_paid_by_what_the_best_fixed_depth_would_have_needed() -> None:
    """At depth 1 the request needs 6, 5, 5, 4, 4, 3, 2 and 1 steps from its positions on."""
    reward = StepsSaved(cost=COST, tape=tape([1, 1, 1, 1, 0, 0, 0, 0]))
    # depth 0: 10 ms for 1 token; depth 1: 11 + 1 ms for 1.5; depth 2: 12 + 2 ms for 1.75; depth 3: 13 + 3 for 1.875
    depth, seconds = reward.best_fixed(np.array([1]))
    assert (depth[0], seconds[0]) == (1, pytest.approx(12e-3))
    # Engines: what depth 1 does; no less in less time; a step more than that; two of its steps in one; what it does,
    # beside a prompt of 9; and a prompt alone.
    seconds = np.array([12e-3, 11e-3, 11e-3, 14e-3, 21e-3, 0.1])
    advance = Advance(
        seconds=seconds,
        tokens=np.array([2, 1, 1, 4, 2, 0]),
        system_s=seconds,
        prefill_tokens=np.array([0, 0, 0, 0, 9, 9]),
        batch=np.array([1, 1, 1, 1, 2, 1]),
        depth=np.ones(6, np.int64),
        verified=np.array([1, 0, 0, 3, 1]),
        accepted=np.array([1, 0, 0, 3, 1]),
        starts=np.array([0, 1, 2, 3, 4, 5, 5]),
        owner=np.arange(5),
        finished=np.zeros(0, np.int64),
        finished_s=np.zeros(0),
        places=np.array([[0, 0, 1, 0, 6], [2, 1, 2, 4, 8]]),
    )
    without = Without(np.full(6, 2.0), np.full(6, 2.0), np.ones(6))
    merits_ms = np.array([12 - 12, 12 - 11, 0 - 11, 24 - 14, 24 - 12, 0])
    assert reward(advance, without) == pytest.approx(merits_ms / 10)
