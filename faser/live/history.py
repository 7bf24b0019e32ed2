"""`History`: the last minutes of an engine, second by second, in bounded memory; the live page draws it.

One decision: what a step is worth for a chart is spread over the seconds that it took, so that `running` and `waiting`
are means over time, idle time included, whether steps take 5 ms or 5 s. A second in which nothing ran has no entry.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from faser.core import MAX_DEPTH, StepOutcome

SECONDS = 300
"""How far back it goes."""
BACK = 2
"""Seconds that the clock may go back and be the same."""


@dataclass(slots=True)
class Second:
    """Of one engine, or of several added up. t: s since the epoch.

    busy: seconds of steps in it. running, waiting: requests past their prefill and queued, times seconds. kv: share of
    the cache in use, times seconds of steps. By the second in which it ended, each step in which anything ran adds to:
    steps, prompt (tokens computed), written (output tokens but first ones), accepted (drafted tokens, past a request's
    end too), depth (tokens drafted for each request) and lengths (request-steps by tokens verified). policy: in force
    at its end; arm: of a test by windows, "" without one.
    """

    t: int
    busy: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0
    steps: int = 0
    prompt: int = 0
    written: int = 0
    accepted: int = 0
    depth: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    policy: str = ""
    arm: str = ""


_FIELDS = [each.name for each in fields(Second)]


class History:
    """Of one engine. Used from one thread."""

    def __init__(self) -> None:
        self._seconds: deque[Second] = deque(maxlen=SECONDS)

    def add(
        self,
        outcome: StepOutcome,
        start: float,
        *,
        written: int,
        waiting: int,
        kv_usage: float,
        policy: str,
        arm: str = "",
    ) -> None:
        """Add the step that began at `start` (s since the epoch) with `waiting` requests queued. written: tokens that
        it added to the outputs of those that decoded.
        """
        running, end = len(outcome.verified), start + outcome.seconds
        second = self._at(int(start))
        while True:
            until = min(end, second.t + 1)
            busy = max(until - max(start, second.t), 0.0)
            second.busy += busy
            second.running += running * busy
            second.waiting += waiting * busy
            second.kv += kv_usage * busy
            if end < second.t + 1:
                break
            second = self._at(second.t + 1 if end < second.t + SECONDS else int(end))
        second.policy, second.arm = policy, arm
        if outcome.empty:
            return
        second.steps += 1
        second.prompt += outcome.prefill_tokens
        second.written += written
        second.depth += outcome.draft_depth
        if running:
            second.accepted += int(np.add.reduce(outcome.accepted))
            for length, count in enumerate(np.bincount(outcome.verified).tolist()):
                second.lengths[length] += count

    def since(self, t: float) -> list[dict[str, Any]]:
        """The seconds from `t` on, oldest first, in JSON types; the newest may still grow."""
        return [_json(second) for second in self._seconds if second.t >= t]

    def _at(self, t: int) -> Second:
        """The second `t`. A clock that was set back begins anew: what it had would hide what comes."""
        if self._seconds and t < self._seconds[-1].t - BACK:
            self._seconds.clear()
        if not self._seconds or self._seconds[-1].t < t:
            self._seconds.append(Second(t))
        return self._seconds[-1]


def merged(engines: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `since` gave of each engine, added up second by second. Policies and arms that differ are all named."""
    total: dict[int, dict[str, Any]] = {}
    named: dict[tuple[int, str], dict[str, None]] = defaultdict(dict)
    for seconds in engines:
        for second in seconds:
            into = total.setdefault(second["t"], _json(Second(second["t"])))
            for name, value in second.items():
                match name:
                    case "t":
                        pass
                    case "lengths":
                        into[name] = [a + b for a, b in zip(into[name], value, strict=True)]
                    case "policy" | "arm":
                        if value:
                            named[second["t"], name][value] = None
                    case _:
                        into[name] += value
    for (t, name), values in named.items():
        total[t][name] = ", ".join(values)
    return [total[t] for t in sorted(total)]


def _json(second: Second) -> dict[str, Any]:
    return {name: getattr(second, name) for name in _FIELDS}  # dataclasses.asdict is ten times slower
