"""Fitting step costs: known curves come back through noise and outliers, and bad logs are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.costs import Curve, StepCost, load_profile
from faser.costs.fit import ROW_KNOTS, Steps, errors, fit, predict, save

TRUE = StepCost(
    name="true",
    device="none",
    source="",
    verify=Curve((1.0, 128.0, 2048.0), (8.0, 9.0, 85.0)),
    draft=Curve((1.0, 256.0), (0.3, 0.8)),
    context_ms=0.0002,
)


def steps_of(cost: StepCost, *, seed: int = 0, per_batch: int = 300) -> Steps:
    """Steps at a ladder of batches with random depths, rows and contexts, each of exactly the ms that `cost` gives."""
    rng = np.random.default_rng(seed)
    batch = np.repeat(np.array([1, 2, 4, 8, 16, 32, 64, 128, 256], np.float64), per_batch)
    count = len(batch)
    rows = batch * (1.0 + rng.integers(0, MAX_DEPTH + 1, count))
    depth = rng.integers(0, MAX_DEPTH + 1, count).astype(np.float64)
    context = batch * rng.integers(10, 800, count).astype(np.float64)
    steps = Steps(rows=rows, batch=batch, depth=depth, context=context, ms=np.ones(count))
    return Steps(rows=rows, batch=batch, depth=depth, context=context, ms=predict(cost, steps))


def disturbed(steps: Steps, *, noise: float, slow: float) -> Steps:
    """`steps` with symmetric relative noise, and a share `slow` of them taking 1.5 to 5 times as long."""
    rng = np.random.default_rng(1)
    count = len(steps.ms)
    factor = 1 + rng.uniform(-noise, noise, count)
    factor *= np.where(rng.random(count) < slow, rng.uniform(1.5, 5.0, count), 1.0)
    return Steps(rows=steps.rows, batch=steps.batch, depth=steps.depth, context=steps.context, ms=steps.ms * factor)


def fitted(steps: Steps) -> StepCost:
    return fit(steps, name="fitted", device="none", source="")


def test_exact_steps_give_their_curves_back() -> None:
    cost = fitted(steps_of(TRUE))
    for rows in (1, 20, 128, 600, 2048):
        assert cost.step_ms(rows=rows, batch=1) == pytest.approx(TRUE.step_ms(rows=rows, batch=1), rel=0.02)
    assert float(cost.draft(64)) == pytest.approx(float(TRUE.draft(64)), rel=0.1)
    assert cost.context_ms == pytest.approx(TRUE.context_ms, rel=0.1)


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
    ms = clean.ms * rng.choice([0.5, 1.0, 2.0], len(clean.ms))
    expected = predict(
        fitted(Steps(rows=clean.rows, batch=clean.batch, depth=clean.depth, context=clean.context, ms=ms)), clean
    )
    assert abs(np.median(expected / clean.ms) - 1) < 0.03


def test_more_rows_are_never_cheaper_and_nothing_is_negative() -> None:
    noisy = disturbed(steps_of(TRUE, per_batch=30), noise=0.6, slow=0.3)
    cost = fitted(noisy)
    assert (np.diff(cost.verify.ms) >= 0).all()
    assert min(cost.draft.ms) >= 0
    assert cost.context_ms >= 0


def test_a_draft_step_may_cost_less_for_more_requests() -> None:
    hidden = StepCost(
        name="", device="", source="", verify=TRUE.verify, draft=Curve((1.0, 64.0, 256.0), (1.2, 0.2, 0.2))
    )
    cost = fitted(steps_of(hidden))
    assert float(cost.draft(1)) == pytest.approx(1.2, rel=0.1)
    assert float(cost.draft(128)) == pytest.approx(0.2, abs=0.1)


def test_errors_compare_medians_and_total() -> None:
    clean = steps_of(TRUE)
    exact = errors(TRUE, clean)
    assert (exact.step, exact.total, exact.cell) == pytest.approx((0, 0, 0), abs=1e-12)
    assert exact.cells > 50
    noisy = errors(TRUE, disturbed(clean, noise=0.3, slow=0.0))
    assert noisy.step == pytest.approx(0.15, abs=0.03)
    assert noisy.cell < 0.08  # medians of cells are less noisy than steps
    slower = errors(
        TRUE, Steps(rows=clean.rows, batch=clean.batch, depth=clean.depth, context=clean.context, ms=2 * clean.ms)
    )
    assert (slower.total, slower.cell, slower.worst_cell) == pytest.approx((-0.5, 0.5, 0.5))


def line(**changed: object) -> str:
    step = {"t": 0.0, "ms": 5.0, "running": 2, "waiting": 0, "prefill": 3, "context": 40, "depth": 1}
    return json.dumps(step | {"verified": [1, 4], "accepted": [0, 0]} | changed)


def test_a_log_is_read_without_its_warm_up_and_its_empty_steps(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    empty = line(running=0, prefill=0, verified=[], accepted=[], ms=1.0)
    log.write_text("\n".join([line(ms=900.0)] * 20 + [line(), empty] * 10 * len(ROW_KNOTS)))
    steps = Steps.read(log)
    assert len(steps.ms) == 10 * len(ROW_KNOTS)
    assert (steps.rows == 2 + 5 + 3).all()
    assert (steps.ms == 5.0).all()
    assert steps.part(np.arange(len(steps.ms)) < 7).batch.tolist() == [2.0] * 7


def test_a_short_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join([line()] * 30))
    with pytest.raises(ValueError, match=r"steps\.jsonl has 10 steps past the first 20; at least 200 needed"):
        Steps.read(log)


@pytest.mark.parametrize("text", ["nonsense", "[1, 2]", '{"running": 1}'])
def test_what_is_no_step_log_is_refused(tmp_path: Path, text: str) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join([line()] * 250 + [text]))
    with pytest.raises(ValueError, match=r"steps\.jsonl is not a step log"):
        Steps.read(log)


def test_a_saved_fit_loads_as_it_was(tmp_path: Path) -> None:
    cost = fitted(steps_of(TRUE))
    save(cost, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == cost
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
