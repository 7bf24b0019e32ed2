"""The network as a stable-baselines3 policy: PPO's log-probabilities and entropies over a changing set of requests.

A step has up to S + 2 choices at once. PPO clips the ratio of the joint probability, so the decision here is how to add
up the slots' log-probabilities: see `SlotDistribution.log_prob`.
"""

from __future__ import annotations

from typing import Any, Self

import gymnasium
import torch
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from faser.train.network import Actor, Batch, Critic, Logits


class SlotDistribution(Distribution):
    """Independent choices: a length for each present request, one depth, one frontier. Actions are [B, S + 2]."""

    def __init__(self, logits: Logits, batch: Batch, *, slot_power: float) -> None:
        """`slot_power`: see `log_prob`."""
        self.proba_distribution(logits, batch, slot_power)

    def proba_distribution_net(self, *_: Any, **__: Any) -> torch.nn.Module:
        raise NotImplementedError("the network is `faser.train.network.Actor`")  # abstract; we replace its caller

    def proba_distribution(self, logits: Logits, batch: Batch, slot_power: float) -> Self:
        """Take over `logits` of `batch`."""
        self.batch, self.slot_power = batch, slot_power
        self.choices = Logits(*(head.log_softmax(-1) for head in logits))
        return self

    def log_prob(self, actions: Tensor) -> Tensor:
        """[B] log-probability of depth and frontier plus N^-slot_power times the sum over the N present requests.

        With slot_power 0 this is the joint one. Its ratio moves more the more requests there are, so PPO's clip could
        stop large batches first; 1/2 evens that out. Measured, it matters little while `target_kl` is loose (150,000
        steps, one seed: 0.693 and 0.693, from 0.698), so the plain joint one is kept.
        """
        taken = actions.long()
        batch, slots = self.batch, self.batch.slots
        lengths = _of(self.choices.lengths, taken[batch.owner, batch.slot])
        weighted = batch.sum(lengths) * batch.count.squeeze(1) ** -self.slot_power
        return _of(self.choices.depth, taken[:, slots]) + _of(self.choices.frontier, taken[:, slots + 1]) + weighted

    def entropy(self) -> Tensor:
        """[B] mean entropy of the present requests' lengths, plus that of depth and frontier."""
        lengths, depth, frontier = (-(head.exp() * head).sum(-1) for head in self.choices)
        return self.batch.sum(lengths) / self.batch.count.squeeze(1) + depth + frontier

    def sample(self) -> Tensor:
        # argmax of log-probability plus Gumbel noise is a sample; it is one pass, where multinomial is one per row
        return self._pick([head - torch.empty_like(head).exponential_().log() for head in self.choices])

    def mode(self) -> Tensor:
        return self._pick(list(self.choices))

    def _pick(self, heads: list[Tensor]) -> Tensor:
        lengths, depth, frontier = (head.argmax(-1) for head in heads)
        actions = lengths.new_zeros((len(depth), self.batch.slots + 2))
        actions[self.batch.owner, self.batch.slot] = lengths
        actions[:, -2], actions[:, -1] = depth, frontier
        return actions

    def actions_from_params(self, logits: Logits, batch: Batch, deterministic: bool = False) -> Tensor:
        return self.proba_distribution(logits, batch, self.slot_power).get_actions(deterministic=deterministic)

    def log_prob_from_params(self, logits: Logits, batch: Batch) -> tuple[Tensor, Tensor]:
        actions = self.actions_from_params(logits, batch)
        return actions, self.log_prob(actions)


def _of(choices: Tensor, index: Tensor) -> Tensor:
    """[X] the entry of choices [X, C] at index [X]."""
    return choices.gather(-1, index.unsqueeze(-1)).squeeze(-1)


class SlotPolicy(ActorCriticPolicy):
    """Actor and critic over flat observations of `faser/Speculation-v0`; the features extractor is the identity."""

    def __init__(
        self,
        observation_space: gymnasium.spaces.Space[Any],
        action_space: gymnasium.spaces.Space[Any],
        lr_schedule: Schedule,
        *,
        actor: dict[str, Any],
        slot_power: float,
        **kwargs: Any,
    ) -> None:
        """`actor`: arguments of `Actor`; `slot_power`: see `SlotDistribution`; the rest: the base class's."""
        self.actor_arguments, self.slot_power = actor, slot_power
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        self.actor = Actor(**self.actor_arguments)
        self.critic = Critic(hidden=self.actor_arguments["hidden"])
        self.optimizer = torch.optim.Adam(self.parameters(), lr=lr_schedule(1), eps=1e-5)

    def _distribution(self, batch: Batch) -> SlotDistribution:
        return SlotDistribution(self.actor(batch), batch, slot_power=self.slot_power)

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        batch = Batch.of(obs)
        distribution = self._distribution(batch)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.critic(batch), distribution.log_prob(actions)

    def evaluate_actions(self, obs: PyTorchObs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        assert isinstance(obs, Tensor)
        batch = Batch.of(obs)
        distribution = self._distribution(batch)
        return self.critic(batch), distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: PyTorchObs) -> SlotDistribution:
        assert isinstance(obs, Tensor)
        return self._distribution(Batch.of(obs))

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        assert isinstance(obs, Tensor)
        value: Tensor = self.critic(Batch.of(obs))
        return value
