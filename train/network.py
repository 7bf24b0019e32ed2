"""The policy's network in torch: the trainable twin of `faser.policies.learned`, and its critic.

The decision here: the same parameters, by name and layout, as the policy file's arrays, so export is a copy and the two
forward passes can be compared line by line. Slots without a request take no part: they are left out of the means, and the
distribution gives them the action 0 with probability 1.

Symbols: B observations, S slots, F request features, L load features, K = MAX_DEPTH, W = MAX_FRONTIER, H hidden units.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from faser.core import LOAD_FEATURES, MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Floats
from faser.policies import learned
from faser.policies.policy_file import array_shapes

F, L = len(REQUEST_FEATURES), len(LOAD_FEATURES)


class Batch(NamedTuple):
    """Flat observations taken apart: requests [B, S, F], load [B, L], present [B, S]."""

    requests: Tensor
    load: Tensor
    present: Tensor

    @classmethod
    def of(cls, flat: Tensor) -> Batch:
        """From [B, S*F + L + S], the observation of `faser/Speculation-v0`."""
        slots = (flat.shape[1] - L) // (F + 1)
        requests, load, present = torch.tensor_split(flat, (slots * F, slots * F + L), dim=1)
        return cls(requests.reshape(-1, slots, F), load, present)

    def mean(self, rows: Tensor) -> Tensor:
        """[B, X] mean of rows [B, S, X] over present slots; 0 without any."""
        count = self.present.sum(1, keepdim=True).clamp(min=1.0)
        return (rows * self.present.unsqueeze(-1)).sum(1) / count


class Logits(NamedTuple):
    """lengths [B, S, K+1], depth [B, K+1], frontier [B, W+1]; what is not allowed is `learned.NEVER`."""

    lengths: Tensor
    depth: Tensor
    frontier: Tensor


def _initial(name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Hidden layers: uniform in +-1/sqrt(inputs). What feeds a logit: 0, so that the network starts as the rule."""
    if name.startswith(("length", "depth", "frontier")) or len(shape) == 1:
        return torch.zeros(shape)
    bound = shape[0] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=rng)


class Actor(nn.Module):
    """Logits of the policy. Parameters are `array_shapes(hidden)`; the equations are in `faser.policies.learned`."""

    def __init__(self, *, hidden: int, sharpness: float, max_depth: int, max_frontier: int, seed: int = 0) -> None:
        """`sharpness`: how many nats one whole expected token is worth to the untrained network, the rule."""
        super().__init__()
        self.max_depth, self.max_frontier = max_depth, max_frontier
        rng = torch.Generator().manual_seed(seed)
        for name, shape in array_shapes(hidden).items():
            self.register_parameter(name, nn.Parameter(_initial(name, shape, rng)))
        skip, load = learned.rule_skip(sharpness)
        with torch.no_grad():
            self.length_skip.copy_(torch.from_numpy(skip))
            self.length_load.copy_(torch.from_numpy(load))
            self.depth_prior.fill_(sharpness)
        lengths, frontiers = torch.arange(MAX_DEPTH + 1), torch.arange(MAX_FRONTIER + 1)
        never = float(learned.NEVER)
        self.register_buffer("length_mask", (lengths > lengths[:, None]) * never, persistent=False)
        self.register_buffer("depth_mask", (lengths > max_depth) * never, persistent=False)
        self.register_buffer("frontier_mask", (frontiers > max_frontier) * never, persistent=False)
        self.register_buffer("ramp", torch.from_numpy(learned.RAMP), persistent=False)

    length_skip: Tensor
    length_load: Tensor
    depth_prior: Tensor

    def forward(self, batch: Batch) -> Logits:
        x, load = batch.requests, batch.load
        p = dict(self.named_parameters())
        h1 = (x @ p["request_weight"] + (load @ p["request_load"] + p["request_bias"]).unsqueeze(1)).relu()
        context = batch.mean(h1) @ p["mix_context"] + p["mix_bias"]
        h2 = (h1 @ p["mix_weight"] + context.unsqueeze(1)).relu()
        drafted = (x[..., learned.DRAFTED] * MAX_DEPTH + 0.5).long()
        lengths = h2 @ p["length_weight"] + x @ p["length_skip"]
        lengths = lengths + (load @ p["length_load"] + p["length_bias"]).unsqueeze(1)
        mean = batch.mean(x)
        z = batch.mean(h2) @ p["batch_weight"] + mean @ p["batch_mean"] + load @ p["batch_load"]
        z = (z + p["batch_bias"]).relu()
        depth = z @ p["depth_weight"] + p["depth_bias"] + self._depth_prior(mean, load)
        frontier = z @ p["frontier_weight"] + p["frontier_bias"]
        return Logits(
            lengths + self.get_buffer("length_mask")[drafted],
            depth + self.get_buffer("depth_mask"),
            frontier + self.get_buffer("frontier_mask"),
        )

    def _depth_prior(self, mean: Tensor, load: Tensor) -> Tensor:
        """[B, K+1]: `LearnedPolicy.depth_values` times the trained `depth_prior`, 0 for depth 0."""
        first, full, draft = (load[:, i, None] for i in (learned.VERIFY, learned.VERIFY_FULL, learned.DRAFT))
        survival = mean[:, learned.ACCEPTANCE, None] ** torch.arange(1, MAX_DEPTH + 1)
        gain = (survival - (first + (full - first) * self.get_buffer("ramp"))).clamp(min=0) - draft
        return nn.functional.pad(gain.cumsum(1) * self.depth_prior, (1, 0))

    def arrays(self) -> dict[str, Floats]:
        """The parameters as the policy file's arrays (copies)."""
        return {name: p.detach().numpy().astype(np.float32, copy=True) for name, p in self.named_parameters()}


class Critic(nn.Module):
    """Value [B, 1] of an observation, by its own encoder: sharing one made the value loss steer the policy."""

    def __init__(self, *, hidden: int) -> None:
        super().__init__()
        self.request = nn.Linear(F, hidden)
        self.head = nn.Sequential(
            nn.Linear(hidden + F + L, 2 * hidden),
            nn.ReLU(),
            nn.Linear(2 * hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, batch: Batch) -> Tensor:
        rows = self.request(batch.requests).relu()
        pooled = torch.cat([batch.mean(rows), batch.mean(batch.requests), batch.load], dim=1)
        value: Tensor = self.head(pooled)
        return value
