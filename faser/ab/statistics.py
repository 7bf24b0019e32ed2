"""What can be said of two arms from numbers that came in pairs: an interval, and one that allows for looking any time.

One decision: both intervals stand on the randomised order. A pair is one block of windows: `base` and `other` are
means over the windows of each arm in it. Were both arms the same policy, a shuffled block would as likely have had the
difference of the other sign, whatever the load did and however it drifted. So the fixed interval assumes nothing of the
load's distribution, nor that windows are independent; what the sequence assumes, it says. A percentile bootstrap of
blocks does assume a large sample, and is wrong here: 16 % of A/A tests of 5 blocks, 7 to 12 % of those of 10 to 100,
"find" a difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

ALPHA = 0.05
"""Chance of an interval that misses: they are 95 % intervals."""

LEAST = 8
"""Fewest blocks for an interval: fewer have too few halves."""

LONG = 250
"""More blocks than this are averaged to so many; see `_shortened`."""

HALVES = 3999
"""Resamples: with 100 left out at either end an interval misses in 5 of 100, give or take one for their being few."""

EARLY = 30
"""The sequence is tightest at about this many blocks."""

RATIO_ALPHA = 0.001
"""A split is called wrong below this: the check is looked at all the time."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def excludes_zero(self) -> bool:
        """Whether it is all on one side."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Effect:
    """blocks: pairs, or clients. base, other: means. difference: other less base; relative: over base."""

    blocks: int
    base: float
    other: float
    difference: Interval
    relative: Interval


def paired(base: Doubles, other: Doubles) -> Effect:
    """The effect over blocks, [n] each; blocks where one of them is NaN are left out.

    The interval is a bootstrap of blocks that draws each with chance 1/2, rather than n with replacement: the means of
    such random halves are "typical values", which split the line into equally likely parts for any n if the differences
    are symmetric (Hartigan, "Using subsample values as typical values", JASA 1969). The relative one is that of the
    ratio of the halves' means, which is the same statement of other - (1 + r) base; there is none, at either end, if
    so few blocks have a base over 0 that an end has no bound.
    """
    both = np.isfinite(base) & np.isfinite(other)
    base, other = base[both], other[both]
    n = len(base)
    if n == 0:
        return Effect(0, math.nan, math.nan, Interval(math.nan), Interval(math.nan))
    means = float(base.mean()), float(other.mean())
    difference = means[1] - means[0]
    relative = difference / means[0] if means[0] else math.nan
    if n < LEAST:
        return Effect(n, *means, Interval(difference), Interval(relative))
    pairs = _shortened(np.stack([base, other], axis=1))
    halves = _halves(len(pairs)) @ pairs
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = _ends(halves[:, 1] / halves[:, 0] - 1)
    return Effect(
        n,
        *means,
        Interval(difference, *_ends(halves[:, 1] - halves[:, 0])),
        Interval(relative, *(ends if means[0] > 0 and np.isfinite(ends).all() else ())),
    )


def clustered(arm: Doubles, total: Doubles, count: Doubles) -> Effect:
    """The effect on a mean per request when clients were split: [n] each, `arm` 0 or 1, and of the client `count`
    requests that sum to `total`.

    A client's requests are alike, so clients are what is counted: a t interval on linearised ratios, its degrees of
    freedom those of the smaller arm (Deng, Knoblich and Lu, "Applying the delta method in metric analytics", KDD 2018).
    """
    means, variances, sizes = [], [], []
    for which in (0, 1):
        mine = (arm == which) & (count > 0)
        n = int(mine.sum())
        sizes.append(n)
        means.append(float(total[mine].sum() / count[mine].sum()) if n else math.nan)
        off = (total[mine] - means[-1] * count[mine]) / count[mine].mean() if n else np.zeros(0)
        variances.append(float((off**2).sum() / (n * (n - 1))) if n > 1 else math.nan)
    base, other = means
    difference, relative = other - base, other / base - 1 if base else math.nan
    if min(sizes) < LEAST:
        return Effect(sum(sizes), base, other, Interval(difference), Interval(relative))
    t = student(1 - ALPHA / 2, min(sizes) - 1)
    half = t * math.sqrt(sum(variances))
    of_ratio = t * math.sqrt(variances[1] + (other / base) ** 2 * variances[0]) / base if base else math.nan
    return Effect(
        sum(sizes),
        base,
        other,
        Interval(difference, difference - half, difference + half),
        Interval(relative, relative - of_ratio, relative + of_ratio),
    )


def sequence(differences: Doubles) -> tuple[Doubles, Doubles, Doubles]:
    """The mean of the first k of `differences` [n] and its interval, for every k: mean, low, high, [n] each.

    With 95 % chance the truth is in all of them at once, so one may look whenever one likes and stop when zero is out.
    It is the t-test's confidence sequence: a Gaussian mixture over effect sizes and Jeffreys' over scales, exact for
    Gaussian differences whatever their scale (Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for
    Gaussian means with unknown variance", 2023). Heavier symmetric tails make t smaller, so it errs to the safe side;
    it tends to Robbins' normal mixture, which with an estimated variance is too narrow in the first blocks. Infinite at
    first: some seven blocks say nothing.
    """
    k = np.arange(1, len(differences) + 1, dtype=float)
    mean = np.cumsum(differences) / k
    squares = np.maximum(np.cumsum((differences - differences.mean()) ** 2), 0.0) if len(k) else k
    squares = np.maximum(squares - k * (mean - differences.mean()) ** 2, 0.0) if len(k) else k
    late = -2 * math.log(ALPHA)
    prior = EARLY / (late + math.log(late) + 1)
    shrunk = prior / (k + prior)
    bound = (ALPHA**2 * shrunk) ** (-1 / k)
    with np.errstate(divide="ignore", invalid="ignore"):
        half = np.sqrt(squares / k * np.where(bound * shrunk < 1, (bound - 1) / (1 - bound * shrunk), np.inf))
    half = np.where(bound * shrunk < 1, half, np.inf)
    return mean, mean - half, mean + half


def binomial(count: int, of: int, share: float) -> float:
    """The chance of a count at least as far off as `count` of `of`: twice the smaller tail of the binomial."""
    if of * share * (1 - share) > 1000:
        off = max(abs(count - of * share) - 0.5, 0.0) / math.sqrt(of * share * (1 - share))
        return 2 * (1 - NormalDist().cdf(off))

    def chance(k: int) -> float:
        ways = math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
        return math.exp(ways + k * math.log(share) + (of - k) * math.log1p(-share))

    below, at = sum(chance(k) for k in range(count)), chance(count)
    return min(1.0, 2 * min(below + at, 1 - below))


def student(p: float, freedom: int) -> float:
    """The p-quantile of Student's t, to 0.1 % from 4 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (i + 1) for i, term in enumerate(terms))


@lru_cache(maxsize=4)
def _halves(blocks: int) -> Doubles:
    """Each row makes the mean of a random half of `blocks` numbers. The same ones every time: no luck in a report."""
    drawn = np.random.default_rng(0).random((HALVES, blocks)) < 0.5
    drawn = drawn[drawn.any(axis=1)]
    means: Doubles = drawn / drawn.sum(axis=1)[:, None]
    return means


def _ends(values: Doubles) -> tuple[float, float]:
    """What is left of `values` when 2.5 % go at either end."""
    values = np.sort(values)
    out = round((len(values) + 1) * ALPHA / 2)
    return float(values[out - 1]), float(values[-out])


def _shortened(pairs: Doubles) -> Doubles:
    """Means over runs of blocks, at most LONG, which say as much and cost less; a last, shorter run is left out."""
    run = -(-len(pairs) // LONG)
    return pairs if run == 1 else pairs[: len(pairs) // run * run].reshape(-1, run, 2).mean(axis=1)
