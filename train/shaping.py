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
from numpy.typing import NDArray

from faser.core import MAX_DEPTH
from faser.costs import StepCost
from faser.envs.advance import Advance, Doubles
from faser.envs.rewards import Without


@dataclass(frozen=True, kw_only=True)
class TokenPaid:
    """(price x tokens - seconds of the step without its prompts) x requests in the system.

    Seconds are counted in idle steps, of one row, and requests over their mean without speculation, which brings the
    reward to the order of 1 on every device and at every load. cost, acceptance: of the pair; they set the price.
    """

    cost: StepCost
    acceptance: float

    def price_s(self, running: NDArray[np.int64], context: Doubles | float = 0.0) -> Doubles:
        """[E] seconds per token of the fixed depth that is best for `running` [E] requests, with no prompt computed.

        Prompts have no part in it: they make their step longer, and what a token is worth there no higher. Reading the
        requests' context has: `context` [E] tokens.
        """
        depth, batch = np.arange(MAX_DEPTH + 1), running[:, None]
        ms = self.cost.ms(rows=batch * (1 + depth), batch=batch, depth=depth, context=np.reshape(context, (-1, 1)))
        best: Doubles = (ms / (self.acceptance**depth).cumsum()).min(axis=1)
        price: Doubles = best / np.maximum(running, 1) / 1e3
        return price

    def __call__(self, advance: Advance, without: Without) -> Doubles:
        running = np.diff(advance.starts)
        rows = running + np.bincount(advance.owner, advance.verified, len(running)) + advance.prefill_tokens
        prompts_ms = self.cost.verify(running + advance.prefill_tokens) - self.cost.verify(running)
        asked = {"rows": rows, "batch": advance.batch, "depth": advance.depth, "prefill": advance.prefill_tokens}
        rest_ms = self.cost.ms(**asked)
        token_ms = self.cost.ms(**asked, context=1) - rest_ms  # 0 if context costs nothing
        context = np.maximum(advance.seconds * 1e3 - rest_ms, 0.0) / np.where(token_ms > 0, token_ms, np.inf)
        merit = self.price_s(running, context) * advance.tokens - (advance.seconds - prompts_ms / 1e3)
        idle_step_s = self.cost.step_ms(rows=1, batch=1) / 1e3
        requests = advance.system_s / np.maximum(advance.seconds, 1e-9)
        return np.where(running > 0, merit / idle_step_s * requests * without.busy_s / without.system_s, 0.0)
