"""The request table makes observations that say what they should, and learns acceptance only from what was judged."""

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.costs import Curve, StepCost
from faser.requests import PRIOR, RequestTable

LINEAR = StepCost(
    name="t", device="t", source="t", verify=Curve((1.0, 101.0), (8.0, 108.0)), draft=Curve((1.0,), (2.0,))
)
"""7 ms + 1 ms a row; 2 ms a draft step."""


def table(requests: int = 3) -> RequestTable:
    t = RequestTable(8, capacity=4, latency_target_s=10.0)
    for slot in range(requests):
        t.admit(slot, context=100, max_tokens=64, arrival=float(slot))
    return t


def observe(t: RequestTable, slots: list[int], **changes: float):  # type: ignore[no-untyped-def]  # keyword soup of a test
    at = {"now": 2.0, "waiting": 4, "kv_usage": 0.5, "prefill_tokens": 0, "step_ms": 16.0} | changes
    return t.observe(np.array(slots, np.int64), LINEAR, **at)


def test_confidences_past_the_draft_are_zero_and_survival_is_their_product() -> None:
    t = table()
    confidence = np.full((2, MAX_DEPTH), 0.5, np.float32)
    t.draft(np.array([0, 2]), confidence, np.array([2, 0]))
    seen = observe(t, [0, 1, 2])
    assert seen.confidence[0].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0]
    assert seen.survival[0].tolist() == [0.5, 0.25, 0, 0, 0, 0, 0]
    assert not seen.survival[1:].any()
    assert seen.drafted.tolist() == [2, 0, 0]


def test_load_features_carry_the_break_even_points_of_the_cost_model() -> None:
    seen = observe(table(), [0, 1, 2])
    assert seen.of_load("running") == pytest.approx(3 / 4)
    assert seen.of_load("waiting") == pytest.approx(4 / 8)
    assert seen.of_load("step_floor") == pytest.approx(8 / 16)
    assert seen.of_load("verify_cost") == pytest.approx(3 * 1 / 10)  # 3 rows more on a step of 10 ms
    assert seen.of_load("verify_cost_full") == pytest.approx(3 * 1 / 10)
    assert seen.of_load("draft_cost") == pytest.approx(2 / 10)


def test_lateness_and_budget() -> None:
    t = table()
    t.generated[0] = 64
    seen = observe(t, [0, 1])
    assert seen.request("lateness").tolist() == pytest.approx([0.2, 0.1])
    assert seen.request("budget").tolist() == pytest.approx([0.0, 0.5])
    assert observe(t, [0], now=1e9).request("lateness").tolist() == [1.0]


def test_a_step_that_verified_nothing_is_not_zero_acceptance() -> None:
    t = table()
    before = t.acceptance_fast.copy(), t.last_accepted.copy()
    t.record(np.array([0, 1]), np.array([0, 0]), np.array([0, 0]))
    assert (t.acceptance_fast == before[0]).all()
    assert (t.last_accepted == before[1]).all()


def test_acceptance_converges_to_the_true_rate_whatever_the_length() -> None:
    rng = np.random.default_rng(0)
    t = table()
    for _ in range(4000):
        verified = rng.integers(0, MAX_DEPTH + 1, 3)
        matches = rng.random((3, MAX_DEPTH)) < [[0.3], [0.6], [0.9]]
        run = np.cumprod(matches, axis=1).sum(axis=1)
        t.record(np.arange(3), verified, np.minimum(run, verified))
    assert t.acceptance_slow[:3] == pytest.approx([0.3, 0.6, 0.9], abs=0.12)


def test_excluded_requests_stay_out_of_the_shared_estimate() -> None:
    t = table()
    t.admit(0, context=1, max_tokens=9, arrival=0.0, excluded=True)
    for _ in range(100):
        t.record(np.array([0]), np.array([4]), np.array([0]))
    assert t.acceptance == pytest.approx(PRIOR)
    assert t.acceptance_slow[0] < 0.3
    t.record(np.array([1]), np.array([4]), np.array([0]))
    assert t.acceptance < PRIOR


def test_the_shared_estimate_is_the_same_with_excluded_requests_beside_the_others() -> None:
    alone, beside = table(), table()
    beside.admit(0, context=1, max_tokens=9, arrival=0.0, excluded=True)
    for _ in range(20):
        alone.record(np.array([1, 2]), np.array([4, 3]), np.array([1, 3]))
        beside.record(np.array([0, 1, 2]), np.array([7, 4, 3]), np.array([0, 1, 3]))
    assert alone.acceptance == beside.acceptance != PRIOR


def test_the_shared_estimate_forgets_when_nothing_is_verified() -> None:
    t = table()
    for _ in range(300):
        t.record(np.array([1]), np.array([4]), np.array([0]))
    low = t.acceptance[0]
    for _ in range(3000):
        t.record(np.array([1]), np.array([0]), np.array([0]))
    assert low < 0.2 < PRIOR - 0.05 < t.acceptance


def test_growing_keeps_what_is_known() -> None:
    t = table()
    t.context[1] = 77
    assert list(t.grow()) == list(range(8, 16))
    assert t.context[1] == 77
    t.admit(15, context=5, max_tokens=1, arrival=0.0)
    assert t.context[15] == 5
