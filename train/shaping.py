"""The reward that PPO is trained on: time in system, told when it is earned and not when a request ends.

A token accepted now shortens its request, which shows in the time in system only at the request's end, hundreds of
steps and many arrivals later. So a step is paid at once for the steps that it saves: how many more a request would need
at a fixed depth, from where it was and from where it is now, is on the tape. At one depth these add up to the same over
a request, whatever is decided; what they are worth in seconds changes with who else runs, so this is a baseline that
leaves the reward near 0 at every load, and no exact potential (Ng, Harada and Russell, 1999). Evaluation never uses it.

One price for all tokens, as was paid before, overpays requests whose drafts are mostly accepted: of their steps a token
is a smaller part. Trained so, PPO drafted ever deeper, and time in system rose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, Ints
from faser.costs import StepCost
from faser.envs.advance import Advance, Doubles
from faser.envs.rewards import Without
from faser.policies.schedule import geometric
from faser.tapes import Tape


@dataclass(frozen=True, kw_only=True)
class StepsSaved:
    """(seconds of the fixed depth's steps that its decoding requests were saved, on average - seconds of the step
    without its prompts) x requests in the system; 0 where nothing decodes.

    A first token, which its prompt's step writes, is not paid, nor the one of a preempted request's second reading.
    The fixed depth is the one that is best for so many requests. Seconds are counted in idle steps, of one row, and
    requests over their mean without speculation, which brings the reward to the order of 1 on every device and at every
    load. cost, tape: those of the environment, which prunes nothing and has no frontiers.
    """

    cost: StepCost
    tape: Tape

    @cached_property
    def _emitted(self) -> Doubles:
        """[K + 1] tokens of a step by fixed depth, on average."""
        return geometric(float(self.tape.match.mean()))

    def best_fixed(self, running: NDArray[np.int64], context: Doubles | float = 0.0) -> tuple[Ints, Doubles]:
        """[E] the fixed depth that is best for `running` [E] requests with `context` [E] tokens in all, and seconds of
        its step.

        Prompts have no part in it: they make their step longer, and what a token is worth there no higher. Reading the
        requests' context has.
        """
        depth, batch = np.arange(MAX_DEPTH + 1), running[:, None]
        ms = self.cost.ms(rows=batch * (1 + depth), batch=batch, depth=depth, context=np.reshape(context, (-1, 1)))
        best = (ms / self._emitted).argmin(axis=1)
        return best, ms[np.arange(len(best)), best] / 1e3

    def __call__(self, advance: Advance, without: Without) -> Doubles:
        running = np.diff(advance.starts)
        rows = running + np.bincount(advance.owner, advance.verified, len(running)) + advance.prefill_tokens
        prompts_ms = self.cost.verify(running + advance.prefill_tokens) - self.cost.verify(running)
        asked = {"rows": rows, "batch": advance.batch, "depth": advance.depth, "prefill": advance.prefill_tokens}
        rest_ms = self.cost.ms(**asked)
        token_ms = self.cost.ms(**asked, context=1) - rest_ms  # 0 if context costs nothing
        context = np.maximum(advance.seconds * 1e3 - rest_ms, 0.0) / np.where(token_ms > 0, token_ms, np.inf)
        depth, step_s = self.best_fixed(running, context)
        saved = np.bincount(advance.owner, self.saved(advance, depth[advance.owner]), len(running))
        merit = step_s * saved / np.maximum(running, 1) - (advance.seconds - prompts_ms / 1e3)
        idle_step_s = self.cost.step_ms(rows=1, batch=1) / 1e3
        requests = advance.system_s / np.maximum(advance.seconds, 1e-9)
        return np.where(running > 0, merit / idle_step_s * requests * without.busy_s / without.system_s, 0.0)

    def saved(self, advance: Advance, depth: Ints) -> Ints:
        """[M] steps of `depth` [M] that each request has fewer left than before. ValueError: not simulated."""
        if advance.places is None:
            raise ValueError("a live engine's step has no places on a tape")
        before, after = advance.places
        end = self.tape.ends[before]
        left = np.where(after < end, self.tape.steps_left[depth, np.minimum(after, end - 1)], 0)
        saved: Ints = self.tape.steps_left[depth, before] - left
        return saved
