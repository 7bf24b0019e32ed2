"""`Cell`: sums over one window of one arm; and `Request`: one that has ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import NamedTuple

CUT = frozenset({"abort", "error"})
"""Statuses of requests that did not run to their end: their times say nothing of the policy."""


class Request(NamedTuple):
    """One that has ended. arrival: s since the epoch; ttft, seconds: s, from arrival; key: the client's, if it had one.

    window: that of its arrival, as in the sums.
    """

    window: int
    arm: str
    arrival: float
    ttft: float | None
    seconds: float
    prompt: int
    tokens: int
    drafted: int
    verified: int
    accepted: int
    status: str
    key: str | None

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first."""
        return None if self.ttft is None or self.tokens < 2 else (self.seconds - self.ttft) / (self.tokens - 1)


@dataclass(slots=True)
class Cell:
    """Sums over one window of one arm, washout left out.

    Of its steps: seconds; steps; rows (request-steps); tokens decoded; request_seconds in the system (with windows:
    waiting ones too); drafted, verified, accepted; decisions of the policy itself; fallbacks by reason. Of the requests
    that arrived in it and ended: requests; cut (see CUT), which are in none of the following; e2e_s; first, ttft_s:
    those with a first token; paced, tpot_s: those with a second.
    """

    seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    request_seconds: float = 0.0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    decisions: int = 0
    requests: int = 0
    cut: int = 0
    e2e_s: float = 0.0
    first: int = 0
    ttft_s: float = 0.0
    paced: int = 0
    tpot_s: float = 0.0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def plus(self, other: Cell) -> Cell:
        """The sums of both."""
        return Cell(**{name: getattr(self, name) + getattr(other, name) for name in SUMS})


SUMS = tuple(f.name for f in fields(Cell))
