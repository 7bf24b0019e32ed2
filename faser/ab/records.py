"""What an A/B test has seen: sums by window and arm, and the most recent requests.

One decision: the engine's live ledger and the reader of its log are this class, fed the same lines, so a report from a
server and one from its log agree. Memory is bounded: the oldest windows and requests go first, and are counted.
"""

from __future__ import annotations

import glob
import json
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from itertools import compress
from pathlib import Path
from typing import Any

from faser.ab.cell import CUT, SUMS, Cell, Request

ARM = re.compile(r"[A-Za-z0-9_-]{1,32}")
BUCKET_S = 20
"""Without windows (arms by request), sums are kept by this many seconds of the clock instead."""

WINDOWS = 20_000
"""Most (window, arm) sums kept: a week of minutes, or two days of buckets, for two arms."""

RECENT = 20_000
"""Most requests kept one by one."""

ARMS = 32
POLICIES = 4
"""Most names kept: of arms, and of the policies that an arm was seen with."""


class Records:
    """Feed it lines by `add`; a line that cannot be read changes `counts` alone.

    cells: sums by (window, arm). requests: the `recent` last. split: what a line of kind "split" said. policies: names
    that an arm's steps were decided by. counts: lines; unread (nonsense), torn (the last line of a file, cut short),
    unknown (of another kind), armless (no A/B test ran), washout, evicted (steps and requests of windows let go),
    splits (tests before this one), strangers (engines of another test, left out by `merged`).
    """

    def __init__(self, recent: int = RECENT) -> None:
        self.requests: deque[Request] = deque(maxlen=recent)
        self.split: dict[str, Any] | None = None
        self.counts: Counter[str] = Counter()
        self._clear()

    def _clear(self) -> None:
        self.requests.clear()
        self.cells: dict[tuple[int, str], Cell] = {}
        self.by_request = False
        self.policies: dict[str, list[str]] = {}
        self.since, self.until = math.inf, -math.inf
        self._horizon = -math.inf  # windows up to here were let go

    def add(self, line: Mapping[str, Any]) -> None:
        """One line of the decision log, as a dict. Never raises."""
        self.counts["lines"] += 1
        try:
            kind = line.get("kind")
            if kind == "step":
                self._step(line)
            elif kind == "request":
                self._request(line)
            elif kind == "split":
                self._begin(line)
            else:
                self.counts["unknown"] += 1
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.counts["unread"] += 1

    @classmethod
    def from_log(cls, path: Path, recent: int = RECENT) -> Records:
        """From a log and what was rotated out of it (FILE.2, FILE.1, FILE), read line by line. Raises OSError."""
        records = cls(recent)
        for file in rotated(path):
            records._read(file)
        return records

    def merged(self, others: Iterable[Records]) -> Records:
        """One of several engines' records under the split of the first; those of another test are left out."""
        found = [self, *others]
        split = next((one.split for one in found if one.split is not None or one.cells), None)
        every = [one for one in found if one.split == split or (one.split is None and not one.cells)]
        whole = Records(max(r.requests.maxlen or 0 for r in every))
        for one in every:
            for key, cell in one.cells.items():
                whole.cells[key] = whole.cells[key].plus(cell) if key in whole.cells else cell.plus(Cell())
            for arm, names in one.policies.items():
                for name in names:
                    whole._see(arm, name)
            whole.counts.update(one.counts)
        whole.requests.extend(sorted((r for one in every for r in one.requests), key=lambda r: r.arrival + r.seconds))
        if strangers := len(found) - len(every):
            whole.counts["strangers"] += strangers
        whole.split = split
        whole.by_request = any(one.by_request for one in every)
        whole.since, whole.until = min(r.since for r in every), max(r.until for r in every)
        whole._horizon = max(one._horizon for one in every)
        return whole

    def to_json(self) -> dict[str, Any]:
        """JSON types; `from_json` is the way back."""
        return {
            "split": self.split,
            "by_request": self.by_request,
            "since": self.since if self.cells else None,
            "until": self.until if self.cells else None,
            "policies": self.policies,
            "counts": dict(self.counts),
            "sums": SUMS,
            "cells": [[*key, *(getattr(cell, name) for name in SUMS)] for key, cell in self.cells.items()],
            "columns": Request._fields,
            "recent": self.requests.maxlen,
            "requests": list(self.requests),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Records:
        """Raises ValueError if that is not what `to_json` made."""
        try:
            if tuple(data["sums"]) != SUMS or tuple(data["columns"]) != Request._fields:
                raise ValueError("the records are of another version of FASER")
            records = cls(int(data["recent"]))
            records.split, records.by_request = data["split"], bool(data["by_request"])
            records.policies = {arm: [*names] for arm, names in data["policies"].items()}
            records.counts = Counter(data["counts"])
            if data["since"] is not None:
                records.since, records.until = float(data["since"]), float(data["until"])
            for window, arm, *sums in data["cells"]:
                cell = records.cells[int(window), str(arm)] = Cell(*sums)
                cell.fallbacks = Counter(cell.fallbacks)
            records.requests.extend(Request(*row) for row in data["requests"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no records of an A/B test: {error!r}") from None
        return records

    def _read(self, file: Path) -> None:
        with file.open("rb") as lines:
            for raw in lines:
                try:
                    line = json.loads(raw)
                except (ValueError, RecursionError):
                    self.counts["lines"] += 1
                    self.counts["unread" if raw.endswith(b"\n") else "torn"] += 1
                    continue
                self.add(line)

    def _begin(self, line: Mapping[str, Any]) -> None:
        """A split came into force. If it is another one, the test before it is over: its windows are not this one's.

        Nor are those of a test whose own line was rotated away: they are from before this one's start.
        """
        split = {key: value for key, value in line.items() if key not in ("kind", "t")}
        over = self.since < split["start"] if self.split is None else self.split != split
        if over:
            self._clear()
            self.counts["splits"] += 1
        self.split = split

    def _step(self, line: Mapping[str, Any]) -> None:
        arm, parts = line.get("arm"), _parts(line)
        if not parts:
            self.counts["armless"] += 1
            return
        began, seconds, waiting = _number(line["t"]), _number(line["ms"]) / 1000, _number(line["waiting"])
        faults: dict[str, Any] = line.get("fallbacks", {}) if arm is None else {arm: line.get("fallback")}
        faults = {name: str(fault)[:32] for name, fault in faults.items() if fault is not None}
        decided, policy = bool(line["decided"]), str(line["policy"])[:128]
        if not self._counted(line, arm is None, began, began + seconds, parts):
            return
        for name, (rows, drafted, verified, accepted, written) in parts.items():
            cell = self._cell(_bucket(began) if arm is None else line["window"], name)
            cell.seconds += seconds
            cell.steps += 1
            cell.rows += rows
            cell.tokens += written
            cell.request_seconds += (rows + (0.0 if arm is None else waiting)) * seconds
            cell.drafted += drafted
            cell.verified += verified
            cell.accepted += accepted
            if name in faults:
                cell.fallbacks[faults[name]] += 1
            elif decided:
                cell.decisions += 1
        if arm is not None:
            self._see(arm, policy)

    def _request(self, line: Mapping[str, Any]) -> None:
        arm, key, ttft = line.get("arm"), line.get("key"), line["ttft"]
        if arm is None:
            self.counts["armless"] += 1
            return
        by_request = line["window"] is None
        arrival, seconds = _number(line["arrival"]), _number(line["seconds"])
        prompt, tokens = _whole(line["prompt"]), _whole(line["tokens"])
        drafted, verified, accepted = _whole(line["drafted"]), _whole(line["verified"]), _whole(line["accepted"])
        ttft = None if ttft is None else _number(ttft)
        window = _bucket(arrival) if by_request else line["window"]
        key = None if key is None else str(key)[:64]
        status = str(line["status"])[:32]
        request = Request(window, arm, arrival, ttft, seconds, prompt, tokens, drafted, verified, accepted, status, key)
        if not self._counted(line, by_request, arrival, arrival + seconds, [arm]):
            return
        self.requests.append(request)
        cell = self._cell(window, request.arm)
        cell.requests += 1
        if request.status in CUT:
            cell.cut += 1
            return
        cell.e2e_s += seconds
        if ttft is not None:
            cell.first += 1
            cell.ttft_s += ttft
        if (tpot := request.tpot) is not None:
            cell.paced += 1
            cell.tpot_s += tpot

    def _counted(
        self, line: Mapping[str, Any], by_request: bool, since: float, until: float, arms: Iterable[str]
    ) -> bool:
        """Whether a well-formed line is one to sum. Raises ValueError if it is not well formed after all."""
        window = line["window"]
        if not by_request and (type(window) is not int or window < 0):
            raise ValueError(window)
        for arm in arms:
            if not ARM.fullmatch(arm):
                raise ValueError(arm)
        self.by_request = by_request
        self.since, self.until = min(self.since, since), max(self.until, until)
        if line["washout"]:
            self.counts["washout"] += 1
            return False
        if (_bucket(since) if by_request else window) <= self._horizon:
            self.counts["evicted"] += 1
            return False
        return True

    def _cell(self, window: int, arm: str) -> Cell:
        key = window, arm
        if (cell := self.cells.get(key)) is None:
            cell = self.cells[key] = Cell()
            if len(self.cells) > WINDOWS:
                self._horizon = min(self.cells)[0]
                for old in [k for k in self.cells if k[0] == self._horizon]:
                    del self.cells[old]
        return cell

    def _see(self, arm: str, policy: str) -> None:
        if arm not in self.policies and len(self.policies) == ARMS:
            return
        names = self.policies.setdefault(arm, [])
        if policy not in names and len(names) < POLICIES:
            names.append(policy)


def rotated(path: Path) -> list[Path]:
    """`path` and what was rotated out of it, oldest first: FILE.2, FILE.1, FILE. Raises FileNotFoundError."""
    ends = [p.name.removeprefix(f"{path.name}.") for p in path.parent.glob(f"{glob.escape(path.name)}.*")]
    numbers = sorted((int(end) for end in ends if end.isdecimal()), reverse=True)
    files = [path.with_name(f"{path.name}.{n}") for n in numbers] + [path]
    found = [file for file in files if file.exists()]
    if not found:
        raise FileNotFoundError(2, "there is no such file", str(path))
    return found


def _parts(line: Mapping[str, Any]) -> dict[str, list[int]]:
    """Rows, and drafted, verified, accepted and written tokens, of each arm in a step."""
    arm, accepted = line.get("arm"), line["accepted"]
    written = line.get("written") or [1 + tokens for tokens in accepted]  # what is accepted past an end is not written
    counts = line["drafted"], line["verified"], accepted, written
    if arm is not None:
        return {arm: [len(counts[0]), *(_whole(sum(of)) for of in counts)]}
    arms = line.get("arms") or []
    masks = {name: [its == name for its in arms] for name in dict.fromkeys(arms) if name is not None}
    return {name: [sum(of), *(_whole(sum(compress(c, of))) for c in counts)] for name, of in masks.items()}


def _bucket(arrival: float) -> int:
    return int(arrival // BUCKET_S)


def _number(value: Any) -> float:
    """`value` if it is a finite number from 0 on. Raises ValueError or TypeError."""
    if not 0 <= value < 1e15:
        raise ValueError(value)
    return float(value)


def _whole(value: Any) -> int:
    return int(_number(value))
