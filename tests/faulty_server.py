"""A server that knows policies that fail, `faulty:KIND`. Only to show that no request suffers from them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from faser import policies
from faser.core import Decision, Observation, Policy
from faser.costs import StepCost
from faser.serving import serve
from faser.serving.scheduler import FaserScheduler

LEAK = 1 << 20
"""Bytes that the leaking policy keeps of each step."""


def _raises(_: Observation) -> Any:
    raise ZeroDivisionError("on purpose")


def _exits(_: Observation) -> Any:
    sys.exit(1)


def _hangs(seen: Observation) -> Any:
    time.sleep(1.0)
    return Decision(np.ones(seen.running, np.int64), 1)


FAULTS: dict[str, Callable[[Observation], Any]] = {
    "raises": _raises,
    "exits": _exits,
    "hangs": _hangs,
    "nothing": lambda _: None,
    "nan": lambda seen: Decision(np.full(seen.running, np.nan), 2),  # type: ignore[arg-type]
    "negative": lambda seen: Decision(np.full(seen.running, -1), 2),
    "too-long": lambda seen: Decision(np.full(seen.running, 1024), 2),
    "too-deep": lambda seen: Decision(np.full(seen.running, 2), 1024),
    "too-many": lambda seen: Decision(np.full(seen.running + 1, 2), 2),
    "square": lambda seen: Decision(np.full((seen.running, seen.running), 2), 2),
}


class Faulty:
    """Does what its kind does from the first step on."""

    def __init__(self, kind: str) -> None:
        self._fault, self._kept = FAULTS.get(kind), []  # type: ignore[var-annotated]

    def decide(self, observation: Observation) -> Decision:
        if self._fault is None:
            self._kept.append(np.ones(LEAK, np.uint8))
            return Decision(np.full(observation.running, 2), 2)
        decision: Decision = self._fault(observation)
        return decision


def _faulty(kind: str, _: StepCost) -> Policy:
    return Faulty(kind)


policies._FACTORIES["faulty"] = _faulty


class FaultyScheduler(FaserScheduler):
    """The same, in a process that has read this file."""


if __name__ == "__main__":
    serve.SCHEDULER = "faulty_server.FaultyScheduler"
    sys.exit(serve.main(sys.argv[2:]))  # argv[1] is "serve"
