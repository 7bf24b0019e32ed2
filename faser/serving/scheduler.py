"""vLLM's scheduler with a policy in it.

Before a step: ask for lengths and depth, cut each request's drafts, and let vLLM schedule what is left. After it:
take the verdicts. Cutting drafts of greedy drafting is lossless whatever the lengths are (see README, "Why outputs
cannot change").
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler

from faser.ab.arms import ArmedController
from faser.acceptance import load_predictor
from faser.controller import Controller
from faser.core import Capabilities, Decision
from faser.costs import StepCost, load_profile
from faser.policies import make_policy, names_file
from faser.serving import compat
from faser.serving.control import Control
from faser.serving.loop import SpeculationLoop
from faser.serving.settings import Settings
from faser.serving.step_log import open_log

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request


logger = init_logger("vllm.faser")  # under vLLM's, which is the one that prints


class WithPolicy(Scheduler):
    """What both ways of scheduling share. Settings come from `vllm_config.additional_config["faser"]`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = Settings.from_config(dict(self.vllm_config.additional_config))  # type: ignore[arg-type]  # a dict here
        cost = load_profile(settings.profile)
        controller: Controller | ArmedController
        if settings.split is None:
            self.arms = None
            controller = self._controller(settings.policy, cost, settings)
        else:
            controllers = {arm.name: self._controller(arm.policy, cost, settings) for arm in settings.split.arms}
            self.arms = controller = ArmedController(settings.split, controllers)
        log = open_log(settings, compat.engine_index(self))
        self._log_prompts = log is not None and settings.log_prompts
        predictor = load_predictor(settings.predictor) if settings.predictor else None
        capacity = self.max_num_running_reqs
        self.faser = SpeculationLoop(controller, cost, capacity=capacity, log=log, predictor=predictor, arms=self.arms)
        self.control = Control(controller, cost, self.faser.metrics, self.faser.history, self.arms)
        compat.answer_control()
        logger.info("policy %s, step costs %s, predictor %s", controller.name, cost.name, settings.predictor or "none")
        if self.num_spec_tokens:
            compat.allow_ragged_drafts(self)

    def _controller(self, policy: str, cost: StepCost, settings: Settings) -> Controller:
        name = Path(policy).name if names_file(policy) else policy
        capabilities = Capabilities(max_depth=self.num_spec_tokens)
        controller = Controller(make_policy(policy, cost), capabilities, settings.controller, name)
        controller.bench(settings.benched)
        return controller

    def add_request(self, request: Request) -> None:
        if self.arms is not None:
            self.arms.arrive(request.request_id, compat.assigned(request), request.arrival_time)
        super().add_request(request)

    def _decide(self, requests: list[Request]) -> Decision:
        """What to do with `requests`, those that decode, in the step about to be scheduled; their drafts are cut."""
        decision = self.faser.decide(
            compat.rows(requests),
            waiting=self.get_request_counts()[1],
            kv_usage=self.get_kv_cache_usage(),
            prefill_tokens=compat.prefill_tokens(self, len(requests)),
        )
        for request, length in zip(requests, decision.lengths.tolist(), strict=True):
            del request.spec_token_ids[length:]
        return decision

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        self.faser.account()  # the GPU has just been started: nobody waits for this
        return super().get_grammar_bitmask(scheduler_output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.faser.finish(compat.ended(request, texts=self._log_prompts))
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        self.faser.close()
        super().shutdown()


class FaserScheduler(WithPolicy):
    """One step after the other: a decision knows all of the step before it."""

    _decoding: frozenset[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        requests = compat.decoding(self)
        self._decoding = frozenset(r.request_id for r in requests)
        decision = self._decide(requests)
        scheduled = super().schedule(*args, **kwargs)
        scheduled.num_spec_tokens_to_schedule = decision.draft_depth
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self.faser.record(
            compat.verdicts(scheduler_output, model_runner_output),
            prefill_tokens=compat.prefilled(scheduler_output, self._decoding),
        )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.faser.wrote(compat.written(outputs))
        return outputs

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)  # a grammar may cut some
        self.faser.end_of_drafting()
        known = [(i, self.requests.get(r)) for i, r in enumerate(draft_token_ids.req_ids)]
        if self.arms is not None:
            for _, request in known:
                if request is not None and (depth := self.arms.depth_of(request.request_id)) is not None:
                    del request.spec_token_ids[depth:]
        live = [(i, r) for i, r in known if r is not None and r.spec_token_ids]
        if not live:
            return
        confidence = getattr(draft_token_ids, "faser_confidence", None)
        if confidence is None:  # the drafter did not run (a request at the model's full length)
            confidence = np.zeros((len(draft_token_ids.req_ids), 0), np.float32)
        self.faser.draft(compat.rows([r for _, r in live]), confidence[[i for i, _ in live]])
