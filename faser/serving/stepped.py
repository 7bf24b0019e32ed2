"""The engine's process of `StepwiseEngine`: an `OfflineEngine` that asks the other side for every decision.

    python -m faser.serving.stepped FD

One decision: vLLM's engine core runs in this very process, so its scheduler can wait for an answer in the middle of a
step. What a policy sees is made where a server makes it. It ends when the other side is gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np

from faser.controller import Controller
from faser.core import Capabilities, Decision, Observation, checked
from faser.policies.static import Static
from faser.serving import compat
from faser.serving.offline import OfflineEngine
from faser.serving.scheduler import FaserScheduler
from faser.serving.stepwise import Asked, Done, Plan, Seen

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

SCHEDULER = "faser.serving.stepped.SteppedScheduler"


class AskedController(Controller):
    """Its policy is on the other side of `connection`, and has all the time that it wants."""

    def __init__(self, connection: Connection, scheduler: FaserScheduler) -> None:
        super().__init__(Static(0), Capabilities(max_depth=scheduler.num_spec_tokens), name="external")
        self._connection, self._scheduler = connection, scheduler
        self.rows: list[str] = []

    def decide(self, observation: Observation, _requests: Sequence[str] = ()) -> Decision:
        """As the other side says."""
        self.rows = [request.request_id for request in compat.decoding(self._scheduler)]
        self._connection.send(Seen(observation, self.rows, self._scheduler.get_request_counts()[1]))
        decision: Decision = _received(self._connection)
        self.tally.decisions += 1
        return checked(decision, observation.running, self.capabilities)


class SteppedScheduler(FaserScheduler):
    """Keeps what came of a step."""

    def attach(self, connection: Connection, plan: Plan) -> None:
        """From now on decisions come over `connection`."""
        self.faser.controller.close()
        self.faser.controller = self.asked = AskedController(connection, self)
        self.faser.cost = plan.cost

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.verdicts = compat.verdicts(scheduler_output, model_runner_output)
        self.prefilled = compat.prefilled(scheduler_output, self._decoding)
        self.batch = len(scheduler_output.num_scheduled_tokens)
        return super().update_from_output(scheduler_output, model_runner_output)


class SteppedEngine(OfflineEngine):
    """An `OfflineEngine` in this process, which tells what a step came to."""

    def __init__(self, connection: Connection, plan: Plan) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        super().__init__(
            plan.target,
            plan.draft,
            plan.settings,
            max_batch=plan.max_batch,
            scheduler_cls=SCHEDULER,
            dtype=plan.dtype,
            max_batched_tokens=plan.max_batched_tokens,
        )
        core: Any = self._engine.engine_core  # an InprocClient, whose own `engine_core` is the engine's loop
        self.scheduler: SteppedScheduler = core.engine_core.scheduler
        self.scheduler.attach(connection, plan)
        model = self.config.model_config
        ends = model.try_get_generation_config().get("eos_token_id", model.hf_config.eos_token_id)
        self._until: list[int] = [ends] if isinstance(ends, int) else list(ends or ())

    def start(self, request: Asked) -> None:
        """Add it, cut to what the model takes."""
        most = min(request.max_tokens, self.longest // 2)
        self.add(
            request.prompt[-(self.longest - most) :],
            most,
            name=request.name,
            until=self._until,
            temperature=request.temperature,
            seed=request.seed,
            arrival=request.arrival,
        )

    def carry_out(self) -> Done:
        """One step, whose decision is asked for on the way."""
        outputs = self.outputs()
        verdicts = [self.scheduler.verdicts.get(row, (0, 0)) for row in self.scheduler.asked.rows]
        verified, accepted = np.array(verdicts, np.int64).reshape(-1, 2).T
        return Done(
            verified=verified,
            accepted=accepted,
            prefill_tokens=self.scheduler.prefilled,
            batch=self.scheduler.batch,
            written={out.request_id: list(out.outputs[0].token_ids) for out in outputs},
            finished=[out.request_id for out in outputs if out.finished],
        )

    def drop(self) -> int:
        """Drop all requests; returns how many are tracked nevertheless."""
        self.drop_all()
        self.scheduler.faser.restart()
        return self.scheduler.faser.tracked


def _received(connection: Connection) -> Any:
    """The next message. SystemExit: there will be none."""
    try:
        return connection.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(0) from None


def main(argv: list[str]) -> int:
    """Serve the connection on file descriptor argv[0] until it says None or ends."""
    connection = Connection(int(argv[0]))
    engine = SteppedEngine(connection, _received(connection))
    connection.send(True)
    while (message := _received(connection)) is not None:
        if message == "drop":
            connection.send(engine.drop())
            continue
        for request in message:
            engine.start(request)
        connection.send(engine.carry_out())
    engine.close()
    return 0


if __name__ == "__main__":
    from faser.serving import stepped  # the module that the scheduler's name leads to, rather than __main__

    raise SystemExit(stepped.main(sys.argv[1:]))
