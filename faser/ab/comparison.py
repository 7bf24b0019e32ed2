"""Two arms of an A/B test, metric by metric.

One decision: whatever the split's unit, the two arms are compared within blocks of time, so that a load that changes
over hours cannot pass for an effect. By window a block is one of the split's; by request it is a stretch of the clock,
in which both arms had requests. Only clients that stay with their arm over many requests (sticky keys) cannot be paired
so, and are compared as clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from faser.ab.cell import CUT, SUMS, Cell, Request
from faser.ab.plan import Plan
from faser.ab.records import Records
from faser.ab.statistics import Doubles, Effect, clustered, paired

Columns = dict[str, Doubles]
Key = tuple[int, str]

ENOUGH = 4
"""Requests of each arm that a block of time should have, if arms are split by request."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a window: a ratio of its sums, `over` by `under`, or if these are None a quantile of its requests.

    scale: to the unit. better: "lower" or "higher". of: of one request, if it can be told. apart: only where arms do
    not share steps.
    """

    name: str
    title: str
    unit: str
    scale: float
    better: str
    over: Callable[[Columns], Doubles] | None = None
    under: Callable[[Columns], Doubles] | None = None
    of: Callable[[Request], float | None] | None = None
    apart: bool = False


METRICS = (
    Metric(
        "e2e",
        "mean time in system",
        "s",
        1.0,
        "lower",
        lambda s: s["e2e_s"],
        lambda s: s["requests"] - s["cut"],
        lambda r: r.seconds,
    ),
    Metric("ttft", "mean TTFT", "ms", 1e3, "lower", lambda s: s["ttft_s"], lambda s: s["first"], lambda r: r.ttft),
    Metric("tpot", "mean TPOT", "ms", 1e3, "lower", lambda s: s["tpot_s"], lambda s: s["paced"], lambda r: r.tpot),
    Metric("e2e_p95", "p95 time in system", "s", 1.0, "lower", of=lambda r: r.seconds),
    Metric("ttft_p95", "p95 TTFT", "ms", 1e3, "lower", of=lambda r: r.ttft),
    Metric(
        "tokens_per_s",
        "tokens per second of steps",
        "1/s",
        1.0,
        "higher",
        lambda s: s["tokens"],
        lambda s: s["seconds"],
        apart=True,
    ),
    Metric("per_row", "tokens per request-step", "", 1.0, "higher", lambda s: s["tokens"], lambda s: s["rows"]),
    Metric(
        "wasted",
        "verified in vain, per token",
        "",
        1.0,
        "lower",
        lambda s: s["verified"] - s["accepted"],
        lambda s: s["tokens"],
    ),
)
"""The first is primary; the others are exploratory."""

CUT_SHARE = Metric(
    "cut",
    "share of requests cut short",
    "",
    1.0,
    "lower",
    lambda s: s["cut"],
    lambda s: s["requests"],
    lambda r: float(r.status in CUT),
)
"""Not one of them: whether they can be relied on. The requests left are others in an arm that loses more of them."""


class Blocks:
    """What `records` hold of a plan's windows that have ended, in blocks.

    values: [blocks, arms, metrics and CUT_SHARE] means over the windows of an arm, NaN where it had none. index: block
    numbers.
    """

    def __init__(self, records: Records, plan: Plan) -> None:
        self.records, self.plan = records, plan
        self.metrics = tuple(m for m in METRICS if not (m.apart and plan.unit == "request"))
        self.last = self._last()
        cells = {key: cell for key, cell in records.cells.items() if key[0] <= self.last and key[1] in plan.names}
        self.run = self._run(cells) if plan.unit == "request" else plan.block
        self.cells = _joined(cells, self.run) if plan.unit == "request" else cells
        keys = list(self.cells)
        window = np.array([window for window, _ in keys], int)
        arm = np.array([plan.names.index(name) for _, name in keys], int)
        block = window if plan.unit == "request" else window // plan.block
        self.index, row = np.unique(block, return_inverse=True)
        self.by_cell = self._by_cell()
        shape = len(self.index), len(plan.names), self.by_cell.shape[1]
        total, count = np.zeros(shape), np.zeros(shape)
        np.add.at(total, (row, arm), np.nan_to_num(self.by_cell))
        np.add.at(count, (row, arm), np.isfinite(self.by_cell))
        with np.errstate(invalid="ignore"):
            self.values = total / count

    @property
    def block_s(self) -> float:
        """Seconds of a block."""
        return self.plan.window_s * self.run

    def time(self, block: int) -> float:
        """When a block ended, s since the epoch."""
        return self.plan.start + (block + 1) * self.block_s

    def effect(self, base: str, other: str, metric: int) -> Effect:
        """Of `other` against `base`, in the metric's unit; -1 is CUT_SHARE."""
        if self.sticky:
            return self._of_clients(base, other, (*self.metrics, CUT_SHARE)[metric])
        of = self.values[:, :, metric]
        return paired(of[:, self.plan.names.index(base)], of[:, self.plan.names.index(other)])

    @cached_property
    def sticky(self) -> bool:
        """Whether arms are by request, and clients come again."""
        if self.plan.unit == "window":
            return False
        keys = [r.key for r in self.requests if r.key is not None]
        return len(set(keys)) < len(keys)

    @cached_property
    def requests(self) -> list[Request]:
        """Those kept one by one, of windows that have ended."""
        return [r for r in self.records.requests if r.window <= self.last]

    def _last(self) -> int:
        """The last window in which whoever arrived had ended when the records did, but for one in a hundred.

        Of a later one the long requests would be missing, in a running test as in one that was stopped.
        """
        if not self.records.cells:
            return -1
        lasted = [r.seconds for r in self.records.requests]
        settled = self.records.until - (float(np.quantile(lasted, 0.99)) if lasted else 0.0)
        return math.floor((settled - self.plan.start) / self.plan.window_s) - 1

    def _run(self, cells: dict[Key, Cell]) -> int:
        """Buckets to a block, a power of two: enough for some requests of each arm, and for its share."""
        per_bucket = sum(c.requests for c in cells.values()) / max(len({window for window, _ in cells}), 1)
        least = min(self.plan.shares) if self.plan.shares else 1 / len(self.plan.names)
        return 2 ** max(math.ceil(math.log2(ENOUGH / least / per_bucket)), 0) if per_bucket else 1

    def _by_cell(self) -> Doubles:
        """[cells, metrics and CUT_SHARE], in the metrics' units."""
        metrics = (*self.metrics, CUT_SHARE)
        sums = np.array([[getattr(c, name) for name in SUMS[:-1]] for c in self.cells.values()], float)
        columns = {name: sums[:, i] if len(sums) else np.zeros(0) for i, name in enumerate(SUMS[:-1])}
        values = np.full((len(self.cells), len(metrics)), math.nan)
        kept = self._kept_requests()
        for i, metric in enumerate(metrics):
            if metric.over is not None and metric.under is not None:
                under = metric.under(columns)
                np.divide(metric.over(columns), under, out=values[:, i], where=under > 0)
            else:
                values[:, i] = [_quantile(kept.get(key, []), metric) for key in self.cells]
            values[:, i] *= metric.scale
        return values

    def _kept_requests(self) -> dict[Key, list[Request]]:
        """By cell, where none was let go."""
        kept: dict[Key, list[Request]] = {}
        for request in self.requests:
            window = request.window // self.run if self.plan.unit == "request" else request.window
            kept.setdefault((window, request.arm), []).append(request)
        return {key: of for key, of in kept.items() if key in self.cells and len(of) == self.cells[key].requests}

    def _of_clients(self, base: str, other: str, metric: Metric) -> Effect:
        clients: dict[tuple[bool, str], list[float]] = {}
        if metric.of is not None and metric.over is not None:  # a quantile of few requests is not the arm's
            for i, request in enumerate(self.requests):
                if request.arm not in (base, other) or (request.status in CUT and metric is not CUT_SHARE):
                    continue
                if (value := metric.of(request)) is not None:
                    client = request.arm == other, request.key or f"#{i}"
                    clients.setdefault(client, []).append(metric.scale * value)
        arm = np.array([of_other for of_other, _ in clients], int)
        total, count = ([measure(of) for of in clients.values()] for measure in (sum, len))
        return clustered(arm, np.array(total, float), np.array(count, float))


def _joined(cells: dict[Key, Cell], run: int) -> dict[Key, Cell]:
    """The sums of `run` buckets together."""
    joined: dict[Key, Cell] = {}
    for (window, arm), cell in cells.items():
        key = window // run, arm
        joined[key] = joined[key].plus(cell) if key in joined else cell
    return joined


def _quantile(requests: list[Request], metric: Metric) -> float:
    assert metric.of is not None
    values = [v for r in requests if r.status not in CUT and (v := metric.of(r)) is not None]
    return float(np.quantile(values, 0.95)) if values else math.nan
