"""Fit a `StepCost` to measured steps: least absolute errors, curves by their values at knots.

    ms = max(verify(rows) + request(batch) + [depth > 0] * sync(rows) + depth * draft(batch)
             + (context_ms + attend_ms * drafted tokens verified per request) * context + logits_ms * rows with logits,
             host_ms + depth * launch_ms)

Absolute errors, by iterated reweighting, since a shared machine has steps that say
nothing: the fit aims at the middle step, not at the mean. An error counts relative to what steps of as many rows
typically take, never to the step's own time, which would favour the short ones. More rows are never cheaper.

Of what else a step might cost, nothing lowered the held-out error on the logs of five GPU runs, and so it is not here:
rows padded to the sizes of CUDA graphs, prompt rows apart from verified ones, and depth x context. The host's share
did: from 7.5 % to 5.8 % where the draft runs without full graphs. So did a cost of requests, which attention in full
graphs has: on an H200 with a 13B shape from 6.7 % to 5.6 %, and from -12.5 % to -5.2 % in the time of three replays.
And on a CPU, attention by the row (from 8.6 % to 4.9 %) and an output head that prompts do not need (to 4.2 %).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH
from faser.costs.step_cost import CURVES, NUMBERS, Curve, StepCost, drafted_each
from faser.costs.steps import Array, Steps
from faser.tapes.mapped import write_whole

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
BATCH_KNOTS = (1, 4, 16, 32, 64, 128, 256)
SYNC_KNOTS = (1, 128)
LEAST = 6
"""Fewest steps to fit."""
ROUNDS = 30
SHARP = 0.01
"""Relative error below which a step pulls no harder than in least squares."""
SMOOTH = 3.0
"""Weight of a bend at a knot, relative to the curve's level there, in steps. It settles a knot with few steps around
it.
"""
HOST_STARTS = (2, 4, 6)
HOST_ROWS = 64
HOST_GAIN = 0.02
"""Where the search for the host's share begins: at steps at least so deep, of at most so many rows. It is kept if it
lowers the error by this share.
"""
HELD_OUT, LEAST_POINTS = 1 / 3, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors: mape, mean absolute one; worst, the 90th percentile of the absolute ones; total, of the summed
    time; steps: how many were compared.
    """

    mape: float
    worst: float
    total: float
    steps: int

    def __str__(self) -> str:
        return (
            f"MAPE {self.mape:.1%} of {self.steps} (nine in ten within {self.worst:.1%}), total time {self.total:+.1%}"
        )


def fit(steps: Steps, *, name: str, device: str, source: str) -> StepCost:
    """The StepCost closest to `steps` in absolute error. ValueError: too few steps."""
    if len(steps) < LEAST:
        raise ValueError(f"{len(steps)} steps to fit; at least {LEAST} needed")
    problem = _Problem.of(steps)
    nowhere = np.zeros(len(steps), np.bool_)
    found, error = problem.solve(nowhere, host=False)
    starts = [(steps.depth >= deep) & (steps.rows <= HOST_ROWS) for deep in HOST_STARTS]
    hosted = [problem.solve(start, host=True) for start in starts if start.any() and not start.all()]
    if hosted and min(e for _, e in hosted) < (1.0 - HOST_GAIN) * error:
        found, _ = min(hosted, key=lambda fitted: fitted[1])
    rows, batch, synced = problem.row_knots, problem.batch_knots, problem.sync_knots
    ends = np.cumsum([len(rows), len(batch), len(synced), len(batch)])
    verify, draft, sync, request, (context_ms, attend_ms, logits_ms, host_ms, launch_ms) = np.split(found, ends)
    return StepCost(
        name=name,
        device=device,
        source=source,
        verify=_curve(rows, verify),
        sync=_curve(synced, sync),
        draft=_curve(batch, draft),
        request=_curve(batch, request),
        context_ms=round(float(context_ms) / 1000.0, 8),
        attend_ms=round(float(attend_ms) / 1000.0, 8),
        logits_ms=round(float(logits_ms), 6),
        host_ms=round(float(host_ms), 4),
        launch_ms=round(float(launch_ms), 4),
    )


def predict(cost: StepCost, steps: Steps) -> Array:
    """[M] ms that `cost` expects of `steps`."""
    asked = {name: getattr(steps, name) for name in ("rows", "batch", "depth", "context", "prefill")}
    return cost.ms(**asked)


def errors(cost: StepCost, steps: Steps) -> Errors:
    """How far `cost` is from `steps`."""
    expected = predict(cost, steps)
    off = np.abs(expected / steps.ms - 1.0)
    return Errors(
        mape=float(off.mean()),
        worst=float(np.quantile(off, 0.9)),
        total=float(expected.sum() / steps.ms.sum() - 1.0),
        steps=len(steps),
    )


def held_out(points: Steps, seed: int = 0) -> Errors:
    """Errors on a third of `points`, seeded, of a fit to the others.

    The points of fewest and of most rows are never held out: there a fit would not fill in but go beyond.
    ValueError: too few points.
    """
    if len(points) < LEAST_POINTS:
        raise ValueError(f"{len(points)} grid points were found; at least {LEAST_POINTS} needed")
    inner = np.flatnonzero((points.rows > points.rows.min()) & (points.rows < points.rows.max()))
    chosen = np.random.default_rng(seed).permutation(inner)[: round(HELD_OUT * len(points))]
    kept = np.ones(len(points), np.bool_)
    kept[chosen] = False
    if kept.all():
        raise ValueError(f"none of {len(points)} points can be held out: all have the fewest or the most rows")
    return errors(fit(points.part(kept), name="", device="", source=""), points.part(~kept))


def save(cost: StepCost, path: Path) -> None:
    """As JSON that `load_profile` reads, atomically; each list of numbers on a line."""
    fields = asdict(replace(cost, measured={})) | {"measured": dict(cost.measured)}
    curves = {c: {"x": list(fields[c]["x"]), "ms": list(fields[c]["ms"])} for c in CURVES}
    texts = {key: fields[key] for key in ("name", "device", "source", "measured", *NUMBERS)}
    text = json.dumps({**texts, "curves": curves}, indent=1)
    text = re.sub(r"\[[\d\s.,e+-]+\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text)
    write_whole(path, f"{text}\n".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """Steps as a regression, all in units of what steps of as many rows typically take.

    device, host: [M, P] what the parameters stand for if the device, or the host, takes longer. The parameters are the
    values of verify, draft, sync and request at their knots, context_ms and attend_ms x 1000, logits_ms, host_ms and
    launch_ms.
    target: [M]; bends: [bends, P], to be small; rise: [P, P], from the first values and the rises of verify and
    request, which are not negative, to their values.
    """

    row_knots: Array
    batch_knots: Array
    sync_knots: Array
    device: Array
    host: Array
    target: Array
    bends: Array
    rise: Array

    @classmethod
    def of(cls, steps: Steps) -> _Problem:
        rows, batch = _within(ROW_KNOTS, steps.rows), _within(BATCH_KNOTS, steps.batch)
        synced = _within(SYNC_KNOTS, steps.rows)
        none = np.zeros((len(steps), 2))
        drafting = steps.depth[:, None] * _hats(steps.batch, batch)
        syncing = (steps.depth > 0)[:, None] * _hats(steps.rows, synced)
        requests = _hats(steps.batch, batch)
        own = steps.rows - steps.prefill
        context = np.stack([steps.context, drafted_each(own, steps.batch) * steps.context], axis=1) / 1000.0
        head = own[:, None] * bool(steps.prefill.any())  # without prompts it is verify's
        device = np.hstack([_hats(steps.rows, rows), drafting, syncing, requests, context, head, none])
        host = np.zeros_like(device)
        host[:, -2:] = np.stack([np.ones(len(steps)), steps.depth], axis=1)
        typical = _typical(steps, rows)
        unit = np.interp(steps.rows, *typical)
        middle = np.median(steps.ms)
        curves = {
            0: (rows, np.interp(rows, *typical)),
            len(rows): (batch, np.full(len(batch), middle / MAX_DEPTH)),
            len(rows) + len(batch) + len(synced): (batch, np.full(len(batch), middle)),
        }
        rise = np.eye(device.shape[1])
        *_, first = curves
        for start in (0, first):
            end = start + len(curves[start][0])
            rise[start:end, start:end] = np.tri(end - start)
        rise[:, first] = 0.0  # what the fewest requests cost is verify's
        return cls(
            row_knots=rows,
            batch_knots=batch,
            sync_knots=synced,
            device=device / unit[:, None],
            host=host / unit[:, None],
            target=steps.ms / unit,
            bends=SMOOTH * _bends(curves, device.shape[1]),
            rise=rise,
        )

    def solve(self, waits: NDArray[np.bool_], *, host: bool) -> tuple[Array, float]:
        """The parameters, and their mean absolute error; of all rounds the best.

        waits: [M] steps that start as those where the host takes longer. Each round fits both sides with the steps that
        are theirs, then looks again whose each step is.
        """
        weight = np.ones(len(self.target))
        best, least = np.zeros(len(self.rise)), np.inf
        for _ in range(ROUNDS):
            design = np.where(waits[:, None], self.host, self.device) * weight[:, None]
            wanted = np.concatenate([self.target * weight, np.zeros(len(self.bends))])
            found = self.rise @ _solve(np.vstack([design, self.bends]) @ self.rise, wanted)
            device, hosted = self.device @ found, self.host @ found
            off = np.abs(np.maximum(device, hosted) - self.target)
            weight = 1.0 / np.sqrt(np.maximum(off, SHARP))
            if host:
                waits = hosted > device
            if off.mean() < least:
                best, least = found, float(off.mean())
        return best, least


def _solve(design: Array, target: Array) -> Array:
    """Least squares with nothing negative: what comes out negative is set to 0, until nothing does.

    By the normal equations, a hundred times faster here; what no step tells apart is as small as can be.
    """
    square, right = design.T @ design, design.T @ target
    kept = np.ones(len(right), np.bool_)
    while True:
        found = np.zeros(len(kept))
        found[kept] = np.linalg.lstsq(square[np.ix_(kept, kept)], right[kept], rcond=1e-12)[0]
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


def _bends(curves: Mapping[int, tuple[Array, Array]], width: int) -> Array:
    """[bends, width] change of slope at each inner knot of each curve, relative to the curve's level.

    curves: by the column where each starts, its knots and its level at each of them.
    """
    rows: list[Array] = []
    for start, (x, level) in curves.items():
        for i in range(1, len(x) - 1):
            row = np.zeros(width)
            left, right = x[i] - x[i - 1], x[i + 1] - x[i]
            row[start + i - 1 : start + i + 2] = 1 / left, -1 / left - 1 / right, 1 / right
            rows.append(row * min(left, right) / level[i])
    return np.array(rows).reshape(len(rows), width)


def _curve(x: Array, ms: Array) -> Curve:
    return Curve(tuple(float(v) for v in x), tuple(round(float(v), 4) for v in ms))
