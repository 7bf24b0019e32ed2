"""When requests arrive, and which: point processes of a given mean rate, over the requests of a tape.

One decision: a request IS a row of the tape, so prompt length, output length and acceptance belong together as they did
when they were recorded. Only the times are drawn from a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from faser.core import Ints
from faser.tapes import Tape

Times = NDArray[np.float64]


class Arrivals(Protocol):
    """An arrival process."""

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        """[n] increasing arrival times in s, of `rate` requests a second on average."""
        ...


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Independent users."""

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        return rng.exponential(1.0 / rate, n).cumsum()


@dataclass(frozen=True, kw_only=True)
class Bursty:
    """Gamma-distributed gaps with a coefficient of variation `cv` > 1: clusters and pauses."""

    cv: float = 3.0

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        return rng.gamma(self.cv**-2, self.cv**2 / rate, n).cumsum()


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """Poisson whose rate jumps: for `share` of each cycle it is `contrast` times what it is in the rest."""

    share: float = 0.2
    contrast: float = 10.0
    cycle_requests: float = 64.0  # mean number of requests in one cycle, which sets its duration

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        unit = rng.exponential(1.0, n).cumsum()
        low = 1.0 / (self.share * self.contrast + 1.0 - self.share)  # over the mean rate
        quiet = low * (1.0 - self.share)  # share of a cycle's requests that come in its quiet part
        whole, part = np.divmod(unit / self.cycle_requests + rng.random(), 1.0)
        phase = np.interp(part, [0.0, quiet, 1.0], [0.0, 1.0 - self.share, 1.0])
        times = (whole + phase) * self.cycle_requests / rate
        return np.asarray(times - times[0], np.float64)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Poisson whose rate goes linearly from `start` to `end` times the mean over the expected duration."""

    start: float = 0.2
    end: float = 1.8

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        unit = rng.exponential(1.0, n).cumsum()
        # Requests expected until t: rate (start t + slope t^2 / 2); solved for t.
        slope = (self.end - self.start) * rate / n
        root = np.sqrt(np.maximum(self.start**2 + 2.0 * slope * unit / rate, 0.0))
        return np.asarray(2.0 * unit / rate / (self.start + root), np.float64)


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """One of the others, drawn anew for every sample."""

    kinds: tuple[Arrivals, ...] = (Poisson(), Bursty(), Spikes(), Ramp())

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        return self.kinds[rng.integers(len(self.kinds))].sample(rng, n, rate)


ARRIVALS: dict[str, Arrivals] = {
    "poisson": Poisson(),
    "bursty": Bursty(),
    "spikes": Spikes(),
    "ramp": Ramp(),
    "mixed": Mixed(),
}
"""By name, as `arrivals=` of the environment takes them."""


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


def sample_trace(arrivals: Arrivals, rng: np.random.Generator, n: int, rate: float, tape: Tape) -> Trace:
    """`n` requests at `rate` per s: the tape's rows in random order, each once before any comes again."""
    times = arrivals.sample(rng, n, rate)
    rows = np.concatenate([rng.permutation(len(tape)) for _ in range(-(-n // len(tape)))])[:n]
    return Trace(times, rows)
