"""`Plan`: what a report has to know of a split. A log from which the split's own line was rotated away tells it too."""

from __future__ import annotations

from dataclasses import dataclass

from faser.ab.records import BUCKET_S, Records
from faser.ab.split import Split

LONGEST = 100
"""Windows of the longest block looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """names: of the arms. policies: by arm, where known. shares: of the arms; None if nobody says.

    unit: "window" or "request". window_s, start: of windows, or of the records' buckets. block: windows in which arms
    are shuffled.
    """

    names: tuple[str, ...]
    policies: dict[str, str]
    shares: tuple[float, ...] | None
    unit: str
    window_s: float
    washout_s: float | None
    block: int
    start: float
    split: Split | None = None


def plan_of(records: Records, split: Split | None) -> Plan | None:
    """Of `split`, of the records' own if that is None, else as their windows look. None: nothing was split."""
    if split is None and records.split is not None:
        split = Split.from_json(records.split)
    if split is None:
        return _inferred(records)
    windows = split.unit == "window"
    return Plan(
        names=split.names,
        policies={arm.name: arm.policy for arm in split.arms},
        shares=split.shares,
        unit=split.unit,
        window_s=split.window_s if windows else BUCKET_S,
        washout_s=split.washout_s if windows else None,
        block=split.block,
        start=split.start if windows else 0.0,
        split=split,
    )


def _inferred(records: Records) -> Plan | None:
    names = tuple(sorted({arm for _, arm in records.cells}))
    if len(names) < 2:
        return None
    first, last = min(w for w, _ in records.cells), max(w for w, _ in records.cells)
    window_s = BUCKET_S if records.by_request else (records.until - records.since) / (last - first + 1)
    return Plan(
        names=names,
        policies={arm: of[0] for arm, of in records.policies.items() if len(of) == 1},
        shares=None,
        unit="request" if records.by_request else "window",
        window_s=window_s,
        washout_s=None,
        block=1 if records.by_request else _block(records, last),
        start=0.0 if records.by_request else records.since - first * window_s,
    )


def _block(records: Records, last: int) -> int:
    """The shortest aligned run of windows that always holds each arm as often; all of them if there is none."""
    arms = dict(records.cells.keys())
    for block in range(2, LONGEST + 1):
        runs: dict[int, list[str]] = {}
        for window, arm in arms.items():
            runs.setdefault(window // block, []).append(arm)
        whole = [sorted(run) for run in runs.values() if len(run) == block]
        if whole and all(run == whole[0] for run in whole) and len(set(whole[0])) > 1:
            return block
    return last + 1
