"""Fits of acceptance to `Samples`: a table of 20 bins of confidence, and the network of `faser.acceptance`.

One decision: the network is fitted in the form that its file has, on the features that the runtime computes, so that
what was measured is what is served. Without units it is logistic regression. A part of the requests is held back to
choose when to stop; the evaluation's are never seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from faser.acceptance import HISTORY_FEATURES, TOKEN_FEATURES, Predictor
from faser.acceptance.predictor import EDGE, basis
from faser.core import MAX_DEPTH, Floats
from faser.train.acceptance_samples import Samples
from faser.train.acceptance_scores import BINS, bin_of

HELD_BACK = 0.15


@dataclass(frozen=True, kw_only=True)
class Fit:
    """hidden: units, 0 for logistic regression. patience: epochs without progress before it stops. decay: of weights.
    without: features that are left out.
    """

    hidden: int = 16
    epochs: int = 60
    patience: int = 6
    batch: int = 4096
    rate: float = 1e-2
    decay: float = 1e-5
    seed: int = 0
    without: tuple[str, ...] = ()


def binned(samples: Samples) -> Floats:
    """[BINS] mean acceptance by confidence; an empty bin has its middle."""
    confidence, accepted = samples.confidence[samples.judged], samples.accepted[samples.judged]
    at = bin_of(confidence)
    middle = (np.arange(BINS) + 0.5) / BINS
    counts = np.bincount(at, minlength=BINS)
    return np.asarray((np.bincount(at, accepted, BINS) + middle) / (counts + 1), np.float32)


class _Network(torch.nn.Module):
    """The formula of `faser.acceptance.predictor` over standardised features of single tokens."""

    keep_token: torch.Tensor
    keep_history: torch.Tensor

    def __init__(self, hidden: int, without: Iterable[str]) -> None:
        super().__init__()
        g, h, left_out = len(TOKEN_FEATURES), len(HISTORY_FEATURES), set(without)
        self.bias = torch.nn.Parameter(torch.zeros(MAX_DEPTH))
        self.token_skip = torch.nn.Parameter(torch.zeros(MAX_DEPTH, g))
        self.history_skip = torch.nn.Parameter(torch.zeros(h))
        self.unit_bias = torch.nn.Parameter(torch.randn(MAX_DEPTH, hidden) * 0.1)
        self.token_unit = torch.nn.Parameter(torch.randn(hidden, g) * 0.5)
        self.history_unit = torch.nn.Parameter(torch.randn(hidden, h) * 0.5)
        self.out = torch.nn.Parameter(torch.randn(hidden) * 0.1)
        keep = [float(name not in left_out) for name in (*TOKEN_FEATURES, *HISTORY_FEATURES)]
        self.register_buffer("keep_token", torch.tensor(keep[:g]))
        self.register_buffer("keep_history", torch.tensor(keep[g:]))
        self.places = "position" not in left_out

    def forward(self, token: torch.Tensor, history: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """[B, G], [B, H], [B] position in the draft -> [B] log odds."""
        place = place if self.places else torch.zeros_like(place)
        token, history = token * self.keep_token, history * self.keep_history
        skip = self.bias[place] + (self.token_skip[place] * token).sum(1) + history @ self.history_skip
        units = torch.relu(self.unit_bias[place] + token @ self.token_unit.T + history @ self.history_unit.T)
        return skip + units @ self.out


def fit(samples: Samples, settings: Fit, *, target: str = "", draft: str = "") -> Predictor:
    """The predictor with the least log-loss on the requests that were held back."""
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    requests = np.unique(samples.request)
    back = rng.permutation(requests)[: max(int(HELD_BACK * len(requests)), 1)]
    held = np.isin(samples.request, back)
    token, history = _features(samples)
    mean, scale = _standard(token[samples.judged]), _standard(history)
    token, history = (token - mean[0]) / mean[1], (history - scale[0]) / scale[1]
    learn, check = (_flat(samples, token, history, keep) for keep in (~held, held))
    net = _Network(settings.hidden, settings.without)
    best = _descend(net, learn, check, settings)
    net.load_state_dict(best)
    return Predictor(_arrays(net, mean, scale, _features(samples)[1]), target=target, draft=draft)


def _descend(
    net: _Network, learn: tuple[torch.Tensor, ...], check: tuple[torch.Tensor, ...], settings: Fit
) -> dict[str, torch.Tensor]:
    """Adam until the held-back log-loss stops falling; the weights where it was least."""
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits
    adam = torch.optim.AdamW(net.parameters(), lr=settings.rate, weight_decay=settings.decay)
    steps = -(-len(learn[0]) // settings.batch)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings.epochs * steps)
    least, best, since = float("inf"), {k: v.clone() for k, v in net.state_dict().items()}, 0
    for _ in range(settings.epochs):
        order = torch.randperm(len(learn[0]))
        for start in range(0, len(order), settings.batch):
            chosen = order[start : start + settings.batch]
            *inputs, accepted = (part[chosen] for part in learn)
            loss = loss_of(net(*inputs), accepted)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            adam.step()
            fall.step()
        with torch.no_grad():
            now = float(loss_of(net(*check[:-1]), check[-1]))
        since += 1
        if now < least:
            least, best, since = now, {k: v.clone() for k, v in net.state_dict().items()}, 0
        if since >= settings.patience:
            break
    return best


def _features(samples: Samples) -> tuple[Floats, Floats]:
    """[M, K, G] of tokens and [M, H] of requests, as the runtime makes them."""
    clear = np.clip(samples.confidence, EDGE, 1.0 - EDGE)
    logs = np.concatenate([np.log(clear), np.log(1.0 - clear)], axis=1)
    return np.einsum("mi,gji->mjg", logs, basis(), optimize=True).astype(np.float32), samples.history


def _standard(features: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of columns; the latter 1 where a column is constant."""
    spread = features.std(axis=0)
    return features.mean(axis=0), np.where(spread > 1e-6, spread, 1.0).astype(np.float32)


def _flat(samples: Samples, token: Floats, history: Floats, keep: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Judged tokens of the samples where `keep`: features of the token, of its request, its place, its verdict."""
    sample, place = np.nonzero(samples.judged & keep[:, None])
    parts = token[sample, place], history[sample], place, samples.accepted[sample, place].astype(np.float32)
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in parts)


def _arrays(
    net: _Network, token: tuple[Floats, Floats], history: tuple[Floats, Floats], seen: Floats
) -> dict[str, Floats]:
    """The file's arrays: weights of raw features, a layout that needs neither means nor scales."""
    w = {name: value.detach().numpy().astype(np.float64) for name, value in net.state_dict().items()}
    if not net.places:
        w |= {name: np.repeat(w[name][:1], MAX_DEPTH, axis=0) for name in ("bias", "token_skip", "unit_bias")}
    for name, keep, scale in (("token", "keep_token", token[1]), ("history", "keep_history", history[1])):
        for kind in ("skip", "unit"):
            w[f"{name}_{kind}"] = w[f"{name}_{kind}"] * w[keep] / scale
    w["bias"] = w["bias"] - w["token_skip"] @ token[0] - history[0] @ w["history_skip"]
    w["unit_bias"] = w["unit_bias"] - w["token_unit"] @ token[0] - w["history_unit"] @ history[0]
    if not len(w["out"]):  # a file has a unit at least
        w |= {"unit_bias": np.zeros((MAX_DEPTH, 1)), "out": np.zeros(1)}
        w |= {"token_unit": np.zeros((1, len(TOKEN_FEATURES))), "history_unit": np.zeros((1, len(HISTORY_FEATURES)))}
    w |= {"history_low": seen.min(axis=0), "history_high": seen.max(axis=0)}
    return {k: np.asarray(v, np.float32) for k, v in w.items() if not k.startswith("keep_")}
