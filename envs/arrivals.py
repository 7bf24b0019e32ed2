"""When requests arrive: point processes of a given mean rate.

A process starts at one of its requests, not at any moment: n requests take (n - 1) / rate s on average, exactly,
however uneven they are (a `Ramp` ends, so it fits its n requests in n / rate s). A single sample of an uneven process
may well be half or twice as fast as asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]


class Arrivals(Protocol):
    """An arrival process."""

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        """[n] increasing arrival times in s, of `rate` requests a second on average."""
        ...


def check(right: bool, name: str, value: object, allowed: str) -> None:
    if not right:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Independent users."""

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        return rng.exponential(1.0 / rate, n).cumsum()


@dataclass(frozen=True, kw_only=True)
class Bursty:
    """Gamma-distributed gaps with a coefficient of variation `cv`; over 1: clusters and pauses."""

    cv: float = 3.0

    def __post_init__(self) -> None:
        check(0.0 < self.cv < np.inf, "cv", self.cv, "over 0")

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        return rng.gamma(self.cv**-2, self.cv**2 / rate, n).cumsum()


def _cyclic(
    rng: np.random.Generator, n: int, rate: float, *, cycle_requests: float, requests: Times, time: Times
) -> Times:
    """[n] arrivals of a Poisson process whose rate repeats, the first at 0.

    requests, time: [P] both from 0 to 1, share of a cycle's requests that come in that share of its time.
    """
    unit = rng.exponential(1.0, n).cumsum()
    whole, part = np.divmod(unit / cycle_requests + rng.random(), 1.0)
    times = (whole + np.interp(part, requests, time)) * cycle_requests / rate
    return np.asarray(times - times[0], np.float64)


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """Poisson whose rate jumps: for `share` of each cycle it is `contrast` times what it is in the rest."""

    share: float = 0.2
    contrast: float = 10.0
    cycle_requests: float = 64.0  # mean number of requests in one cycle, which sets its duration

    def __post_init__(self) -> None:
        check(0.0 < self.share < 1.0, "share", self.share, "between 0 and 1")
        check(1.0 <= self.contrast < np.inf, "contrast", self.contrast, "1 or more")
        check(0.0 < self.cycle_requests < np.inf, "cycle_requests", self.cycle_requests, "over 0")

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        rest = 1.0 - self.share
        quiet = rest / (self.share * self.contrast + rest)  # share of a cycle's requests that come in its quiet part
        requests, time = np.array([0.0, quiet, 1.0]), np.array([0.0, rest, 1.0])
        return _cyclic(rng, n, rate, cycle_requests=self.cycle_requests, requests=requests, time=time)


@dataclass(frozen=True, kw_only=True)
class Diurnal:
    """Poisson over days: rate / mean = 1 - first cos(2 pi x) - second cos(4 pi x), x the part of the day since its
    quietest moment. Unless told otherwise: 0.2 at night, 1.43 in mid-morning and mid-afternoon, 1.4 at noon.
    """

    first: float = 0.6
    second: float = 0.2
    cycle_requests: float = 256.0  # mean number of requests in one day, which sets its duration

    def __post_init__(self) -> None:
        check(self.first >= 0.0, "first", self.first, "0 or more")
        check(self.second >= 0.0, "second", self.second, "0 or more")
        check(self.first + self.second < 1.0, "first + second", self.first + self.second, "less than 1")
        check(0.0 < self.cycle_requests < np.inf, "cycle_requests", self.cycle_requests, "over 0")

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        x = np.linspace(0.0, 1.0, 289)  # every 5 minutes of the day
        harmonics = self.first * np.sin(2 * np.pi * x) + self.second / 2 * np.sin(4 * np.pi * x)
        requests = x - harmonics / (2 * np.pi)
        return _cyclic(rng, n, rate, cycle_requests=self.cycle_requests, requests=requests, time=x)


@dataclass(frozen=True, kw_only=True)
class Swing:
    """Poisson whose rate jumps from plateau to plateau: log-uniform between a lowest rate and `contrast` times that.

    A plateau's duration is exponential. The first one is that of a request taken at random: requests come the more, the
    faster the plateau, which makes its rate uniform and leaves exponential what is left of it.
    """

    contrast: float = 35.0
    plateau_requests: float = 32.0  # mean number of requests on one plateau, which sets its mean duration

    def __post_init__(self) -> None:
        check(1.0 < self.contrast < np.inf, "contrast", self.contrast, "over 1")
        check(0.0 < self.plateau_requests < np.inf, "plateau_requests", self.plateau_requests, "over 0")

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        unit = rng.exponential(1.0, n).cumsum()
        lowest = rate * np.log(self.contrast) / (self.contrast - 1.0)  # so that the mean of a log-uniform is `rate`
        plateau = lowest * rng.uniform(1.0, self.contrast)
        requests, seconds = [0.0], [0.0]  # expected since the start, at the end of each plateau
        while requests[-1] < unit[-1]:
            duration = rng.exponential(self.plateau_requests / rate)
            requests.append(requests[-1] + plateau * duration)
            seconds.append(seconds[-1] + duration)
            plateau = lowest * self.contrast ** rng.random()
        return np.asarray(np.interp(unit, requests, seconds), np.float64)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """Poisson whose rate goes linearly from `start` to `end`, in proportion, over the time that is just enough."""

    start: float = 0.2
    end: float = 1.8

    def __post_init__(self) -> None:
        check(self.start >= 0.0, "start", self.start, "0 or more")
        check(self.end >= 0.0, "end", self.end, "0 or more")
        check(0.0 < self.start + self.end < np.inf, "start + end", self.start + self.end, "over 0 and finite")

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        unit = rng.exponential(1.0, n + 1).cumsum()
        part = unit[:-1] / unit[-1]  # of the requests: as n uniform numbers, sorted
        # (start x + (end - start) x^2 / 2) / ((start + end) / 2) = part, solved for x, the part of the time.
        scaled = (self.start + self.end) * part
        x = scaled / (self.start + np.sqrt(self.start**2 + (self.end - self.start) * scaled))
        return np.asarray(x * n / rate, np.float64)


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """One of the others, drawn anew for every sample."""

    kinds: tuple[Arrivals, ...] = (Poisson(), Bursty(), Spikes(), Ramp())

    def __post_init__(self) -> None:
        check(len(self.kinds) > 0, "kinds", "empty", "at least 1 process")

    def sample(self, rng: np.random.Generator, n: int, rate: float) -> Times:
        return self.kinds[rng.integers(len(self.kinds))].sample(rng, n, rate)


ARRIVALS: dict[str, Arrivals] = {
    "poisson": Poisson(),
    "bursty": Bursty(),
    "spikes": Spikes(),
    "diurnal": Diurnal(),
    "swing": Swing(),
    "ramp": Ramp(),
    "mixed": Mixed(),
}
"""By name, as `arrivals=` of the environment takes them."""
