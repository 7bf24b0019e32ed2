"""vLLM's asynchronous scheduling with a policy in it: a step is sent to the device before the one before it is over.

The tokens that a step verifies are then known to the device alone; here they are placeholders, and a length is how many
of them a request keeps. What such a decision cannot know is the step under way: its verdicts, and the confidences of
the very drafts that it is about. So where these may save more than the pause that the device makes meanwhile, the
engine settles: it takes the output of the step under way before it schedules the next one, and the decision knows what
it knows in `FaserScheduler`. Outputs are the target's either way, as lengths depend on the past alone.

vLLM's worker takes a request's counts for those of a scheduler that has not heard of the last step, as if all its
drafts were accepted, and corrects them itself. After settling they are told it in that way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from faser.core import MAX_DEPTH
from faser.serving import compat
from faser.serving.scheduler import WithPolicy

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step under way. decoding: ids of those past their prompt; requests: in it; depth: tokens drafted for each."""

    decoding: frozenset[str]
    requests: int
    depth: int


class AsyncFaserScheduler(WithPolicy, AsyncScheduler):
    """Two steps at a time. ValueError: vLLM was not told to schedule asynchronously."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            raise ValueError("async_scheduling is False; AsyncFaserScheduler needs True")
        self._flying: deque[_Flight] = deque()  # oldest first
        self._rejected: dict[str, int] = {}  # drafts of the step just settled, by request
        self._depth = 0
        settle_first()

    def settles_first(self) -> bool:
        """Whether the engine should take the output of the step under way before it schedules the next one.

        Not where a grammar has yet to see a token: vLLM then puts off sampling until it has. Nor near a model's full
        length, past which counts may not go that are told as if all drafts were accepted.
        """
        flight = self._flying[-1]
        prompts = compat.prefill_tokens(self, flight.requests) if flight.depth else 0
        if not self.faser.waits(flight.requests, flight.depth, prompts):
            return False
        return not (self._near_the_end() or any(r.use_structured_output for r in self.running))

    def _near_the_end(self) -> bool:
        """Whether a request comes so close to the model's full length that vLLM makes up the drafts of all."""
        most = self.max_model_len - 2 - MAX_DEPTH
        return any(r.num_computed_tokens > most for r in self.running)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        requests, made_up = compat.decoding(self), self._near_the_end()
        for request in requests:  # a list of its own: vLLM's is shared by all
            request.spec_token_ids = [] if made_up else [-1] * self._drafted(request)
        decision = self._decide(requests)
        self._depth = decision.draft_depth
        scheduled: SchedulerOutput = super().schedule(*args, **kwargs)
        compat.add_rejected(scheduled, self._rejected)
        self._rejected = {}
        decoding = frozenset(r.request_id for r in requests)
        self._flying.append(_Flight(decoding, len(scheduled.num_scheduled_tokens), self._depth))
        return scheduled

    def _drafted(self, request: Any) -> int:
        """How many drafts the device has for it: none if it was not in the last step, none beyond its arm's depth."""
        if request.request_id not in self.prev_step_scheduled_req_ids:
            return 0
        drafted = len(request.spec_token_ids)
        own = None if self.arms is None else self.arms.depth_of(request.request_id)
        return drafted if own is None else min(drafted, own)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        scheduler_output.num_spec_tokens_to_schedule = self._depth  # as many placeholders does vLLM make
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        flight = self._flying.popleft()
        verdicts = compat.verdicts(scheduler_output, model_runner_output)
        self.faser.record(verdicts, prefill_tokens=compat.prefilled(scheduler_output, flight.decoding))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if not self._flying:
            self._rejected = {r: verified - accepted for r, (verified, accepted) in verdicts.items()}
        self.faser.wrote(compat.written(outputs))
        if flight.depth:
            self._note_drafts(model_runner_output, flight.depth)
        return outputs

    def _note_drafts(self, output: ModelRunnerOutput, depth: int) -> None:
        """Tell the loop what was drafted at the end of a step, for those that go on."""
        wrote = [(i, self.requests.get(r)) for i, r in enumerate(output.req_ids) if output.sampled_token_ids[i]]
        live = [(i, r) for i, r in wrote if r is not None and r.status is RequestStatus.RUNNING]
        confidence = getattr(output, "faser_confidence", None)
        if confidence is None:  # the drafter did not run (a request at the model's full length)
            confidence = np.zeros((len(output.req_ids), 0), np.float32)
        rows = compat.rows([r for _, r in live])
        self.faser.draft(rows._replace(drafted=[depth] * len(live)), confidence[[i for i, _ in live]])


def settle_first() -> None:
    """Have engines of this process ask their scheduler, with a step under way, whether to settle first."""
    own = EngineCore.step_with_batch_queue
    if hasattr(own, "faser"):
        return

    def step(self: Any) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        scheduler = self.scheduler
        if not (self.batch_queue and isinstance(scheduler, AsyncFaserScheduler) and scheduler.settles_first()):
            return own(self)
        future, scheduled, executed = self.batch_queue.pop()
        with self.capture_iteration_details(scheduled) as details, self.log_error_detail(scheduled):
            output = future.result()
            if output is None:
                executed.result()  # raises what went wrong
                raise RuntimeError("a step came to nothing")
        self._process_aborts_queue()
        settled = scheduler.update_from_output(scheduled, output)
        self._attach_iteration_details(settled, details)
        self._attach_weight_version(settled)
        outputs, ran = own(self)  # the queue is empty: what it starts it does not wait for, unless that is nothing
        for client, more in (outputs or {}).items():
            compat.merge(settled, client, more)
        return settled, ran

    step.faser = True  # type: ignore[attr-defined]
    EngineCore.step_with_batch_queue = step  # type: ignore[method-assign]
