"""Reading step logs, and finding grid points in them by runs of like steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from faser.costs.steps import Steps, grid_points


def line(**changed: object) -> str:
    step = {"t": 100.0, "ms": 5.0, "running": 2, "waiting": 0, "prefill": 3, "context": 40, "depth": 1}
    return json.dumps(step | {"verified": [1, 4], "accepted": [0, 0]} | changed)


def test_a_log_is_read_without_its_warm_up_and_its_empty_steps(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    empty = line(running=0, prefill=0, verified=[], accepted=[], ms=1.0)
    log.write_text("\n".join([line(ms=900.0)] * 20 + [line(), empty] * 10))
    steps = Steps.read(log, skip=20)
    assert len(steps) == 10
    assert (steps.rows == 2 + 5 + 3).all()
    assert (steps.prefill == 3).all()
    assert (steps.ms == 5.0).all()
    assert steps.part(np.arange(10) < 7).batch.tolist() == [2.0] * 7


def test_a_span_of_time_is_read(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join(line(t=float(t), ms=float(t)) for t in range(1, 10)))
    assert Steps.read(log, since=3.0, until=6.0).ms.tolist() == [3.0, 4.0, 5.0]


def test_a_short_log_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join([line()] * 30))
    with pytest.raises(ValueError, match=r"steps\.jsonl has 10 steps that computed something; at least 11 needed"):
        Steps.read(log, skip=20, at_least=11)
    with pytest.raises(ValueError, match=r"gone\.jsonl cannot be read"):
        Steps.read(tmp_path / "gone.jsonl")


@pytest.mark.parametrize("text", ["nonsense", "[1, 2]", '{"running": 1}', "7"])
def test_what_is_no_step_log_is_refused(tmp_path: Path, text: str) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_text("\n".join([line()] * 5 + [text]))
    with pytest.raises(ValueError, match=r"steps\.jsonl is not a step log"):
        Steps.read(log)


def step(
    ms: float, *, length: int = 2, depth: int = 3, batch: int = 4, context: int = 100, prefill: int = 0
) -> list[float]:
    return [batch * (1 + length) + prefill, batch, depth, context, ms, prefill]


def points(*steps: list[float]) -> list[list[float]]:
    return grid_points(Steps.of(np.array(steps, np.float64))).table().tolist()


def test_a_point_is_the_median_of_a_run_without_its_first_step() -> None:
    run = [step(90.0, context=1), step(5.0, context=2), step(7.0, context=3), step(6.0, context=4)]
    assert points(*run) == [step(6.0, context=3)]


def test_a_run_of_which_too_little_counts_is_no_point() -> None:
    assert points(step(90.0), step(5.0), step(7.0)) == []


def test_the_first_step_of_a_run_counts_after_one_as_deep_and_of_as_many_requests() -> None:
    run = [step(5.0), step(6.0), step(7.0)]
    assert points(step(1.0, length=0), *run) == [step(6.0)]
    assert points(step(1.0, length=0, depth=4), *run) == []
    assert points(step(1.0, batch=3), *run) == []


@pytest.mark.parametrize("other", [{"length": 1}, {"depth": 2}, {"batch": 2}, {"prefill": 8}])
def test_a_run_ends_where_anything_changes(other: dict[str, int]) -> None:
    found = points(*[step(5.0)] * 4, *[step(9.0, **other)] * 4)
    assert found == [step(5.0), step(9.0, **other)]


def test_steps_with_and_without_prompts_that_alternate_are_two_points() -> None:
    without, one = [step(float(ms)) for ms in (5, 6, 7, 8)], [step(float(ms), prefill=8) for ms in (20, 22, 21, 99)]
    mixed = [s for pair in zip(without, one, strict=True) for s in pair]
    assert points(*mixed) == [step(7.0), step(21.5, prefill=8)]  # the first of all does not count
    assert points(*mixed[:5]) == []


def test_random_lengths_make_no_points() -> None:
    rng = np.random.default_rng(0)
    steps = [step(5.0, length=int(rng.integers(8)), depth=int(rng.integers(8))) for _ in range(500)]
    assert len(points(*steps)) <= 1
    assert len(grid_points(Steps.of(np.zeros((0, 6))))) == 0
