"""Step costs: measured curves, what lies beyond them, and what a bad file is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.costs import Curve, StepCost, known_profiles, load_profile
from faser.costs.step_cost import PROFILES


def test_a_curve_is_flat_before_linear_between_and_keeps_its_last_slope() -> None:
    curve = Curve((10.0, 20.0, 40.0), (1.0, 2.0, 6.0))
    assert curve(np.array([0, 10, 15, 30, 40, 50, 140])).tolist() == [1.0, 1.0, 1.5, 4.0, 6.0, 8.0, 26.0]
    assert float(curve(50)) == 8.0
    assert Curve((3.0,), (2.0,))([1, 3, 99]).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("x", "ms"),
    [((), ()), ((1.0, 2.0), (1.0,)), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), (-1.0,)), ((1.0,), (float("nan"),))],
)
def test_an_impossible_curve_is_an_error(x: tuple[float, ...], ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a curve"):
        Curve(x, ms)


def linear(floor: float, row: float, draft: float, context_ms: float = 0.0) -> StepCost:
    return StepCost(
        name="linear",
        device="none",
        source="made up",
        verify=Curve((0.0, 1.0), (floor, floor + row)),
        draft=Curve((1.0,), (draft,)),
        context_ms=context_ms,
    )


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = linear(5.0, 0.1, 0.3, context_ms=0.001)
    assert cost.step_ms(rows=20, batch=4, depth=3, context=1000) == pytest.approx(5 + 2 + 0.9 + 1)


def test_a_step_takes_what_the_slower_of_device_and_host_takes() -> None:
    cost = replace(linear(5.0, 0.1, 0.3), host_ms=4.0, launch_ms=2.0)
    took = cost.ms(rows=10, batch=1, depth=np.arange(4))
    assert took.tolist() == pytest.approx([6.0, 6.3, 8.0, 10.0])
    assert cost.step_ms(rows=100, batch=1, depth=3) == pytest.approx(15.9)
    assert cost.ms(rows=[[1], [2]], batch=[1, 2, 3], context=np.zeros(3)).shape == (2, 3)


def test_break_even_of_a_draft_step_is_what_the_host_takes_for_it() -> None:
    quick = linear(5.0, 0.1, 0.0)
    slow = replace(quick, host_ms=5.1, launch_ms=0.5)
    assert quick.break_even(batch=1)[2] == 0.0
    assert slow.break_even(batch=1)[2] == pytest.approx(0.5 / 5.1)
    assert slow.break_even(batch=100)[2] == 0.0  # hidden behind a verification of 15 ms


def test_break_even_of_a_linear_cost_is_the_known_one() -> None:
    floor, row, draft, batch, prefill, context_ms, context = 6.0, 0.05, 0.4, 10, 30, 0.002, 500
    cost = linear(floor, row, draft, context_ms)
    now = floor + row * batch + context_ms * context  # the prompts' own time prices nothing
    first, last, step = cost.break_even(batch=batch, prefill_tokens=prefill, context=context)
    assert first == pytest.approx(batch * row / now)
    assert last == pytest.approx(first)  # linear: the K-th row costs what the first does
    assert step == pytest.approx(draft / now)


def test_where_rows_attend_each_reads_its_requests_context_and_prompts_have_neither_that_nor_logits() -> None:
    cost = replace(linear(6.0, 0.05, 0.4, 0.002), attend_ms=0.001)
    batch, prefill, context = 10, 30, 500
    headed = replace(cost, logits_ms=0.2)
    for asked in ({"rows": 30}, {"rows": 60, "prefill": 30}):
        assert headed.step_ms(**asked, batch=10) == pytest.approx(cost.step_ms(**asked, batch=10) + 30 * 0.2)
    assert cost.step_ms(rows=30, batch=10, context=500) == pytest.approx(6.0 + 30 * 0.05 + 500 * (0.002 + 2 * 0.001))
    mixed = cost.ms(rows=batch + prefill, batch=batch, context=context, prefill=prefill)
    assert mixed == pytest.approx(6.0 + 40 * 0.05 + 500 * 0.002)
    first, last, _ = cost.break_even(batch=batch, prefill_tokens=prefill, context=context)
    assert first == pytest.approx((batch * 0.05 + context * 0.001) / (6.0 + batch * 0.05 + context * 0.002))
    assert last == pytest.approx(first)


def test_a_slower_device_takes_longer_for_everything() -> None:
    cost = replace(linear(6.0, 0.05, 0.4, 0.002), attend_ms=0.001, host_ms=5.0, launch_ms=9.0)
    for asked in ({"rows": 30, "batch": 10, "context": 500}, {"rows": 30, "batch": 10, "depth": 7}):
        assert cost.scaled(1.5).step_ms(**asked) == pytest.approx(1.5 * cost.step_ms(**asked))


def test_break_even_sees_the_knee() -> None:
    cost = StepCost(name="", device="", source="", verify=Curve((64.0, 65.0), (8.0, 8.1)))
    first, last, _ = cost.break_even(batch=16)
    assert first == 0.0  # 16 -> 32 rows: still flat
    assert last == pytest.approx(16 * 0.1 / 8.0)
    assert MAX_DEPTH * 16 > 65


def test_speculation_at_the_break_even_survival_neither_gains_nor_loses() -> None:
    cost = linear(4.0, 0.1, 0.0)
    first, _, _ = cost.break_even(batch=8)
    without = 8 / cost.step_ms(rows=8, batch=8)
    assert 8 * (1 + first) / cost.step_ms(rows=16, batch=8) == pytest.approx(without)


@pytest.mark.parametrize("name", known_profiles())
def test_shipped_profiles_load_and_never_get_cheaper_with_more_rows(name: str) -> None:
    cost = load_profile(name)
    assert cost.name == name
    assert cost.source
    times = [cost.step_ms(rows=rows, batch=1) for rows in (1, 8, 64, 256, 1024, 4096)]
    assert times == sorted(times)


def test_the_13b_profile_gives_back_what_was_measured() -> None:
    """Medians of the step log behind it: the idle engine's step, and what a row costs once the GPU computes."""
    cost = load_profile("h200-llama2-13b")
    assert cost.step_ms(rows=1, batch=1, context=68) == pytest.approx(11.7, rel=0.1)
    assert cost.step_ms(rows=3, batch=1, depth=4, context=1040) == pytest.approx(13.2, rel=0.1)
    assert cost.step_ms(rows=128, batch=128, context=30_500) == pytest.approx(27.0, rel=0.1)
    assert (cost.verify(4096) - cost.verify(1024)) / 3072 == pytest.approx(0.035, rel=0.1)


GOOD: dict[str, Any] = {"name": "n", "device": "d", "source": "s", "curves": {"verify": {"x": [1, 2], "ms": [3, 4]}}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source": None}, "source is None; allowed: text"),
        ({"floor": 1}, "holds an object of .*floor; allowed"),
        ({"curves": []}, r"curves is \[\]"),
        ({"curves": {"draft": {"x": [1], "ms": [1]}}}, "curves is an object of draft; allowed: .* with verify"),
        ({"curves": {"verify": {"x": [1], "ms": [1]}, "prune": {}}}, "curves is an object of verify, prune"),
        ({"curves": {"verify": {"x": [1]}}}, "verify is an object of x; allowed: an object of x and ms"),
        ({"curves": {"verify": {"x": [1, "2"], "ms": [1, 2]}}}, r"verify.x\[1\] is '2'; allowed: numbers"),
        ({"curves": {"verify": {"x": 5, "ms": [1]}}}, "verify.x is 5; allowed: a list of numbers"),
        ({"curves": {"verify": {"x": [1, 2], "ms": [1, 10**400]}}}, r"verify.ms\[1\] is 1000.*; allowed"),
        ({"curves": {"verify": {"x": [1, 2], "ms": [1, 1e308]}}}, r"verify.ms\[1\] is 1e\+308; allowed"),
        ({"curves": {"verify": {"x": [1], "ms": [0]}}}, "a step of 1 rows takes 0 ms; allowed: over 0"),
        ({"curves": {"verify": {"x": [1, 2], "ms": [9, 1]}}}, "a step of 8192 rows takes 0 ms; allowed: over 0"),
        ({"host_ms": 10**400}, "host_ms is 1000.*; allowed: 0 or more, up to"),
        ({"measured": {"target": 5}}, "measured.target is 5; allowed: an object"),
        ({"curves": {"verify": {"x": [2, 1], "ms": [1, 2]}}}, "verify: a curve's x must increase"),
        ({"curves": {"verify": {"x": [1], "ms": [-1]}}}, "verify: a curve's ms must be finite and not negative"),
        ({"context_ms": -1}, "context_ms is -1; allowed: 0 or more"),
        ({"host_ms": None}, "host_ms is None; allowed: 0 or more"),
        ({"launch_ms": "2"}, "launch_ms is '2'; allowed: 0 or more"),
        ({"measured": []}, r"measured is \[\]; allowed: an object of date, "),
        ({"measured": {"mood": 1}}, "measured is an object of mood; allowed"),
    ],
)
def test_a_bad_profile_names_its_fault(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(GOOD))
    assert load_profile(path).step_ms(rows=3, batch=1) == 5.0
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ValueError, match=says) as error:
        load_profile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "[" * 100_000])
def test_a_file_that_holds_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"profile .*p\.json"):
        load_profile(path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="File name too long"):
        load_profile("a" * 5000)


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"profile 'b300' is unknown; known: .*h200-llama2-13b"):
        load_profile("b300")
    assert PROFILES.is_dir()
