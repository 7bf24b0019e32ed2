"""How good a policy is: its time in system over that without speculation, on arrivals that training never sees.

The decision: one number per (model, load), each from the same arrivals for every policy, over the tape's evaluation
half. Two disjoint sets of arrivals exist: `SELECTION` picks the best weights of a run, `REPORT` gives the figures that
are printed and stored, so that these are not flattered by the picking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import numpy as np

from faser.core import Policy
from faser.costs import StepCost
from faser.envs.arrivals import ARRIVALS
from faser.envs.simulator import capacity, replay
from faser.envs.trace import Trace, sample_trace
from faser.models import measured
from faser.tapes import Tape
from faser.train.presets import preset

SELECTION, REPORT = 1_000_000, 2_000_000
"""First seed of each set of arrivals; training seeds are far below."""


@dataclass(frozen=True)
class World:
    """A model's evaluation half of the tape, and its costs."""

    tape: Tape
    cost: StepCost


@cache
def world(model: str) -> World:
    """ValueError if the model's profile or tape is not there."""
    cost, tape = measured(model)
    return World(tape.split("eval"), cost)


@cache
def trace(model: str, load: float, seed: int) -> Trace:
    """The arrivals of one evaluation episode."""
    own, of = preset(model), world(model)
    rate = load * capacity(of.tape, of.cost, own.slots)
    rng = np.random.default_rng(seed)
    return sample_trace(ARRIVALS["mixed"], rng, own.requests(load), rate, of.tape)


Scores = dict[tuple[str, float], float]
"""(model, load) -> request-seconds in the system over those without speculation, mean over seeds; below 1 is better."""


def evaluate(make: Callable[[StepCost], Policy], models: Sequence[str], *, first_seed: int, seeds: int) -> Scores:
    """Scores of the policy that `make` builds for a model's costs, a fresh one for every episode."""
    return {
        (model, load): _score(make, model, load, range(first_seed, first_seed + seeds))
        for model in models
        for load in preset(model).evaluated_loads
    }


def _score(make: Callable[[StepCost], Policy], model: str, load: float, seeds: Iterable[int]) -> float:
    of = world(model)
    traces = [trace(model, load, seed) for seed in seeds]
    runs = replay(lambda _: make(of.cost), traces, of.tape, of.cost, slots=preset(model).slots)
    return fmean(summary.ratio_to_none for summary in runs)


def mean(scores: Scores) -> float:
    """Over models and loads alike."""
    return fmean(scores.values())
