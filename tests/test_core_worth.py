"""What drafted tokens are worth: against brute force, a published table, and through the goodput policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from faser.core import MAX_DEPTH, Observation
from faser.costs import Curve, StepCost
from faser.policies.goodput import Goodput
from faser.requests import RequestTable
from faser.worth import BINS, depth_values, row_price

FLAT = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 2.0), (8.0, 8.0)))
STEEP = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 2.0), (1.0, 2.0)), draft=Curve((1.0,), (0.5,)))
KNEE = StepCost(
    name="t",
    device="t",
    source="t",
    verify=Curve((1.0, 40.0, 41.0), (8.0, 8.4, 8.6)),
    draft=Curve((1.0, 2.0), (0.2, 0.21)),
    context_ms=0.0001,
)


def seen(confidence: list[list[float]], cost: StepCost, steps: int = 40) -> Observation:
    """What is seen of requests whose drafts have been like `confidence` for some steps."""
    n = len(confidence)
    padded = np.array([[*row, *[0.0] * (MAX_DEPTH - len(row))] for row in confidence], np.float32)
    table, slots = RequestTable(n, capacity=n), np.arange(n)
    for slot in range(n):
        table.admit(slot, context=10, max_tokens=64, arrival=0.0)
    for _ in range(steps):
        table.draft(slots, padded, np.array([len(row) for row in confidence]))
        observation = table.observe(slots, cost, now=0.0, waiting=0, kv_usage=0.0, prefill_tokens=0, step_ms=8.0)
    return observation


def brute_force(survival: np.ndarray, cost: StepCost, running: int, prefill: int, context: float) -> float:
    """Best (N + sum of survivals) / ms over all sets of tokens that survive with more than some probability."""
    best, alone = 0.0, cost.step_ms(rows=running, batch=running, context=context)
    at = {"batch": running, "context": context, "prefill": prefill}
    without = cost.step_ms(rows=running + prefill, **at)
    for chosen in (survival[survival > threshold] for threshold in [0.0, *np.unique(survival)]):
        ms = cost.step_ms(rows=running + prefill + len(chosen), **at) - without + alone
        best = max(best, (running + float(chosen.sum())) / ms)
    return best


@pytest.mark.parametrize("cost", [KNEE, replace(KNEE, attend_ms=0.001)], ids=["knee", "attending"])
@pytest.mark.parametrize("prefill", [0, 30])
def test_the_price_is_that_of_the_best_set_of_tokens_in_each_of_several_engines(prefill: int, cost: StepCost) -> None:
    rng = np.random.default_rng(0)
    running = np.array([3, 0, 12, 25])
    owner = np.repeat(np.arange(4), running)
    survival = np.cumprod(rng.uniform(0.3, 1.0, (40, MAX_DEPTH)), axis=1).astype(np.float32)
    survival = np.round(survival * BINS) / np.float32(BINS)  # where survivals are told apart
    survival[:, 5:] = 0.0  # not drafted
    context = np.array([100.0, 0.0, 900.0, 5000.0])
    price = row_price(
        survival, owner, cost, running=running, prefill_tokens=np.full(4, float(prefill)), context=context
    )
    for engine in (0, 2, 3):
        mine, n = survival[owner == engine], int(running[engine])
        chosen = mine > price[engine]
        alone = {"batch": n, "context": float(context[engine])}
        at = {**alone, "prefill": prefill}
        spent = cost.step_ms(rows=n + prefill + int(chosen.sum()), **at) - cost.step_ms(rows=n + prefill, **at)
        reached = (n + mine[chosen].sum()) / (spent + cost.step_ms(rows=n, **alone))
        assert reached == pytest.approx(brute_force(mine, cost, n, prefill, float(context[engine])), rel=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(StepCost):
    """ms per step by batch and K, measured by others."""

    table: dict[int, list[float]]

    def ms(self, *, batch: Any, depth: Any, **_: Any) -> np.ndarray:  # type: ignore[override]  # rows do not matter here
        return np.array([[self.table[int(n)][d] for d in depth] for n in np.ravel(batch)])


def test_depths_of_a_published_case_are_those_that_it_names() -> None:
    # vLLM pull request 32374: ms per step by batch and K (K = 2 and 4 were not measured), and marginal acceptance
    never = 1e9
    table = {
        1: [6.52, 7.37, never, 8.84, never, 10.33, never, never],
        4: [6.60, 7.47, never, 8.98, never, 10.40, never, never],
        16: [6.90, 7.85, never, 9.52, never, 11.20, never, never],
        64: [7.77, 9.66, never, 13.50, never, 16.83, never, never],
        256: [14.49, 27.14, never, 41.85, never, 57.40, never, never],
    }
    cost = Published(name="t", device="t", source="t", verify=Curve((1.0,), (1.0,)), table=table)
    running = np.array([1, 4, 16, 64, 256])
    marginal = np.array([0.681, 0.391, 0.204, 0.101, 0.051, 0.0, 0.0])
    gain = np.stack([running[:, None] * marginal, np.ones((5, MAX_DEPTH))], axis=1)
    values = depth_values(gain, cost, running=running, context=np.zeros(5))
    assert values.argmax(axis=1).tolist() == [3, 3, 3, 1, 0]
    assert values.max(axis=1) == pytest.approx(np.ones(5))
    assert values[4, 0] / values[4, 1] == pytest.approx((1 / 14.49) / (1.681 / 27.14))


def test_goodput_verifies_everything_and_drafts_all_when_both_are_free() -> None:
    decision = Goodput().decide(seen([[0.9, 0.8, 0.1], [0.2]], FLAT))
    assert decision.lengths.tolist() == [3, 1]
    assert decision.draft_depth == MAX_DEPTH


def test_goodput_verifies_and_drafts_nothing_when_a_row_costs_a_step() -> None:
    decision = Goodput().decide(seen([[0.9, 0.8, 0.1], [0.2]], STEEP))
    assert decision.lengths.tolist() == [0, 0]
    assert decision.draft_depth == 0


def test_goodput_spends_rows_on_the_surest_tokens() -> None:
    cost = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 101.0), (4.0, 104.0)))
    assert Goodput().decide(seen([[0.95, 0.9, 0.85], [0.3, 0.1, 0.05]], cost)).lengths.tolist() == [3, 0]


def test_a_draft_is_worth_what_will_be_chosen_of_it_and_not_what_all_of_it_would_bring() -> None:
    # Half of the requests are sure of their drafts. Eight rows cost a fifth of a step: those of the others never pay.
    cost = StepCost(
        name="t", device="t", source="t", verify=Curve((1.0, 8.0, 108.0), (8.0, 8.0, 28.0)), draft=Curve((1.0,), (0.1,))
    )
    sure, unsure = [0.98] * 7, [0.15] * 7
    assert Goodput().decide(seen([sure] * 4 + [unsure] * 4, cost)).draft_depth >= 6
    assert Goodput().decide(seen([unsure] * 8, cost)).draft_depth <= 1
