"""`summary`: everything that an A/B test says, as JSON types; the text, the page and the live page show it.

One decision: there is one primary metric, mean time in system, and the conclusion is about it. With eight metrics at
5 % each, one in three A/A tests would show some difference somewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from faser.ab.cell import CUT, Cell
from faser.ab.comparison import Blocks
from faser.ab.conclusion import conclusion
from faser.ab.plan import Plan, plan_of
from faser.ab.records import Records
from faser.ab.sample_ratio import sample_ratio
from faser.ab.split import Split
from faser.ab.statistics import Effect, Interval, sequence

SHOWN = 300
"""Most points of a curve."""

QUANTILES = (0.5, 0.95, 0.99)


def summary(records: Records, split: Split | None = None, *, baseline: str | None = None) -> dict[str, Any]:
    """What `records` say of the arms of `split` (None: as far as they tell).

    baseline: the arm that others are held against; the first, unless given. JSON types, None where there is no number.
    Raises ValueError for an arm that is not there.
    """
    plan = plan_of(records, split)
    if plan is None:
        return {"arms": [], "comparisons": [], "counts": dict(records.counts), "conclusion": [_nothing(records)]}
    if baseline not in (None, *plan.names):
        raise ValueError(f"the arm {baseline!r} is not in this test; its arms are {', '.join(plan.names)}")
    base = baseline or plan.names[0]
    blocks = Blocks(records, plan)
    said: dict[str, Any] = {
        "unit": plan.unit,
        "window_s": plan.window_s,
        "washout_s": plan.washout_s,
        "since": _finite(records.since),
        "until": _finite(records.until),
        "blocks": len(blocks.index),
        "block_s": blocks.block_s,
        "sticky": blocks.sticky,
        "arms": [_arm(name, records, plan) for name in plan.names],
        "baseline": base,
        "comparisons": [_compared(blocks, base, name) for name in plan.names if name != base],
        "windows": _windows(blocks),
        "sample_ratio": sample_ratio(plan, blocks),
        "counts": dict(records.counts),
        "requests_kept": len(records.requests),
    }
    return {**said, "conclusion": conclusion(said)}


def _nothing(records: Records) -> str:
    armless = records.counts["armless"]
    if not armless:
        return "There is no A/B test here: no line tells of an arm."
    return f"There is no A/B test here: none of {armless} steps and requests belongs to one of two arms."


def _arm(name: str, records: Records, plan: Plan) -> dict[str, Any]:
    """Totals since the start, washout left out, and quantiles of the requests kept."""
    cells = [cell for (_, arm), cell in records.cells.items() if arm == name]
    whole = {field: sum(getattr(cell, field) for cell in cells) for field in Cell.__slots__ if field != "fallbacks"}
    fallbacks: Counter[str] = Counter()
    for cell in cells:
        fallbacks.update(cell.fallbacks)
    mine = [r for r in records.requests if r.arm == name and r.status not in CUT]
    return {
        "name": name,
        "policy": plan.policies.get(name),
        "share": None if plan.shares is None else plan.shares[plan.names.index(name)],
        "windows": len(cells) if plan.unit == "window" else None,
        **whole,
        "wasted": whole["verified"] - whole["accepted"],
        "tokens_per_s": whole["tokens"] / whole["seconds"] if whole["seconds"] else None,
        "fallbacks": dict(fallbacks),
        "ttft_s": _quantiles(r.ttft for r in mine),
        "tpot_s": _quantiles(r.tpot for r in mine),
        "e2e_s": _quantiles(r.seconds for r in mine),
    }


def _quantiles(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {f"p{100 * q:.0f}": float(v) for q, v in zip(QUANTILES, np.quantile(known, QUANTILES), strict=True)}


def _compared(blocks: Blocks, base: str, other: str) -> dict[str, Any]:
    policies = [blocks.plan.policies.get(name) for name in (base, other)]
    return {
        "arm": other,
        "baseline": base,
        "same_policy": policies[0] is not None and policies[0] == policies[1],
        "cut": _effect(blocks.effect(base, other, -1)),
        "metrics": [
            {
                "name": metric.name,
                "title": metric.title,
                "unit": metric.unit,
                "better": metric.better,
                **_effect(blocks.effect(base, other, i)),
            }
            for i, metric in enumerate(blocks.metrics)
        ],
        "sequence": _sequence(blocks, base, other),
    }


def _effect(effect: Effect) -> dict[str, Any]:
    return {
        "blocks": effect.blocks,
        "base": _finite(effect.base),
        "other": _finite(effect.other),
        "difference": _finite(effect.difference.value),
        "low": _finite(effect.difference.low),
        "high": _finite(effect.difference.high),
        "relative": _finite(effect.relative.value),
        "relative_low": _finite(effect.relative.low),
        "relative_high": _finite(effect.relative.high),
        "differs": _sign(effect.difference),
    }


def _sequence(blocks: Blocks, base: str, other: str) -> dict[str, Any]:
    """Of the primary metric, after every block. decided: when it first had zero outside, and for which sign."""
    if blocks.sticky:
        return {"t": [], "mean": [], "low": [], "high": [], "blocks": 0, "decided": None, "sign": None}
    pair = blocks.values[:, [blocks.plan.names.index(name) for name in (base, other)], 0]
    both = np.isfinite(pair).all(axis=1)
    mean, low, high = sequence(pair[both, 1] - pair[both, 0])
    times = [blocks.time(int(block)) for block in blocks.index[both]]
    out = np.flatnonzero((low > 0) | (high < 0))
    shown = np.unique(np.linspace(0, max(len(times) - 1, 0), min(len(times), SHOWN)).astype(int)).tolist()
    return {
        "t": [times[i] for i in shown],
        **{name: [_finite(curve[i]) for i in shown] for name, curve in (("mean", mean), ("low", low), ("high", high))},
        "blocks": len(times),
        "decided": times[out[0]] if len(out) else None,
        "sign": _sign(Interval(mean[out[0]], low[out[0]], high[out[0]])) if len(out) else None,
    }


def _windows(blocks: Blocks) -> list[dict[str, Any]]:
    """The last windows' own values of the primary metric, to be drawn."""
    order = sorted(range(len(blocks.cells)), key=[*blocks.cells].__getitem__)[-SHOWN:]
    keys = [*blocks.cells]
    width = blocks.block_s if blocks.plan.unit == "request" else blocks.plan.window_s
    return [
        {
            "window": keys[i][0],
            "t": blocks.plan.start + keys[i][0] * width,
            "arm": keys[i][1],
            "value": _finite(blocks.by_cell[i, 0]),
        }
        for i in order
    ]


def _sign(interval: Interval) -> int:
    """-1 or 1 if the interval is below or above zero, else 0."""
    return int(interval.low > 0) - int(interval.high < 0)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
