"""What drafted tokens are worth to engines, from a cost model: the price of a row, and the value of each draft depth.

Both answer one question (SmartSpec, arXiv 2406.14066, asks it too): which choice brings most expected tokens per
millisecond. Thresholds stand for sets of tokens: survival falls along a draft, so all tokens above one are prefixes.

Symbols: E engines, M requests in all of them, K = MAX_DEPTH.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, Floats, Ints
from faser.costs import StepCost

Doubles = NDArray[np.float64]

BINS = 64
"""Survivals are told apart to 1 / BINS."""


def row_price(
    survival: Floats,
    owner: Ints,
    cost: StepCost,
    *,
    running: Ints,
    prefill_tokens: NDArray[np.generic],
    context: Doubles,
) -> Doubles:
    """[E] the survival above which a drafted token should be verified: of the thresholds for the best set the lowest.

    survival: [M, K], 0 where nothing was drafted; owner [M]. running, prefill_tokens, context: [E]. Of all thresholds t
    it is the one with the largest (N + sum of survivals over t) / ms of the step with these rows more. Prompts in the
    step make its rows dearer, but their own time is spent anyway and prices nothing.
    """
    engines, bins = len(running), BINS + 1
    place = (np.ceil(survival * BINS).astype(np.int64) + owner[:, None] * bins).ravel()  # b: over (b - 1) / BINS
    above: Doubles = np.zeros((2, engines, bins))  # rows over the threshold b / BINS, and tokens expected of them
    above[0] = np.bincount(place, minlength=engines * bins).reshape(engines, bins)
    above[1] = np.bincount(place, survival.ravel(), engines * bins).reshape(engines, bins)
    above[:, :, :-1] = above[:, :, :0:-1].cumsum(axis=2)[:, :, ::-1]
    above[:, :, -1] = 0.0
    more, gained = above[0], above[1]
    batch = running[:, None].astype(np.float64)
    prompts = np.asarray(prefill_tokens)[:, None]
    rows = np.concatenate([more + batch + prompts, batch], axis=1)
    prefill = prompts * (np.arange(bins + 1) < bins)
    ms = cost.ms(rows=rows, batch=batch, context=context[:, None], prefill=prefill)
    spent = ms[:, -1:] + ms[:, :-1] - ms[:, -2:-1]  # the step without its prompts, and what the rows add to it
    best: Doubles = ((batch + gained) / spent).argmax(axis=1) / BINS
    return best


def depth_values(gain: Doubles, cost: StepCost, *, running: Ints, context: Doubles) -> Doubles:
    """[E, K + 1] expected tokens per ms of a step for which d = 0..K tokens were drafted, over that of the best d.

    gain: [E, 2, K] what drafting a j-th token for each of `running` [E] requests brings: tokens expected to survive of
    those that will be worth verifying, and rows, how many these are. A draft is an option: its worth is not that of
    verifying it whole, which the powers of an acceptance would give. context: [E].
    """
    batch, depth = np.maximum(running, 1)[:, None], np.arange(MAX_DEPTH + 1)
    grown = np.concatenate([np.zeros((len(gain), 2, 1)), gain.cumsum(axis=2)], axis=2)
    ms = cost.ms(rows=batch + grown[:, 1], batch=batch, depth=depth, context=context[:, None])
    rate = (batch + grown[:, 0]) / ms
    values: Doubles = rate / rate.max(axis=1, keepdims=True)
    return values
