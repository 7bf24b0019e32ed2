"""`Steps`: a step log as columns; and its grid points, the medians of runs of like steps.

One decision: a grid point is found in the log itself, by what the engine did and not by what was asked of it. So a
request that ended early, or a prompt that was cut in chunks, cannot spoil a point: it makes another, or none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

REPEATS = 3
"""Fewest steps whose median is a grid point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """[M] each. rows: target rows, prompt tokens among them; batch: decoding requests; depth; context: tokens; ms;
    prefill: prompt tokens computed.
    """

    rows: Array
    batch: Array
    depth: Array
    context: Array
    ms: Array
    prefill: Array

    @classmethod
    def read(cls, log: Path, *, skip: int = 0, since: float = 0.0, until: float = np.inf, at_least: int = 1) -> Steps:
        """From a step log, but for its first `skip` steps (warm-up) and those that computed nothing.

        since, until: seconds since the epoch; only steps that start between them. ValueError: not a step log, or
        fewer than `at_least` steps of it are left.
        """
        table = []
        try:
            lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
            for s in [line for line in lines if line.get("kind", "step") == "step"][skip:]:
                rows = s["running"] + sum(s["verified"]) + s["prefill"]
                if rows > 0 and since <= s.get("t", since) < until:
                    table.append((rows, s["running"], s["depth"], s["context"], s["ms"], s["prefill"]))
        except OSError as error:
            raise ValueError(f"{log} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{log} is not a step log: {error!r}") from None
        if len(table) < at_least:
            raise ValueError(f"{log} has {len(table)} steps that computed something; at least {at_least} needed")
        return cls.of(np.array(table, np.float64).reshape(-1, 6))

    @classmethod
    def of(cls, table: Array) -> Steps:
        """From a [M, 6] table, columns in the order of the fields."""
        rows, batch, depth, context, ms, prefill = table.T
        return cls(rows=rows, batch=batch, depth=depth, context=context, ms=ms, prefill=prefill)

    def table(self) -> Array:
        """[M, 6]: what `of` takes."""
        return np.stack([getattr(self, name) for name in self.__slots__], axis=1)

    def part(self, keep: NDArray[np.bool_]) -> Steps:
        """Those where `keep` [M]."""
        return Steps.of(self.table()[keep])

    def __len__(self) -> int:
        return len(self.ms)


def grid_points(steps: Steps, *, repeats: int = REPEATS) -> Steps:
    """The medians of at least `repeats` steps of as many prompt tokens, in a run of one batch, depth and verified rows.

    Prompts come when they come: in a run, steps with one, with two and with none of them alternate, each a point.
    A run's first step counts only if the step before it was as deep and of as many requests: what a step drafts may
    still be under way when it is over, and is then part of the next one's time.
    """
    table = steps.table()
    like = np.stack([steps.batch, steps.rows - steps.prefill, steps.depth], axis=1)
    new = np.concatenate([[True], (like[1:] != like[:-1]).any(axis=1)])
    starts = np.flatnonzero(new)
    points = []
    for start, end in zip(starts, [*starts[1:], len(table)], strict=True):
        settled = start > 0 and (like[start - 1, [0, 2]] == like[start, [0, 2]]).all()
        counted = slice(start if settled else start + 1, end)
        for prefill in np.unique(steps.prefill[counted]):
            alike = table[counted][steps.prefill[counted] == prefill]
            if len(alike) >= repeats:
                points.append(np.median(alike, axis=0))
    return Steps.of(np.array(points).reshape(-1, table.shape[1]))
