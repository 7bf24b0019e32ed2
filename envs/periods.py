"""Training, validation and test, apart in everything: requests, seeds, parameters, and how often each domain comes.

    |                | train                     | validation              | test                               |
    |----------------|---------------------------|-------------------------|------------------------------------|
    | requests       | first half of each kind   | third quarter           | fourth quarter                     |
    | seeds          | 0 to 999,999              | 1,000,000 to 1,999,999  | 2,000,000 to 2,999,999             |
    | domains        | all alike                 | easiest 3 x the hardest | hardest 3 x the easiest            |
    | suite `steady` | Poisson                   | Poisson                 | Poisson                            |
    | suite `bursty` | Bursty, cv 2, 3 or 4      | Bursty, cv 5            | Bursty, cv 6                       |
    | suite `spikes` | Spikes, contrast 5 or 10  | Spikes, contrast 14,    | Spikes, contrast 20,               |
    |                | for 20 % of 64 requests'  | for 15 % of 96          | for 10 % of 128                    |
    |                | time                      |                         |                                    |
    | suite `diurnal`| -                         | -                       | Diurnal, a day of 256 requests     |
    | suite `swing`  | -                         | -                       | Swing, contrast 35                 |
    | suite `mixed`  | any of the above, or a    | any of the above, or a  | any of the above                   |
    |                | rising Ramp               | falling Ramp            |                                    |
    | suite `drift`  | -                         | -                       | Poisson; from hardest 9 x the      |
    |                |                           |                         | easiest to easiest 9 x the hardest |

Parts are of neighbours, so a document that several prompts are about is in one of them only, but at the borders. A
domain is the harder, the fewer of the draft's tokens are right in it; between the easiest and the hardest, weights are
geometric. `rate` is the caller's, so a mix of longer requests is more load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from faser.envs.arrivals import Arrivals, Bursty, Diurnal, Mixed, Poisson, Ramp, Spikes, Swing, check
from faser.envs.trace import Drift, Mix, Trace, sample_trace
from faser.tapes import Tape, TapeError

SEEDS = 1_000_000
"""Of each period."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """What policies are trained, tuned or tested on: see the table above.

    tape: the requests of this period alone. arrivals, mix: by the name of a suite. first_seed: of SEEDS.
    """

    name: str
    tape: Tape
    arrivals: Mapping[str, Arrivals]
    mix: Mapping[str, Mix | Drift]
    first_seed: int

    def trace(self, suite: str, episode: int, n: int, rate: float) -> Trace:
        """`n` requests at `rate` per s of a suite's episode 0, 1, ...: the same one whenever it is asked for."""
        check(suite in self.arrivals, "suite", repr(suite), f"{', '.join(self.arrivals)} (in {self.name})")
        check(0 <= episode < SEEDS, "episode", episode, f"0 to {SEEDS - 1}")
        rng = np.random.default_rng(self.first_seed + episode)
        return sample_trace(self.arrivals[suite], rng, n, rate, self.tape, self.mix[suite])


_BURSTS = tuple(Bursty(cv=cv) for cv in (2.0, 3.0, 4.0))
_SPIKES = tuple(Spikes(contrast=contrast) for contrast in (5.0, 10.0))
_SEEN: dict[str, dict[str, Arrivals]] = {
    "train": {"steady": Poisson(), "bursty": Mixed(kinds=_BURSTS), "spikes": Mixed(kinds=_SPIKES)},
    "validation": {
        "steady": Poisson(),
        "bursty": Bursty(cv=5.0),
        "spikes": Spikes(share=0.15, contrast=14.0, cycle_requests=96.0),
    },
    "test": {
        "steady": Poisson(),
        "bursty": Bursty(cv=6.0),
        "spikes": Spikes(share=0.1, contrast=20.0, cycle_requests=128.0),
        "diurnal": Diurnal(),
        "swing": Swing(),
    },
}
_RAMP: dict[str, tuple[Arrivals, ...]] = {"train": (Ramp(),), "validation": (Ramp(start=1.8, end=0.2),), "test": ()}
_HARDEST = {"train": 1.0, "validation": 1 / 3, "test": 3.0}
"""How much more often the hardest domain comes than the easiest."""
_DRIFT = 9.0

PERIODS = tuple(_SEEN)


def period(name: str, tape: Tape) -> Period:
    """The period `train`, `validation` or `test` over its part of a whole `tape`. ValueError: another name; TapeError:
    too few requests.
    """
    check(name in PERIODS, "period", repr(name), ", ".join(PERIODS))
    arrivals = {**_SEEN[name], "mixed": Mixed(kinds=(*_SEEN[name].values(), *_RAMP[name]))}
    mix: dict[str, Mix | Drift] = dict.fromkeys(arrivals, _leaning(tape, _HARDEST[name]))
    if name == "test":
        arrivals["drift"] = Poisson()
        mix["drift"] = Drift(start=_leaning(tape, _DRIFT), end=_leaning(tape, 1 / _DRIFT))
    try:
        part = tape.split("train" if name == "train" else "eval")
        if name != "train":
            part = part.split("train" if name == "validation" else "eval")
    except TapeError:
        raise TapeError(
            f"the tape has {len(tape)} requests, none of them for {name}; "
            "allowed: 4 or more of a domain and temperature"
        ) from None
    return Period(name=name, tape=part, arrivals=arrivals, mix=mix, first_seed=SEEDS * PERIODS.index(name))


def _leaning(tape: Tape, hardest: float) -> Mix:
    """Weights from 1, for the domain where the draft is right most often, to `hardest`."""
    rates = tape.acceptance()
    easy_first = sorted(rates, key=lambda domain: -rates[domain])
    powers = np.linspace(0.0, 1.0, len(easy_first)).tolist()
    return Mix(domains={domain: hardest**power for domain, power in zip(easy_first, powers, strict=True)})
