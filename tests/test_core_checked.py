"""A decision is clamped to what the engine can do, and refused when the policy is at fault."""

import numpy as np
import pytest

from faser.core import MAX_DEPTH, MAX_FRONTIER, Capabilities, Decision, DecisionError, checked

ENGINE = Capabilities(max_depth=4)


def test_a_good_decision_passes_and_is_clamped_to_the_engine() -> None:
    decision = checked(Decision(np.array([0, 7, 3]), 7, 2), 3, ENGINE)
    assert decision.lengths.tolist() == [0, 7, 3]  # a cap on what was drafted, so it need not shrink
    assert (decision.draft_depth, decision.frontier) == (4, 0)


def test_whole_floats_are_lengths() -> None:
    assert checked(Decision(np.array([1.0, 2.0]), 1), 2, ENGINE).lengths.dtype == np.int64


def test_no_request_is_a_decision_too() -> None:
    assert checked(Decision(np.zeros(0, np.int64), 1), 0, ENGINE).draft_depth == 1


@pytest.mark.parametrize(
    ("lengths", "depth", "frontier", "reason"),
    [
        ([1, 1], 1, 0, "shape"),
        ([[1, 1, 1]], 1, 0, "shape"),
        ([1.0, np.nan, 1.0], 1, 0, "nan"),
        ([1.5, 1.0, 1.0], 1, 0, "nan"),
        (["a", "b", "c"], 1, 0, "nan"),
        ([1, 1, 1], float("nan"), 0, "nan"),
        ([1, -1, 1], 1, 0, "range"),
        ([1, MAX_DEPTH + 1, 1], 1, 0, "range"),
        ([1, 1, 1], -1, 0, "range"),
        ([1, 1, 1], MAX_DEPTH + 1, 0, "range"),
        ([1, 1, 1], 1, MAX_FRONTIER + 1, "range"),
    ],
)
def test_faults_are_named(lengths: list[object], depth: float, frontier: int, reason: str) -> None:
    with pytest.raises(DecisionError) as error:
        checked(Decision(np.array(lengths), depth, frontier), 3, ENGINE)  # type: ignore[arg-type]  # faults on purpose
    assert error.value.reason == reason


@pytest.mark.parametrize(
    "kwargs", [{"max_depth": MAX_DEPTH + 1}, {"max_depth": -1}, {"max_frontier": MAX_FRONTIER + 1}]
)
def test_capabilities_outside_the_range_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        Capabilities(**kwargs)  # type: ignore[arg-type]  # ints for ints, through a dict
