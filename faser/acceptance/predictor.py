"""`Predictor`: the chance that a drafted token is accepted, given that all before it in its draft are.

    units[j] = relu(unit_bias[j] + token_unit t[j] + history_unit h)
    logit[j] = bias[j] + token_skip[j] . t[j] + history_skip . h + out . units[j]

t[j] are a token's features, h its request's. One decision: every token feature is a fixed linear mix of the logarithms
of confidence and of doubt (1 - confidence). So all positions of all requests are two matrix products over one small
input per request, which the weights in a file, shared by all positions, are expanded to once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from faser.core import MAX_DEPTH, Floats

TOKEN_FEATURES = ("log_odds", "log_confidence")
"""Of the token at j: log odds and log of its confidence. Others, of entropy or of the two largest probabilities, would
come with inputs of their own beside confidence and doubt."""

HISTORY_FEATURES = ("acceptance_fast", "acceptance_slow", "last_accepted", "temperature")
"""Of the request: what `RequestTable` knows of its earlier drafts, and its sampling temperature, 0 for greedy.

Tried on the shipped tape, and left out since the log-loss was no larger without: confidences before in the draft,
tokens generated, and the acceptance of the whole engine."""

EDGE = 1.0 / 512.0
"""Confidences are read within [EDGE, 1 - EDGE]: a tape stores them in steps of 1/255."""

SURE, MAX_HIDDEN = 30.0, 128
"""Largest log odds; most units."""


class PredictorError(ValueError):
    """A predictor that is refused; the message is one line."""


def basis() -> Floats:
    """[G, K, 2 K] token feature g of position j as a mix of K log confidences, then K log doubts."""
    mix = np.zeros((len(TOKEN_FEATURES), MAX_DEPTH, 2, MAX_DEPTH), np.float32)
    at = np.arange(MAX_DEPTH)
    mix[0, at, 0, at], mix[0, at, 1, at] = 1.0, -1.0
    mix[1, at, 0, at] = 1.0
    return mix.reshape(len(TOKEN_FEATURES), MAX_DEPTH, 2 * MAX_DEPTH)


def array_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each array of a file with `hidden` units; see the module for what they do.

    history_low, history_high: the values that history features had in training; others are read as the nearest of them.
    """
    g, h, k = len(TOKEN_FEATURES), len(HISTORY_FEATURES), MAX_DEPTH
    return {
        "bias": (k,), "token_skip": (k, g), "history_skip": (h,),
        "unit_bias": (k, hidden), "token_unit": (hidden, g), "history_unit": (hidden, h), "out": (hidden,),
        "history_low": (h,), "history_high": (h,),
    }  # fmt: skip


class Predictor:
    """Not for two threads at once: it keeps its work space between calls.

    arrays: float32, as in `array_shapes`. target, draft: fingerprints of the models whose tape it learned from.
    trained: command, tape, versions, scores; for people.
    """

    def __init__(
        self, arrays: Mapping[str, Any], *, target: str = "", draft: str = "", trained: Mapping[str, Any] | None = None
    ) -> None:
        """PredictorError names the array that is missing, unknown, or not as in `array_shapes`."""
        self.arrays = _checked(arrays)
        self.target, self.draft, self.trained = target, draft, dict(trained or {})
        self._units, self._outputs = _expanded(self.arrays)  # [K H, I], [K, K H + I]
        self._space = np.zeros(0, np.float32)

    def survival(
        self,
        confidence: Floats,
        *,
        acceptance_fast: Floats,
        acceptance_slow: Floats,
        last_accepted: Floats,
        temperature: Floats,
    ) -> Floats:
        """[N, K] float32: probability that a request's first j drafted tokens are all accepted.

        confidence: [N, K], 0 where nothing is drafted; survival is 0 there. The others are [N], as in `RequestTable`;
        temperature 0 is greedy. A new array in each call.
        """
        history = acceptance_fast, acceptance_slow, last_accepted, temperature
        return self._chances(confidence, history, joint=True)

    def conditional(self, confidence: Floats, history: Floats) -> Floats:
        """[N, K] float32: probability that token j is accepted if all before it are. `history`: [N, H] columns of
        HISTORY_FEATURES."""
        return self._chances(confidence, tuple(history.T), joint=False)

    def _chances(self, confidence: Floats, history: tuple[Floats, ...], *, joint: bool) -> Floats:
        n, units = len(confidence), len(self._units)
        inputs = self._units.shape[1]
        if len(self._space) < (units + inputs) * n:
            self._space = np.empty(2 * (units + inputs) * n, np.float32)
        space = self._space[: (units + inputs) * n].reshape(units + inputs, n)
        hidden, given = space[:units], space[units:]
        _fill(given, confidence, history, self.arrays["history_low"], self.arrays["history_high"])
        np.matmul(self._units, given, out=hidden)
        np.maximum(hidden, 0.0, out=hidden)
        chance = np.matmul(self._outputs, space)  # [K, N] logits
        np.clip(chance, -SURE, SURE, out=chance)  # past that nothing changes but exp, which would overflow
        np.negative(chance, out=chance)
        np.exp(chance, out=chance)
        chance += 1.0
        np.reciprocal(chance, out=chance)
        chance *= confidence.T > 0.0
        if joint:
            for j in range(1, MAX_DEPTH):
                chance[j] *= chance[j - 1]
        return np.asarray(chance.T, np.float32)


def _fill(given: Floats, confidence: Floats, history: tuple[Floats, ...], low: Floats, high: Floats) -> None:
    """The network's input, `given` [I, N]: log confidences, log doubts, history features, 1."""
    doubts = given[MAX_DEPTH : 2 * MAX_DEPTH]
    np.clip(confidence.T, EDGE, 1.0 - EDGE, out=given[:MAX_DEPTH])
    np.subtract(1.0, given[:MAX_DEPTH], out=doubts)
    np.log(given[: 2 * MAX_DEPTH], out=given[: 2 * MAX_DEPTH])
    past = given[2 * MAX_DEPTH : -1]
    for row, values in zip(past, history, strict=True):
        row[:] = values
    np.clip(past, low[:, None], high[:, None], out=past)
    given[-1] = 1.0


def _expanded(arrays: Mapping[str, Floats]) -> tuple[Floats, Floats]:
    """Weights over the whole input of a request: of all units [K H, I], and of the logits over units and input."""
    k, hidden, mix = MAX_DEPTH, len(arrays["out"]), basis()
    past = np.broadcast_to(arrays["history_unit"], (k, hidden, len(HISTORY_FEATURES)))
    tokens = np.einsum("hg,gji->jhi", arrays["token_unit"], mix)
    units = np.concatenate([tokens, past, arrays["unit_bias"][:, :, None]], axis=2)
    skip = np.einsum("jg,gji->ji", arrays["token_skip"], mix)
    skip_past = np.broadcast_to(arrays["history_skip"], (k, len(HISTORY_FEATURES)))
    own = np.einsum("jl,h->jlh", np.eye(k, dtype=np.float32), arrays["out"]).reshape(k, k * hidden)
    outputs = np.concatenate([own, skip, skip_past, arrays["bias"][:, None]], axis=1)
    return np.ascontiguousarray(units.reshape(k * hidden, -1)), np.ascontiguousarray(outputs)


def _checked(arrays: Mapping[str, Any]) -> dict[str, Floats]:
    """`arrays` as float32; PredictorError names the one that is missing, unknown, or of another shape."""
    out = arrays.get("out")
    hidden = len(out) if isinstance(out, list | np.ndarray) else 0
    if not 0 < hidden <= MAX_HIDDEN:
        raise PredictorError(f"out has {hidden} units; allowed: a list of 1 to {MAX_HIDDEN} numbers")
    shapes = array_shapes(hidden)
    if set(arrays) != set(shapes):
        raise PredictorError(f"arrays are {', '.join(sorted(arrays))}; expected {', '.join(sorted(shapes))}")
    made: dict[str, Floats] = {}
    for name, shape in shapes.items():
        try:
            made[name] = np.array(arrays[name], np.float32)
        except (ValueError, TypeError):
            raise PredictorError(f"{name} is no array of numbers") from None
        if made[name].shape != shape:
            raise PredictorError(f"{name} has shape {made[name].shape}; {shape} expected")
        if not np.isfinite(made[name]).all():
            raise PredictorError(f"{name} holds NaN or infinity; finite numbers expected")
    return made
