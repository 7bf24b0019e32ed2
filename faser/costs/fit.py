"""Fit a `StepCost` to a step log: least absolute errors, curves by their values at knots.

    ms = verify(rows) + depth * draft(batch) + context_ms * context

The draft's own pass over the rows is made at every step, so it cannot be told from the target's: it is inside
`verify`, and `sync` is 0. Absolute errors, by iterated reweighting, since a shared machine has steps that say
nothing: the fit aims at the middle step, not at the mean. An error counts relative to what steps of as many rows
typically take, never to the step's own time, which would favour the short ones. More rows are never cheaper; a draft
step of more requests may be, where it hides behind a longer verification.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH
from faser.costs.step_cost import Curve, StepCost

Array = NDArray[np.float64]

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BATCH_KNOTS = (1, 4, 16, 32, 64, 128, 256)
ROUNDS = 30
SHARP = 0.01
"""Relative error below which a step pulls no harder than in least squares."""
SMOOTH = 20.0
"""Weight of a bend at a knot, relative to the curve's level there, in steps. It settles a knot with few steps around
it; held-out errors of three logs (two GPU, one CPU) hardly differ from 0.3 to 30 and grow at 100.
"""
CELL = 5
"""Steps of one batch, depth and stretch of rows, at least, for their median to be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Steps of a log, [M] each: rows, batch (decoding requests), depth, context (tokens), ms."""

    rows: Array
    batch: Array
    depth: Array
    context: Array
    ms: Array

    @classmethod
    def read(cls, log: Path, *, skip: int = 20) -> Steps:
        """From a step log, without its first `skip` steps (warm-up) and those that computed nothing.

        ValueError: not a step log, or too short.
        """
        lines = log.read_text("utf-8").splitlines()[skip:]
        try:
            steps = [json.loads(line) for line in lines]
            table = [
                (s["running"] + sum(s["verified"]) + s["prefill"], s["running"], s["depth"], s["context"], s["ms"])
                for s in steps
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{log} is not a step log: {error!r}") from None
        table = [step for step in table if step[0] > 0]
        if len(table) < 10 * len(ROW_KNOTS):
            raise ValueError(
                f"{log} has {len(table)} steps past the first {skip}; at least {10 * len(ROW_KNOTS)} needed"
            )
        rows, batch, depth, context, ms = np.array(table, np.float64).T
        return cls(rows=rows, batch=batch, depth=depth, context=context, ms=ms)

    def part(self, keep: NDArray[np.bool_]) -> Steps:
        """Those where `keep` [M]."""
        return Steps(**{name: getattr(self, name)[keep] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors: step, median absolute one; total, of the summed time; cell, median absolute one of the medians
    of steps alike in batch, depth and stretch of rows; worst_cell, the 90th percentile of these; cells, their number.
    """

    step: float
    total: float
    cell: float
    worst_cell: float
    cells: int

    def __str__(self) -> str:
        return (
            f"median error of a step {self.step:.1%}, of the total time {self.total:+.1%}, of the median step of a "
            f"batch, depth and stretch of rows {self.cell:.1%} (nine in ten of {self.cells} within "
            f"{self.worst_cell:.1%})"
        )


def fit(steps: Steps, *, name: str, device: str, source: str) -> StepCost:
    """The StepCost closest to `steps` in absolute error."""
    row_knots, batch_knots = _within(ROW_KNOTS, steps.rows), _within(BATCH_KNOTS, steps.batch)
    drafting = steps.depth[:, None] * _hats(steps.batch, batch_knots)
    design = np.hstack([_hats(steps.rows, row_knots), drafting, steps.context[:, None] / 1000.0])
    typical = _typical(steps, row_knots)
    level = np.interp(row_knots, *typical), np.full(len(batch_knots), np.median(steps.ms) / MAX_DEPTH)
    design /= np.interp(steps.rows, *typical)[:, None]
    target = steps.ms / np.interp(steps.rows, *typical)
    bend = SMOOTH * _bends((row_knots, batch_knots), level)
    rise = np.eye(design.shape[1])  # from the verify curve's first value and its rises, not negative, to its values
    rise[: len(row_knots), : len(row_knots)] = np.tri(len(row_knots))
    weight = np.ones(len(steps.ms))
    for _ in range(ROUNDS):
        scaled = np.vstack([design * weight[:, None], bend])
        found = rise @ _solve(scaled @ rise, np.concatenate([target * weight, np.zeros(len(bend))]))
        weight = 1.0 / np.sqrt(np.maximum(np.abs(design @ found - target), SHARP))
    verify, draft = found[: len(row_knots)], found[len(row_knots) : -1]
    return StepCost(
        name=name,
        device=device,
        source=source,
        verify=_curve(row_knots, verify),
        draft=_curve(batch_knots, draft),
        context_ms=round(float(found[-1]) / 1000.0, 8),
    )


def predict(cost: StepCost, steps: Steps) -> Array:
    """[M] ms that `cost` expects of `steps`."""
    return (
        cost.verify(steps.rows)
        + cost.sync(steps.rows)
        + steps.depth * cost.draft(steps.batch)
        + cost.context_ms * steps.context
    )


def errors(cost: StepCost, steps: Steps) -> Errors:
    """How far `cost` is from `steps`."""
    expected = predict(cost, steps)
    stretch = np.searchsorted(ROW_KNOTS, steps.rows, side="right")
    _, cell = np.unique(np.stack([steps.batch, steps.depth, stretch]), axis=1, return_inverse=True)
    members = [cell == i for i in np.flatnonzero(np.bincount(cell) >= CELL)]
    off = [abs(float(np.median(expected[m]) / np.median(steps.ms[m])) - 1.0) for m in members] or [np.nan]
    return Errors(
        step=float(np.median(np.abs(expected / steps.ms - 1.0))),
        total=float(expected.sum() / steps.ms.sum() - 1.0),
        cell=float(np.median(off)),
        worst_cell=float(np.quantile(off, 0.9)),
        cells=len(members),
    )


def save(cost: StepCost, path: Path) -> None:
    """As JSON that `load_profile` reads, atomically."""
    curves = {c: {"x": list(getattr(cost, c).x), "ms": list(getattr(cost, c).ms)} for c in ("verify", "sync", "draft")}
    fields = {"name": cost.name, "device": cost.device, "source": cost.source, "context_ms": cost.context_ms}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**fields, "curves": curves}, indent=1) + "\n", "utf-8")
    temporary.replace(path)


def _solve(design: Array, target: Array) -> Array:
    """Least squares with nothing negative: what comes out negative is set to 0, until nothing does."""
    kept = np.ones(design.shape[1], np.bool_)
    while True:
        found = np.zeros(len(kept))
        found[kept] = np.linalg.lstsq(design[:, kept], target, rcond=None)[0]
        if (found >= 0).all():
            return found
        kept &= found >= 0


def _within(knots: Sequence[int], values: Array) -> Array:
    """The knots that the data reach, the last one at its largest value."""
    inner = [k for k in knots if values.min() <= k < values.max()]
    return np.array([*inner, values.max()], np.float64)


def _hats(values: Array, knots: Array) -> Array:
    """[M, knots] linear interpolation weights."""
    return np.stack([np.interp(values, knots, unit) for unit in np.eye(len(knots))], axis=1)


def _typical(steps: Steps, row_knots: Array) -> tuple[Array, Array]:
    """Rows and ms of the middle step between each two knots that have any."""
    stretch = np.searchsorted(row_knots, steps.rows, side="right")
    groups = [stretch == i for i in np.unique(stretch)]
    return np.array([np.median(steps.rows[g]) for g in groups]), np.array([np.median(steps.ms[g]) for g in groups])


def _bends(curves: Sequence[Array], levels: Sequence[Array]) -> Array:
    """[bends, parameters] change of slope at each inner knot of each curve, relative to the curve's level."""
    rows: list[Array] = []
    width, start = sum(len(x) for x in curves) + 1, 0
    for x, level in zip(curves, levels, strict=True):
        for i in range(1, len(x) - 1):
            row = np.zeros(width)
            left, right = x[i] - x[i - 1], x[i + 1] - x[i]
            row[start + i - 1 : start + i + 2] = 1 / left, -1 / left - 1 / right, 1 / right
            rows.append(row * min(left, right) / level[i])
        start += len(x)
    return np.array(rows).reshape(len(rows), width)


def _curve(x: Array, ms: Array) -> Curve:
    return Curve(tuple(float(v) for v in x), tuple(round(float(v), 4) for v in ms))
