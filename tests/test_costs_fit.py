"""Fitting step costs: known clocks come back through noise, outliers and stairs, and too few steps are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Observation
from faser.costs import Curve, StepCost, load_profile
from faser.costs.fit import errors, fit, held_out, predict, save
from faser.costs.plan import HOLD, plan
from faser.costs.steps import Array, Steps, grid_points
from faser.policies.probe import Probe

TRUE = StepCost(
    name="true",
    device="none",
    source="",
    verify=Curve((1.0, 128.0, 2048.0), (8.0, 9.0, 85.0)),
    draft=Curve((1.0, 256.0), (0.3, 0.8)),
    context_ms=0.0002,
)
HOSTED = replace(TRUE, host_ms=6.0, launch_ms=2.0)
"""Whose host launches draft steps more slowly than the device carries them out."""
GRAPHS = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)])
"""Sizes that vLLM pads the rows of a step to, up to 512: stairs."""


def with_ms(steps: Steps, ms: Array) -> Steps:
    return replace(steps, ms=ms)


def steps_of(cost: StepCost, *, seed: int = 0, per_batch: int = 300) -> Steps:
    """Steps at a ladder of batches with random depths, rows and contexts, each of exactly the ms that `cost` gives."""
    rng = np.random.default_rng(seed)
    batch = np.repeat(np.array([1, 2, 4, 8, 16, 32, 64, 128, 256], np.float64), per_batch)
    count = len(batch)
    rows = batch * (1.0 + rng.integers(0, MAX_DEPTH + 1, count))
    depth = rng.integers(0, MAX_DEPTH + 1, count).astype(np.float64)
    context = batch * rng.integers(10, 800, count).astype(np.float64)
    steps = Steps(rows=rows, batch=batch, depth=depth, context=context, ms=np.ones(count), prefill=np.zeros(count))
    return with_ms(steps, predict(cost, steps))


def disturbed(steps: Steps, *, noise: float, slow: float) -> Steps:
    """`steps` with symmetric relative noise, and a share `slow` of them taking 1.5 to 5 times as long."""
    rng = np.random.default_rng(1)
    count = len(steps)
    factor = 1 + rng.uniform(-noise, noise, count)
    factor *= np.where(rng.random(count) < slow, rng.uniform(1.5, 5.0, count), 1.0)
    return with_ms(steps, steps.ms * factor)


def fitted(steps: Steps) -> StepCost:
    return fit(steps, name="fitted", device="none", source="")


def in_stairs(cost: StepCost, steps: Steps) -> Array:
    """ms of `steps` on a device of `cost` that runs as many rows as the next CUDA graph has."""
    graph = GRAPHS[np.minimum(np.searchsorted(GRAPHS, steps.rows), len(GRAPHS) - 1)]
    return predict(cost, replace(steps, rows=np.where(steps.rows <= GRAPHS[-1], graph, steps.rows)))


def probed(cost: StepCost) -> Steps:
    """The log of a whole profile on an engine of `cost`, in stairs, undisturbed."""
    probe, drafted, table = Probe(HOLD, 0), 0, []
    load = np.zeros(len(LOAD_FEATURES), np.float32)
    load[LOAD_FEATURES.index("prefill_share")] = 0.5
    for visit in plan(max_batch=256, longest=8192, kv_tokens=110_000, budget=8000):
        context = visit.batch * visit.context
        for _ in range(visit.steps):
            decision = probe.decide(Observation(np.zeros((visit.batch, len(REQUEST_FEATURES)), np.float32), load))
            verified = int(np.minimum(decision.lengths, drafted).sum())
            rows = visit.batch + verified + visit.prompt
            table.append((rows, visit.batch, decision.draft_depth, context, 0.0, visit.prompt))
            context += visit.batch + verified // 2
            drafted = decision.draft_depth
    steps = Steps.of(np.array(table, np.float64))
    return with_ms(steps, in_stairs(cost, steps))


def traffic() -> Steps:
    """Steps as a server has them: any number of requests and rows, prompts among them."""
    rng = np.random.default_rng(9)
    count = 2000
    batch = rng.integers(1, 150, count).astype(np.float64)
    prefill = np.where(rng.random(count) < 0.15, rng.integers(20, 900, count), 0).astype(np.float64)
    return Steps(
        rows=np.rint(batch * rng.uniform(1, 6, count)) + prefill,
        batch=batch,
        depth=rng.integers(0, MAX_DEPTH + 1, count).astype(np.float64),
        context=batch * rng.integers(100, 900, count),
        ms=np.ones(count),
        prefill=prefill,
    )


def test_exact_steps_give_their_curves_back() -> None:
    cost = fitted(steps_of(TRUE))
    for rows in (1, 20, 128, 600, 2048):
        assert cost.step_ms(rows=rows, batch=1) == pytest.approx(TRUE.step_ms(rows=rows, batch=1), rel=0.02)
    assert float(cost.draft(64)) == pytest.approx(float(TRUE.draft(64)), rel=0.1)
    assert cost.context_ms == pytest.approx(TRUE.context_ms, rel=0.1)
    assert cost.host_ms == cost.launch_ms == 0.0


def test_what_rows_attend_to_comes_back() -> None:
    true = replace(TRUE, attend_ms=0.0003)
    cost = fitted(steps_of(true))
    assert cost.attend_ms == pytest.approx(true.attend_ms, rel=0.05)
    assert cost.context_ms == pytest.approx(true.context_ms, rel=0.1)
    assert fitted(steps_of(TRUE)).attend_ms < 0.01 * true.attend_ms


def test_what_an_output_head_costs_comes_back_from_steps_with_and_without_prompts() -> None:
    true = replace(TRUE, logits_ms=0.05)
    steps = steps_of(true)
    rng = np.random.default_rng(3)
    prompts = rng.integers(0, 400, len(steps)) * (rng.random(len(steps)) < 0.3)
    mixed = replace(steps, rows=steps.rows + prompts, prefill=prompts.astype(np.float64))
    assert fitted(with_ms(mixed, predict(true, mixed))).logits_ms == pytest.approx(true.logits_ms, rel=0.05)


def test_the_hosts_share_comes_back() -> None:
    cost = fitted(disturbed(steps_of(HOSTED), noise=0.05, slow=0.05))
    assert cost.host_ms == pytest.approx(HOSTED.host_ms, rel=0.05)
    assert cost.launch_ms == pytest.approx(HOSTED.launch_ms, rel=0.05)
    clean = steps_of(HOSTED, seed=5)
    assert errors(cost, clean).mape < 0.02
    assert errors(replace(cost, host_ms=0.0, launch_ms=0.0), clean).mape > 0.05


@pytest.mark.parametrize("clock", [TRUE, HOSTED])
def test_a_profile_of_a_clock_with_stairs_tells_the_time_of_traffic(clock: StepCost) -> None:
    points = grid_points(probed(clock))
    assert len(points) > 150
    assert held_out(points).mape < 0.01
    served = traffic()
    found = errors(fitted(points), with_ms(served, in_stairs(clock, served)))
    assert found.mape < 0.02
    assert abs(found.total) < 0.01


def test_a_profile_of_a_busy_machine_is_within_five_percent() -> None:
    points = grid_points(disturbed(probed(HOSTED), noise=0.1, slow=0.1))
    assert held_out(points).mape < 0.05
    served = traffic()
    assert abs(errors(fitted(points), with_ms(served, in_stairs(HOSTED, served))).total) < 0.05


def test_noise_and_a_slow_tail_do_not_move_the_fit() -> None:
    clean = steps_of(TRUE)
    expected = predict(fitted(disturbed(clean, noise=0.1, slow=0.15)), clean)
    assert np.median(np.abs(expected / clean.ms - 1)) < 0.02
    assert np.quantile(np.abs(expected / clean.ms - 1), 0.95) < 0.06
    for batch in (1, 256):
        part = clean.batch == batch
        assert abs(np.mean(expected[part] / clean.ms[part]) - 1) < 0.03


def test_steps_that_take_half_or_twice_the_time_pull_alike() -> None:
    """An error relative to the step's own time would count the half as 1 and the double as 1/2, and aim too low."""
    clean = steps_of(TRUE)
    rng = np.random.default_rng(3)
    expected = predict(fitted(with_ms(clean, clean.ms * rng.choice([0.5, 1.0, 2.0], len(clean)))), clean)
    assert abs(np.median(expected / clean.ms) - 1) < 0.03


def test_more_rows_are_never_cheaper_and_nothing_is_negative() -> None:
    noisy = disturbed(steps_of(TRUE, per_batch=30), noise=0.6, slow=0.3)
    cost = fitted(noisy)
    assert (np.diff(cost.verify.ms) >= 0).all()
    assert min(cost.draft.ms) >= 0
    assert min(cost.context_ms, cost.host_ms, cost.launch_ms) >= 0


def test_errors_are_relative_to_what_steps_took() -> None:
    clean = steps_of(TRUE)
    exact = errors(TRUE, clean)
    assert (exact.mape, exact.worst, exact.total) == pytest.approx((0, 0, 0), abs=1e-12)
    assert exact.steps == len(clean)
    slower = errors(TRUE, with_ms(clean, 2 * clean.ms))
    assert (slower.mape, slower.worst, slower.total) == pytest.approx((0.5, 0.5, -0.5))
    assert "MAPE 50.0% of 2700" in str(slower)
    assert "total time -50.0%" in str(slower)


def test_a_third_is_held_out_by_seed_and_never_the_extremes() -> None:
    points = steps_of(TRUE, per_batch=10)
    assert held_out(points).steps == 30
    noisy = disturbed(points, noise=0.2, slow=0.0)
    assert held_out(noisy) == held_out(noisy)
    assert held_out(noisy) != held_out(noisy, seed=1)
    ends = np.isin(noisy.rows, [noisy.rows.min(), noisy.rows.max()])
    assert 0 < ends.sum() < 30
    found = held_out(with_ms(noisy, np.where(ends, 0.02 * noisy.ms, noisy.ms)))
    assert found.worst < 5.0  # an end that is held out is taken for 50 times as long as it took


def test_what_is_held_out_is_not_fitted() -> None:
    """A point of three times its cost is off by 2/3 of itself where it is held out: in a third of cases."""
    points = steps_of(TRUE, per_batch=10)
    told = 0
    for slow in range(0, len(points), 5):
        ms = np.where(np.arange(len(points)) == slow, 3 * points.ms, points.ms)
        told += held_out(with_ms(points, ms)).mape > 0.9 * (2 / 3) / 30
    assert 3 <= told <= 10


def test_too_few_points_are_refused() -> None:
    points = steps_of(TRUE, per_batch=1)
    with pytest.raises(ValueError, match="8 grid points were found; at least 9 needed"):
        held_out(points.part(np.arange(9) < 8))
    with pytest.raises(ValueError, match="5 steps to fit; at least 6 needed"):
        fitted(points.part(np.arange(9) < 5))
    with pytest.raises(ValueError, match="none of 20 points can be held out"):
        held_out(Steps.of(np.tile([4.0, 4.0, 0.0, 9.0, 5.0, 0.0], (20, 1))))


def test_a_saved_fit_loads_as_it_was(tmp_path: Path) -> None:
    points = {"columns": ["rows", "ms"], "rows": [[1.0, 8.5], [2.0, 1e-05]]}
    cost = replace(
        fitted(steps_of(HOSTED)), measured={"date": "2026-01-01", "clocks": {"sm_mhz": [1, 2, 3]}, "points": points}
    )
    (tmp_path / "p.tmp").write_text("the user's own")
    save(cost, tmp_path / "p.json")
    loaded = load_profile(tmp_path / "p.json")
    assert loaded == cost
    assert loaded.measured == cost.measured
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "p.tmp"]
    assert (tmp_path / "p.tmp").read_text() == "the user's own"
    text = (tmp_path / "p.json").read_text()
    assert "[1, 2, 3]" in text
    assert len(text.splitlines()) < 45
    assert json.loads(text)["launch_ms"] == cost.launch_ms
