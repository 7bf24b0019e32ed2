"""What a training run shows and keeps while it runs: TensorBoard scalars, evaluations, a progress bar, Ctrl-C.

The decision: each concern is a callback of its own, and all talk through stable-baselines3's logger, so that one step
counter and one event file serve them all, across a resume too.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from tqdm import tqdm

from faser.core import MAX_DEPTH, Floats
from faser.train.evaluation import Scores, mean

BANDS = {"low": (0.0, 0.4), "middle": (0.4, 0.8), "high": (0.8, np.inf)}
"""Offered load of an episode over the capacity without speculation."""


class Metrics(BaseCallback):
    """`faser/` scalars of each rollout: what the policy chose, and how fast the engine was."""

    def _on_training_start(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.lengths = np.zeros(MAX_DEPTH + 1, np.int64)
        self.steps = self.depth = self.tokens = 0
        self.milliseconds = self.reward = 0.0

    def _on_step(self) -> bool:
        self.reward += float(self.locals["rewards"].sum())
        for info in self.locals["infos"]:
            self.steps += 1
            self.lengths += info["lengths"]
            self.depth += info["depth"]
            self.tokens += info["tokens"]
            self.milliseconds += info["step_ms"]
            if "episode_summary" in info:
                self._episode(info["load"], info["episode_summary"]["ratio_to_none"])
        return True

    def _episode(self, load: float, ratio: float) -> None:
        band = next(name for name, (low, high) in BANDS.items() if low <= load < high)
        self.logger.record_mean(f"faser/time_in_system_to_none_load_{band}", ratio)

    def _on_rollout_end(self) -> None:
        record, steps = self.logger.record, max(self.steps, 1)
        chosen = max(int(self.lengths.sum()), 1)
        record("rollout/reward_per_step", self.reward / steps)
        record("faser/mean_length", float(np.arange(MAX_DEPTH + 1) @ self.lengths) / chosen)
        record("faser/depth", self.depth / steps)
        record("faser/step_ms", self.milliseconds / steps)
        record("faser/tokens_per_s", self.tokens / max(self.milliseconds, 1e-9) * 1e3)
        # TensorBoard wants samples: a thousand in the measured proportions say as much as all of them
        shown = torch.repeat_interleave(torch.arange(MAX_DEPTH + 1), torch.from_numpy(self.lengths * 1000 // chosen))
        if len(shown):
            record("faser/lengths", shown, exclude=("stdout", "csv", "json", "log"))
        self._clear()


class Evaluations(BaseCallback):
    """Scores the weights every `every` steps, keeps the best, and hands each new best to `on_best`.

    The first evaluation is of the untrained network: the rule that training starts from.
    """

    def __init__(
        self,
        score: Callable[[dict[str, Floats]], Scores],
        on_best: Callable[[dict[str, Floats], int], None],
        *,
        every: int,
        state: dict[str, Any],
    ) -> None:
        """`state`: {} for a new run; of a resumed one, what `state` was when it stopped."""
        super().__init__()
        self.score, self.on_best, self.every = score, on_best, every
        self.state = state or {"next": 0, "best": float("inf"), "start": float("nan"), "last": float("nan")}

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.state["next"]:
            self.evaluate()
            self.state["next"] = self.num_timesteps + self.every

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self.evaluate()

    def evaluate(self) -> None:
        """Score the present weights and record the result at the present step."""
        arrays = self.model.policy.get_submodule("actor").arrays()  # type: ignore[operator]  # Module.__getattr__
        scores, state = self.score(arrays), self.state
        state["last"] = mean(scores)
        if not self.num_timesteps:
            state["start"] = state["last"]
        if state["last"] < state["best"]:
            state["best"] = state["last"]
            self.on_best(arrays, self.num_timesteps)
        for name in ("last", "best", "start"):
            self.logger.record(f"eval/time_in_system_to_none{'' if name == 'last' else '_' + name}", state[name])
        for load in sorted({load for _, load in scores}):
            at = fmean(v for (_, other), v in scores.items() if other == load)
            self.logger.record(f"eval/time_in_system_to_none_load_{load:g}", at)


class Progress(BaseCallback):
    """A bar of steps, with the evaluations beside it."""

    def __init__(self, evaluations: Evaluations, total: int) -> None:
        super().__init__()
        self.evaluations, self.total = evaluations, total

    def _on_training_start(self) -> None:
        # in a log file a bar is one line every half minute
        interval = 0.2 if sys.stderr.isatty() else 30.0
        self.bar = tqdm(
            total=self.total, initial=self.num_timesteps, unit=" steps", dynamic_ncols=True, mininterval=interval
        )

    def _on_step(self) -> bool:
        self.bar.update(self.num_timesteps - self.bar.n)
        return True

    def _on_rollout_end(self) -> None:
        state = self.evaluations.state
        text = f"time in system, none = 1: rule {state['start']:.3f}, now {state['last']:.3f}, best {state['best']:.3f}"
        self.bar.set_description(text, refresh=False)

    def _on_training_end(self) -> None:
        self.bar.close()


class StopOnInterrupt(BaseCallback):
    """The first Ctrl-C ends training after the present step; the second ends the process."""

    stopped = False

    def __enter__(self) -> StopOnInterrupt:
        self.before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def _stop(self, *_: object) -> None:
        self.stopped = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        tqdm.write("stopping and saving; Ctrl-C again stops at once, without saving")

    def _on_step(self) -> bool:
        return not self.stopped
