"""What better chances buy: tokens per ms of batches of drafts whose lengths are chosen by them.

One decision: all are used in the same way, the goodput rule's (most expected tokens per ms). What its choice brings is
then known exactly, from the tape; what it costs is the profile's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from faser.core import Floats, Ints
from faser.costs import StepCost
from faser.train.acceptance_samples import Samples

BATCHES = (1, 8, 32, 64, 128, 192)
DRAWN = 4096
"""Requests drawn per batch size, at most; and at least LEAST batches."""
LEAST, RESAMPLES = 100, 1000


def lengths_by(survival: Floats, context: int, cost: StepCost) -> Ints:
    """[N] tokens to verify: of all drafted tokens the m with the largest `survival` [N, K], m with the most expected
    tokens per ms. Survival falls along a draft, so they are prefixes. context: tokens of all."""
    n = len(survival)
    ranked = -np.sort(-survival[survival > 0.0])
    expected = n + np.concatenate([[0.0], np.cumsum(ranked)])
    m = int((expected / cost.ms(rows=n + np.arange(len(expected)), batch=n, context=context)).argmax())
    return np.asarray((survival >= ranked[m - 1]).sum(axis=1)) if m else np.zeros(n, np.int64)


def replay(
    samples: Samples, survivals: Mapping[str, Floats], cost: StepCost, batch: int, *, seed: int = 0
) -> dict[str, NDArray[np.float64]]:
    """Name -> [B, 2] tokens and ms of B batches of `batch` random samples, all K tokens drafted before.

    survivals: name -> [M, K]. The step verifies and drafts nothing more; a request that ends emits no more than it has.
    """
    rounds = max(DRAWN // batch, LEAST)
    drawn = np.random.default_rng(seed).integers(0, len(samples), (rounds, batch))
    results = {name: np.zeros((rounds, 2)) for name in survivals}
    for i, chosen in enumerate(drawn):
        context, run, left = int(samples.context[chosen].sum()), samples.run[chosen], samples.left[chosen]
        for name, survival in survivals.items():
            lengths = lengths_by(survival[chosen], context, cost)
            tokens = np.minimum(np.minimum(run, lengths) + 1, left).sum()
            rows = batch + int(lengths.sum())
            results[name][i] = tokens, cost.step_ms(rows=rows, batch=batch, context=context)
    return results


def clairvoyant(samples: Samples) -> Floats:
    """[M, K] survival 1 up to what will be accepted, then 0."""
    return samples.accepted.astype(np.float32)


def table(samples: Samples, survivals: Mapping[str, Floats], cost: StepCost, batches: tuple[int, ...] = BATCHES) -> str:
    """Tokens per ms by batch size; and, of each but the first, the ratio to the first with its 95 % interval."""
    names = list(survivals)
    lines = [f"{'batch':>5}  {names[0] + ', tok/ms':>24}" + "".join(f"  {name:>22}" for name in names[1:])]
    for batch in batches:
        results = replay(samples, survivals, cost, batch)
        first = results[names[0]]
        rounds = len(first)
        weights = np.random.default_rng(0).multinomial(rounds, np.full(rounds, 1 / rounds), RESAMPLES).astype(float)
        line = f"{batch:5d}  {first[:, 0].sum() / first[:, 1].sum():24.3f}"
        for name in names[1:]:
            low, middle, high = _ratio(results[name], first, weights)
            line += f"  {middle:6.3f} ({low:.3f}-{high:.3f})"
        lines.append(line)
    return "\n".join(lines)


def _ratio(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Low end, value and high end of the ratio of tokens per ms, batches resampled in pairs."""
    a, b = weights @ ours, weights @ theirs
    low, high = np.percentile((a[:, 0] / a[:, 1]) / (b[:, 0] / b[:, 1]), (2.5, 97.5))
    value = (ours[:, 0].sum() / ours[:, 1].sum()) / (theirs[:, 0].sum() / theirs[:, 1].sum())
    return float(low), float(value), float(high)
