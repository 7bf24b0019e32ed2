"""How good stated chances are: log-loss, calibration error, Brier, AUC, each over verdicts, intervals over requests.

One decision: verdicts of one request are alike, so intervals resample requests, not tokens; every score is a function
of sums per request, which makes a resample a product of matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.core import Floats

Array = NDArray[np.float64]
BINS, RESAMPLES, LEAST = 20, 1000, 1e-3
"""Bins of the calibration error; bootstrap resamples; and chances are read within [LEAST, 1 - LEAST], lest one token
that a confidence of 1 got wrong makes a log-loss infinite."""


def log_losses(chance: Floats, accepted: NDArray[np.bool_]) -> Array:
    """[M] minus the log of the chance given to what came, in nats."""
    p = np.clip(chance.astype(np.float64), LEAST, 1.0 - LEAST)
    return np.asarray(-np.log(np.where(accepted, p, 1.0 - p)), np.float64)


def calibration_error(chance: Floats, accepted: NDArray[np.bool_]) -> float:
    """Expected calibration error: over BINS equal bins of chance, the mean of |mean chance - share accepted|, weighted
    by the verdicts in the bin. It is biased up: a perfect predictor's is over 0 in a finite sample."""
    at = bin_of(chance)
    return float(np.abs(np.bincount(at, chance - accepted, BINS)).sum() / len(at))


def auc(chance: Floats, accepted: NDArray[np.bool_]) -> float:
    """Chance that an accepted token was given more than a rejected one, ties counting half; NaN without both kinds."""
    values, at = np.unique(chance, return_inverse=True)
    yes, no = np.bincount(at, accepted, len(values)), np.bincount(at, ~accepted, len(values))
    if not yes.sum() or not no.sum():
        return float("nan")
    below = np.cumsum(no) - no
    return float((yes * (below + 0.5 * no)).sum() / (yes.sum() * no.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of one predictor on some verdicts. Intervals are the middle 95 % of bootstrap resamples of requests.

    gain: log-loss less than the reference's, and its interval; NaN without a reference.
    """

    verdicts: int
    log_loss: float
    log_loss_interval: tuple[float, float]
    gain: float
    gain_interval: tuple[float, float]
    calibration_error: float
    calibration_interval: tuple[float, float]
    brier: float
    auc: float


def scores(
    chance: Floats,
    accepted: NDArray[np.bool_],
    request: NDArray[np.int64],
    *,
    reference: Floats | None = None,
    resamples: int = RESAMPLES,
) -> Scores:
    """Scores of `chance` [M] given to verdicts `accepted` [M] of `request` [M]; reference: another's chances [M]."""
    losses = log_losses(chance, accepted)
    gains = (log_losses(reference, accepted) if reference is not None else np.full(len(losses), np.nan)) - losses
    names, at = np.unique(request, return_inverse=True)
    r = len(names)
    weights = np.random.default_rng(0).multinomial(r, np.full(r, 1.0 / r), resamples).astype(np.float64)
    per_request = np.stack([np.bincount(at, x, r) for x in (losses, gains, np.ones(len(losses)))], axis=1)
    drawn = weights @ per_request
    bins = np.bincount(at * BINS + bin_of(chance), chance - accepted, r * BINS).reshape(r, BINS)
    errors = np.abs(weights @ bins).sum(axis=1) / drawn[:, 2]
    return Scores(
        verdicts=len(losses),
        log_loss=float(losses.mean()),
        log_loss_interval=_middle(drawn[:, 0] / drawn[:, 2]),
        gain=float(gains.mean()),
        gain_interval=_middle(drawn[:, 1] / drawn[:, 2]),
        calibration_error=calibration_error(chance, accepted),
        calibration_interval=_middle(errors),
        brier=float(((chance - accepted) ** 2).mean()),
        auc=auc(chance, accepted),
    )


def _middle(values: Array) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def bin_of(chance: Floats) -> NDArray[np.int64]:
    """[M] index of the bin of each chance, of BINS equal ones in [0, 1]."""
    return np.minimum((chance * BINS).astype(np.int64), BINS - 1)
