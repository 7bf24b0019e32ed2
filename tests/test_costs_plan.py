"""The grid of a profile: what it covers, that it fits its engine, and what it is expected to take."""

from __future__ import annotations

import pytest

from faser.core import MAX_DEPTH
from faser.costs import Curve, StepCost, load_profile
from faser.costs.plan import CONTEXTS, HOLD, LADDER, PROMPTS, Visit, estimate_s, plan, prompts_of

ROOMY = {"longest": 8193, "kv_tokens": 10_000_000, "budget": 8192}


def test_a_roomy_engine_gets_every_batch_context_and_prompt() -> None:
    visits = plan(max_batch=256, **ROOMY)
    decoding = {(v.batch, v.context) for v in visits if not v.prompt}
    assert decoding == {(b, c) for b in LADDER for c in CONTEXTS}
    assert [v.prompt for v in visits if not v.batch] == list(PROMPTS)
    assert {v.batch for v in visits if v.batch and v.prompt} == {1, 8, 32, 128}
    assert all(v.steps >= 2 * HOLD for v in visits)


def test_nothing_is_asked_that_does_not_fit() -> None:
    longest, kv_tokens, budget = 2048, 40_000, 2000
    visits = plan(max_batch=64, longest=longest, kv_tokens=kv_tokens, budget=budget)
    assert {v.context for v in visits if v.batch and not v.prompt} == {64, 1024}
    for v in visits:
        assert v.batch <= 64
        assert v.context + v.steps * 2 < longest
        assert v.batch * (v.context + 2 * v.steps) < kv_tokens
        assert v.batch * (1 + MAX_DEPTH) + (v.prompt if v.batch else 0) <= budget
    assert max(v.prompt for v in visits) == budget
    assert (64, 1024) not in {(v.batch, v.context) for v in visits}


def test_long_prompts_are_several() -> None:
    visit = Visit(batch=0, context=0, steps=9, prompt=2500)
    assert prompts_of(visit, 8192) == [1024, 1024, 452]
    assert prompts_of(visit, 901) == [900, 900, 700]
    assert prompts_of(Visit(batch=4, context=64, steps=9), 8192) == []


def test_a_quick_plan_is_much_shorter() -> None:
    cost = load_profile("h200-llama2-13b")
    quick, whole = (plan(max_batch=256, quick=q, **ROOMY) for q in (True, False))
    assert 10 * estimate_s(quick, cost) < estimate_s(whole, cost)
    assert {v.batch for v in quick} == {0, 1, 4}


def test_a_13b_profile_is_expected_to_take_under_170_s_on_an_h200() -> None:
    visits = plan(max_batch=256, longest=8192, kv_tokens=120_000, budget=8192 - 256)
    assert 20 < estimate_s(visits, load_profile("h200-llama2-13b")) < 170


def test_an_estimate_is_the_steps_and_the_prompts_before_them() -> None:
    cost = StepCost(name="", device="", source="", verify=Curve((0.0, 1.0), (0.0, 1.0)))
    rows = 4 * (1 + MAX_DEPTH // 3)
    visit = Visit(batch=4, context=100, steps=10)
    assert estimate_s([visit, visit], cost) == pytest.approx(2 * (10 * rows + 400) / 1e3)
    assert estimate_s([Visit(batch=0, context=0, steps=5, prompt=64)], cost) == pytest.approx(5 * 64 / 1e3)
