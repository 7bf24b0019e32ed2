"""The policy's network in torch: the trainable twin of `faser.policies.learned`, and its critic.

Two decisions. The parameters are, by name and layout, the policy file's arrays, so export is a copy and the two
forward passes can be compared line by line. And only slots that hold a request are computed: a batch is one long list
of requests with the observation that each belongs to, so a step of 3 requests costs 3 rows and not S.

Symbols: B observations, S slots, M requests present in all of them, F request and L load features, K = MAX_DEPTH,
W = MAX_FRONTIER, H hidden units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from faser.core import LOAD_FEATURES, MAX_DEPTH, MAX_FRONTIER, REQUEST_FEATURES, Floats
from faser.policies import learned
from faser.policies.policy_file import array_shapes

F, L = len(REQUEST_FEATURES), len(LOAD_FEATURES)


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat observations taken apart.

    requests [M, F]; owner [M], the observation of each; slot [M], its slot there; load [B, L]; count [B, 1], requests
    of each observation, at least 1; slots: S.
    """

    requests: Tensor
    owner: Tensor
    slot: Tensor
    load: Tensor
    count: Tensor
    slots: int

    @classmethod
    def of(cls, flat: Tensor) -> Batch:
        """From [B, S*F + L + S], observations of `faser/Speculation-v0`."""
        slots = (flat.shape[1] - L) // (F + 1)
        present = flat[:, slots * F + L :]
        owner, slot = present.nonzero(as_tuple=True)
        requests = flat[:, : slots * F].reshape(-1, slots, F)[owner, slot]
        count = present.sum(1, keepdim=True).clamp(min=1.0)
        return cls(requests, owner, slot, flat[:, slots * F : slots * F + L], count, slots)

    def sum(self, rows: Tensor) -> Tensor:
        """[B, ...] sums of rows [M, ...] by observation."""
        return rows.new_zeros((len(self.load), *rows.shape[1:])).index_add(0, self.owner, rows)

    def mean(self, rows: Tensor) -> Tensor:
        """[B, X] means of rows [M, X] by observation; 0 without any."""
        return self.sum(rows) / self.count


class Logits(NamedTuple):
    """lengths [M, K+1], depth [B, K+1], frontier [B, W+1]; what is not allowed is `learned.NEVER`."""

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

    def __init__(
        self,
        *,
        hidden: int,
        sharpness: float,
        depth_sharpness: float,
        max_depth: int,
        max_frontier: int,
        seed: int = 0,
    ) -> None:
        """sharpness, depth_sharpness: how many nats one whole expected token, and all of a depth's value, are worth to
        the untrained network, the rule.
        """
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        for name, shape in array_shapes(hidden).items():
            self.register_parameter(name, nn.Parameter(_initial(name, shape, rng)))
        with torch.no_grad():
            for name, array in learned.rule(sharpness, depth_sharpness).items():
                self.get_parameter(name).copy_(torch.from_numpy(array))
        lengths, frontiers = torch.arange(MAX_DEPTH + 1), torch.arange(MAX_FRONTIER + 1)
        never = float(learned.NEVER)
        self.register_buffer("length_mask", (lengths > lengths[:, None]) * never, persistent=False)
        self.register_buffer("depth_mask", (lengths > max_depth) * never, persistent=False)
        self.register_buffer("frontier_mask", (frontiers > max_frontier) * never, persistent=False)

    def forward(self, batch: Batch) -> Logits:
        x, load, owner = batch.requests, batch.load, batch.owner
        p = dict(self.named_parameters())
        h1 = (x @ p["request_weight"] + (load @ p["request_load"] + p["request_bias"])[owner]).relu()
        context = batch.mean(h1) @ p["mix_context"] + p["mix_bias"]
        h2 = (h1 @ p["mix_weight"] + context[owner]).relu()
        drafted = (x[:, learned.DRAFTED] * MAX_DEPTH + 0.5).long()
        lengths = h2 @ p["length_weight"] + x @ p["length_skip"]
        lengths = lengths + (load @ p["length_load"] + p["length_bias"])[owner]
        mean = batch.mean(x)
        z = batch.mean(h2) @ p["batch_weight"] + mean @ p["batch_mean"] + load @ p["batch_load"]
        z = (z + p["batch_bias"]).relu()
        depth = z @ p["depth_weight"] + load @ p["depth_load"] + p["depth_bias"]
        return Logits(
            lengths + self.get_buffer("length_mask")[drafted],
            depth + self.get_buffer("depth_mask"),
            z @ p["frontier_weight"] + p["frontier_bias"] + self.get_buffer("frontier_mask"),
        )

    def arrays(self) -> dict[str, Floats]:
        """The parameters as the policy file's arrays (copies)."""
        return {name: p.detach().numpy().astype(np.float32, copy=True) for name, p in self.named_parameters()}


class Critic(nn.Module):
    """Value [B, 1] of an observation. Its own encoder: the value loss must not steer the policy's features."""

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
