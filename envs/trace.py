"""Which requests arrive: an episode's `Trace`, over the requests of a tape.

One decision: a request IS a row of the tape, so prompt length, output length and acceptance belong together as they did
when they were recorded. Only the times, and how often each kind of request comes, are drawn from a model. A kind is a
domain at a temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from faser.core import Ints
from faser.envs.arrivals import Arrivals, Times, check
from faser.tapes import Tape

Shares = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How often each kind of request comes: the weight of its domain times that of its temperature.

    domains, temperatures: weights by name and by value; those not named never come. Empty: all alike. A kind of which
    the tape has no request is left out.
    """

    domains: Mapping[str, float] = field(default_factory=dict)
    temperatures: Mapping[float, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, weights in (("domains", self.domains), ("temperatures", self.temperatures)):
            for key, weight in weights.items():
                check(0.0 <= weight < np.inf, f"the weight of {key!r} in {name}", weight, "0 or more")
            check(not weights or any(weights.values()), name, dict(weights), "a weight over 0")

    def shares(self, tape: Tape, n: int) -> Shares:
        """[n, kinds] shares of the kinds (`kinds_of`) for each of n requests, the same for all. ValueError: the mix
        names what the tape has not, or only kinds without a request.
        """
        kinds = kinds_of(tape)
        heats = {temperature for _, temperature in kinds}
        asked = {float(np.float32(t)): weight for t, weight in self.temperatures.items()}  # as tapes store them
        for name, weights, there in (("domains", self.domains, {*tape.domains}), ("temperatures", asked, heats)):
            for key in weights.keys() - there:
                shown = repr(key) if isinstance(key, str) else f"{key:g}"
                check(False, f"{name} of a mix", shown, ", ".join(sorted(map(str, there))) + " (the tape's)")
        weight = np.array(
            [
                (self.domains.get(domain, 0.0) if self.domains else 1.0) * (asked.get(heat, 0.0) if asked else 1.0)
                for domain, heat in kinds
            ]
        )
        check(bool(weight.any()), "mix", self, "one with a kind of which the tape has requests")
        return np.broadcast_to(weight / weight.sum(), (n, len(kinds)))


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Shares that move linearly from one mix to another, from the first request of an episode to the last."""

    start: Mix
    end: Mix

    def shares(self, tape: Tape, n: int) -> Shares:
        """[n, kinds], as of `Mix`."""
        x = np.linspace(0.0, 1.0, n)[:, None]
        return (1.0 - x) * self.start.shares(tape, n) + x * self.end.shares(tape, n)


def kinds_of(tape: Tape) -> dict[tuple[str, float], Ints]:
    """The tape's rows of each (domain, temperature) that it has, in the tape's order."""
    pairs = np.stack([tape.domain.astype(np.float64), tape.temperature.astype(np.float64)], axis=1)
    found, kind = np.unique(pairs, axis=0, return_inverse=True)
    return {
        (tape.domains[int(domain)], float(heat)): np.flatnonzero(kind.reshape(-1) == i)
        for i, (domain, heat) in enumerate(found)
    }


@dataclass(frozen=True)
class Trace:
    """The requests of one episode: `arrival` [n] s, increasing; `row` [n], each request's row in the tape."""

    arrival: Times
    row: Ints

    def __post_init__(self) -> None:
        if self.arrival.shape != self.row.shape or not len(self.row):
            raise ValueError(f"arrival {self.arrival.shape} and row {self.row.shape} must be equal and not empty")
        if (np.diff(self.arrival) < 0).any():
            raise ValueError("arrival times must not decrease")

    def __len__(self) -> int:
        return len(self.row)


def sample_trace(
    arrivals: Arrivals, rng: np.random.Generator, n: int, rate: float, tape: Tape, mix: Mix | Drift | None = None
) -> Trace:
    """`n` requests at `rate` per s: the tape's rows in random order, each once before any comes again.

    mix: how often each kind comes; then each row comes once before any of its kind comes again.
    """
    check(n >= 1, "n", n, "1 or more")
    check(0.0 < rate < np.inf, "rate", rate, "over 0 and finite")
    times = arrivals.sample(rng, n, rate)
    if mix is None:
        return Trace(times, _rounds(rng, np.arange(len(tape)), n))
    upper = mix.shares(tape, n).cumsum(axis=1)
    kind = (rng.random(n)[:, None] >= upper / upper[:, -1:]).sum(axis=1)
    row = np.empty(n, np.int64)
    for i, rows in enumerate(kinds_of(tape).values()):
        mine = np.flatnonzero(kind == i)
        row[mine] = _rounds(rng, rows, len(mine))
    return Trace(times, row)


def _rounds(rng: np.random.Generator, rows: Ints, n: int) -> Ints:
    """[n] of `rows` in random order, each once before any comes again."""
    drawn: Ints = np.concatenate([rows[:0], *(rng.permutation(rows) for _ in range(-(-n // len(rows))))])
    return drawn[:n]
