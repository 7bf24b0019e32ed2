"""The learned policy: the PPO network frozen into numpy, fast enough to run before every engine step.

    h1 = relu(x W + load U + b)           one row a request; x [N, F] request features, load [L]
    h2 = relu(h1 W + mean(h1) V + b)      each request also sees the batch
    lengths = argmax_k (h2 W + x S + load P + b)[k],  k <= drafted
    z = relu(mean(h2) W + mean(x) V + load U + b)
    depth = argmax_d (z W + load Q + b)[d],  frontier = argmax (z W + b)

It starts as the rule of most tokens per millisecond (`policies.goodput`): verify token j while its survival is over the
row's price, draft to the depth of most value. Both are linear in the features, so they are the initial values of the
skip arrays S, P and Q (`rule`): training learns what the rule misses. `faser.train.network` is the torch twin; a test
holds them equal.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Decision, Floats, Observation
from faser.policies import policy_file
from faser.policies.goodput import DEPTH_VALUES
from faser.policies.policy_file import PolicyFile, PolicyFileError

__all__ = ["NEVER", "LearnedPolicy", "PolicyFileError", "load", "rule"]

NEVER = np.float32(-1e9)
"""Logit of a choice that is not allowed; finite, so that a probability of 0 times its logarithm is 0."""

SURVIVAL = REQUEST_FEATURES.index("survival_1")
DRAFTED = REQUEST_FEATURES.index("drafted")
PRICE = LOAD_FEATURES.index("row_price")

_INPUTS = (  # weight, bias that takes its mean, which features
    ("request_weight", "request_bias", "request"),
    ("length_skip", "length_bias", "request"),
    ("batch_mean", "batch_bias", "request"),
    ("request_load", "request_bias", "load"),
    ("length_load", "length_bias", "load"),
    ("batch_load", "batch_bias", "load"),
    ("depth_load", "depth_bias", "load"),
)


def rule(sharpness: float, depth_sharpness: float) -> dict[str, Floats]:
    """Skip arrays of an untrained policy. Logit of length k: sharpness x sum_{j<=k} (survival_j - row_price); of depth
    d: depth_sharpness x its value.
    """
    skip = np.zeros((len(REQUEST_FEATURES), MAX_DEPTH + 1), np.float32)
    price, values = np.zeros((2, len(LOAD_FEATURES), MAX_DEPTH + 1), np.float32)
    skip[SURVIVAL : SURVIVAL + MAX_DEPTH, 1:] = sharpness * np.triu(np.ones((MAX_DEPTH, MAX_DEPTH), np.float32))
    price[PRICE] = -sharpness * np.arange(MAX_DEPTH + 1)
    values[DEPTH_VALUES : DEPTH_VALUES + MAX_DEPTH + 1] = depth_sharpness * np.eye(MAX_DEPTH + 1)
    return {"length_skip": skip, "length_load": price, "depth_load": values}


def load(path: Path | str) -> LearnedPolicy:
    """The policy in a policy file. PolicyFileError, in one line, if the file is not one."""
    return LearnedPolicy(policy_file.load(path))


class LearnedPolicy:
    """Decides by the arrays of a `PolicyFile`. Its only state is its buffers, so one object serves one thread."""

    def __init__(self, file: PolicyFile) -> None:
        self.file = file
        a = {name: array.copy() for name, array in file.arrays.items()}
        for weight, bias, kind in _INPUTS:  # fold the normaliser into the layers that read features
            mean, scale = file.normaliser[f"{kind}_mean"], file.normaliser[f"{kind}_scale"]
            a[weight] /= scale[:, None]
            a[bias] -= mean @ a[weight]
        self._a = {name: np.ascontiguousarray(array) for name, array in a.items()}
        allowed = np.arange(MAX_DEPTH + 1)
        self._mask = np.where(allowed <= allowed[:, None], np.float32(0), NEVER)  # [drafted, length]
        # A small product costs as much as its call, so what reads the same input is one: load for four uses.
        parts = [
            (a["request_load"], a["request_bias"]),
            (a["length_load"], a["length_bias"]),
            (a["batch_load"], a["batch_bias"]),
            (a["depth_load"], a["depth_bias"] + np.where(allowed <= file.max_depth, np.float32(0), NEVER)),
        ]
        self._load_weight = np.hstack([weight for weight, _ in parts])
        self._load_bias = np.concatenate([bias for _, bias in parts])
        ends = np.cumsum([len(bias) for _, bias in parts])
        self._of_load = [slice(end - len(bias), end) for end, (_, bias) in zip(ends, parts, strict=True)]
        self._batch_weight = np.vstack([a["batch_mean"], a["batch_weight"]])
        self._hidden = len(a["request_bias"])
        self._grow(64)

    def _grow(self, rows: int) -> None:
        """Buffers for `rows` requests; kept for the life of the policy."""
        self._ones = np.ones(rows, np.float32)
        self._h1 = np.empty((rows, self._hidden), np.float32)
        self._h2 = np.empty((rows, self._hidden), np.float32)
        self._logits = np.empty((rows, MAX_DEPTH + 1), np.float32)
        self._other = np.empty((rows, MAX_DEPTH + 1), np.float32)
        self._means = np.empty(len(REQUEST_FEATURES) + self._hidden, np.float32)

    def decide(self, observation: Observation) -> Decision:
        """The most probable action of the trained policy."""
        lengths, depth, frontier = self.logits(observation)
        best = int(frontier[: self.file.max_frontier + 1].argmax()) if self.file.max_frontier else 0
        return Decision(lengths.argmax(axis=1), int(depth.argmax()), best)

    def logits(self, observation: Observation) -> tuple[Floats, Floats, Floats]:
        """Logits of lengths [N, K+1] (a buffer that the next call reuses), depth [K+1] and frontier [W+1]."""
        a, n, x = self._a, observation.running, observation.requests
        if n > len(self._ones):
            self._grow(max(n, 2 * len(self._ones)))
        ones, h1, h2 = self._ones[:n], self._h1[:n], self._h2[:n]
        logits, other = self._logits[:n], self._other[:n]
        share = np.float32(1 / max(n, 1))
        from_load = np.dot(observation.load, self._load_weight)
        from_load += self._load_bias
        to_request, to_length, to_batch, to_depth = (from_load[part] for part in self._of_load)

        np.dot(x, a["request_weight"], out=h1)
        h1 += to_request
        np.maximum(h1, 0, out=h1)
        context = np.dot(ones, h1)
        context *= share
        np.dot(h1, a["mix_weight"], out=h2)
        h2 += np.dot(context, a["mix_context"]) + a["mix_bias"]
        np.maximum(h2, 0, out=h2)

        np.dot(h2, a["length_weight"], out=logits)
        logits += np.dot(x, a["length_skip"], out=other)
        logits += to_length
        drafted = (x[:, DRAFTED] * MAX_DEPTH + 0.5).astype(np.intp)
        logits += self._mask.take(drafted, axis=0, out=other, mode="clip")

        means = self._means
        np.dot(ones, x, out=means[: len(REQUEST_FEATURES)])
        np.dot(ones, h2, out=means[len(REQUEST_FEATURES) :])
        means *= share
        z = np.dot(means, self._batch_weight)
        z += to_batch
        np.maximum(z, 0, out=z)
        depth: Floats = np.dot(z, a["depth_weight"])
        depth += to_depth
        frontier: Floats = np.dot(z, a["frontier_weight"]) + a["frontier_bias"]
        return logits, depth, frontier
