"""What training does unless told otherwise: one preset per model, one set of PPO settings for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from faser.costs import load_profile


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How requests reach a model's engine in training and evaluation.

    slots: requests that run at once. load: (lowest, highest) offered load over the capacity without speculation.
    evaluated_loads: each is one row of the evaluation. least_requests: of an episode.
    """

    slots: int = 128
    load: tuple[float, float] = (0.1, 1.3)
    evaluated_loads: tuple[float, ...] = (0.1, 0.3, 0.6, 0.9, 1.2)
    least_requests: int = 64

    def requests(self, load: float) -> int:
        """Requests of an episode at `load`: enough to fill the slots when they can be filled, few when they cannot."""
        return max(self.least_requests, int(3 * self.slots * load))

    def band(self, i: int, n: int) -> tuple[float, float]:
        """The i-th of `n` equal parts of `load`."""
        low, width = self.load[0], (self.load[1] - self.load[0]) / n
        return low + i * width, low + (i + 1) * width


PRESETS: dict[str, Preset] = {
    "smollm2": Preset(slots=32),  # a CPU's worth
    "llama2-13b": Preset(),
    "mistral-7b": Preset(),
}


def preset(model: str) -> Preset:
    """That of a model; of a PROFILE,TAPE the default one, with no more slots than the profile was measured with.

    ValueError: no such profile.
    """
    if model in PRESETS:
        return PRESETS[model]
    cost, own = load_profile(model.partition(",")[0]), Preset()
    measured = int(max(cost.draft.x[-1], cost.request.x[-1]))  # 1: the profile does not say
    return replace(own, slots=min(measured, own.slots)) if measured > 1 else own


@dataclass(frozen=True, kw_only=True)
class Settings:
    """PPO and network settings."""

    timesteps: int = 400_000
    envs: int = 32
    rollout_steps: int = 256
    batch_size: int = 2048
    epochs: int = 4
    learning_rate: float = 3e-4  # falls linearly to a tenth
    gamma: float = 0.97  # what is drafted in one step is paid in the next
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy: float = 0.0
    target_kl: float | None = 0.1  # of the joint action: a hundred requests move together
    hidden: int = 32
    sharpness: float = 12.0  # see `Actor`
    depth_sharpness: float = 100.0  # see `Actor`
    slot_power: float = 0.0  # see `SlotDistribution.log_prob`
    evaluations: int = 10  # spread evenly over the run, besides the first
    evaluation_seeds: int = 2  # arrivals per load and model
