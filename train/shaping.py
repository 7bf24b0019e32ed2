"""The reward that PPO is trained on: time in system, told when it is earned and not when a request ends.

A token accepted now shortens its request, which shows in the time in system only at the request's end, hundreds of
steps and many arrivals later. But the tokens of an episode are given, so paying the same for each adds nothing to
choose between policies. One pay for all loads left so much noise that PPO learnt nothing in 200,000 steps; paying the
going price, what a token costs a good fixed depth at this batch, leaves the reward near 0 at every load and makes a
step's reward its own merit. Evaluation never uses this reward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from faser.core import MAX_DEPTH
from faser.costs import StepCost
from faser.envs.simulator import Step
from faser.envs.summary import Baseline


@dataclass(frozen=True, kw_only=True)
class TokenPaid:
    """(price x tokens - seconds of the step without its prompts) x requests in the system.

    Seconds are counted in idle steps, of one row, and requests over their mean without speculation, which brings the
    reward to the order of 1 on every device and at every load. cost, acceptance: of the pair; they set the price.
    """

    cost: StepCost
    acceptance: float

    def price_s(self, running: int, context_ms: float = 0.0) -> float:
        """Seconds per token of the fixed depth that is best for `running` requests, while no prompt is computed.

        Prompts have no part in it: they make their step longer, and what a token is worth there no higher. Reading the
        requests' context has: `context_ms` of every step.
        """
        depth = np.arange(MAX_DEPTH + 1)
        rows = running * (1 + depth)
        ms = self.cost.ms(rows=rows, batch=running, depth=depth) + context_ms
        return float((ms / (self.acceptance**depth).cumsum()).min()) / running / 1e3

    def __call__(self, step: Step, baseline: Baseline) -> float:
        outcome = step.outcome
        running = len(outcome.verified)
        if not running:
            return 0.0
        prompts_ms = self._verify_ms(running + outcome.prefill_tokens) - self._verify_ms(running)
        rows = running + int(outcome.verified.sum()) + outcome.prefill_tokens
        rest_ms = self.cost.step_ms(rows=rows, batch=running, depth=outcome.draft_depth)
        context_ms = max(outcome.seconds * 1e3 - rest_ms, 0.0)
        merit = self.price_s(running, context_ms) * step.tokens - (outcome.seconds - prompts_ms / 1e3)
        idle_step_s = self.cost.step_ms(rows=1, batch=1) / 1e3
        requests = step.system_s / outcome.seconds
        return merit / idle_step_s * requests * baseline.busy_s / baseline.system_s

    def _verify_ms(self, rows: int) -> float:
        return self.cost.step_ms(rows=rows, batch=rows)
