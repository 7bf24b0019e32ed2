"""Whether the arms got what the split promised them: a test that is split wrongly is not worth reading.

By request, requests (or clients, if they come again) per arm are held against the shares by a binomial test: an arm
that loses its requests before they end, or a hash that is not one, shows here.

By window, requests per arm are NOT expected to be equal. A faster arm gets more of them from clients that wait for a
reply before they ask again, and an hour's traffic is no coin. What the split does promise is time: each window has one
arm, that of the plan; and windows in which nothing was seen (no traffic, or a server that was down) should be as common
under each arm. More gaps in one than its share of them explains mean that it stops the server or its log.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from faser.ab.comparison import Blocks
from faser.ab.plan import Plan
from faser.ab.records import WINDOWS
from faser.ab.statistics import RATIO_ALPHA, binomial

GAPS = 10 * WINDOWS
"""Over more windows than this, gaps are not looked for: a clock jumped."""


def sample_ratio(plan: Plan, blocks: Blocks) -> dict[str, Any]:
    """of: what is counted; counts by arm; p: the smallest over arms, times their number (Bonferroni); None: no test.

    ok: False if something is wrong; astray: windows seen under another arm than the plan's, or under two.
    """
    if plan.unit == "request":
        if blocks.sticky:
            clients = {(r.arm, r.key or i) for i, r in enumerate(blocks.requests)}
            of, counts = "clients", Counter(arm for arm, _ in clients)
        else:
            of, counts = "requests", Counter()
            for (_, arm), cell in blocks.cells.items():
                counts[arm] += cell.requests
        return _checked(of, {name: counts[name] for name in plan.names}, plan, astray=0)
    seen: dict[int, set[str]] = {}
    for window, arm in blocks.cells:
        seen.setdefault(window, set()).add(arm)
    run = range(min(seen, default=0), max(seen, default=-1) + 1)
    due = {window: _planned(plan, window, seen) for window in (run if len(run) <= GAPS else seen)}
    astray = sum(arms != {due[window]} for window, arms in seen.items())
    gaps = Counter(arm for window, arm in due.items() if window not in seen and arm is not None)
    checked = _checked("windows without a step or request", {name: gaps[name] for name in plan.names}, plan, astray)
    per_arm = Counter(arm for arms in seen.values() for arm in arms)
    requests = {name: sum(c.requests for (_, arm), c in blocks.cells.items() if arm == name) for name in plan.names}
    return {**checked, "windows": {name: per_arm[name] for name in plan.names}, "requests": requests}


def _planned(plan: Plan, window: int, seen: dict[int, set[str]]) -> str | None:
    if plan.split is not None:
        return plan.split.arm_at(plan.start + (window + 0.5) * plan.window_s).arm
    arms = seen.get(window, set())
    return next(iter(arms)) if len(arms) == 1 else None


def _checked(of: str, counts: dict[str, int], plan: Plan, astray: int) -> dict[str, Any]:
    total = sum(counts.values())
    p = None
    if plan.shares is not None and total:
        chances = [binomial(counts[name], total, share) for name, share in zip(plan.names, plan.shares, strict=True)]
        p = min(1.0, min(chances) * (len(chances) if len(chances) > 2 else 1))
    return {"of": of, "counts": counts, "p": p, "astray": astray, "ok": not astray and (p is None or p >= RATIO_ALPHA)}
