"""vLLM's worker with a draft model that says how sure it is.

Confidences ride to the scheduler on vLLM's own DraftTokenIds, or where that does not wait for them on a step's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.outputs import AsyncModelRunnerOutput

from faser.serving import compat
from faser.serving.catch_up import LazyDrafter
from faser.serving.riding import WithConfidence

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


class FaserWorker(compat.worker_base()):  # type: ignore[misc]  # the base depends on the platform
    """Chosen by `--worker-cls`."""

    def init_device(self) -> None:
        compat.repair_cpu_kernels()
        compat.recover_by_inversion()
        compat.plan_attention_as_captured()
        with compat.drafter_class(LazyDrafter):
            super().init_device()
        compat.sample_plainly_without_drafts(self.model_runner)
        compat.rewind_cpu_generators(self.model_runner)
        drafter = getattr(self.model_runner, "drafter", None)  # none without speculation
        if isinstance(drafter, LazyDrafter):
            compat.capture_too(self.model_runner, drafter.capture)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        output: ModelRunnerOutput | AsyncModelRunnerOutput = super().sample_tokens(grammar_output)
        if not isinstance(output, AsyncModelRunnerOutput):
            return output
        drafter = getattr(self.model_runner, "drafter", None)
        confidence = drafter.take_confidence() if isinstance(drafter, LazyDrafter) else None
        if confidence is None:
            return output
        return WithConfidence(output, confidence, self.model_runner.async_output_copy_stream)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts: DraftTokenIds | None = super().take_draft_token_ids()
        if drafts is not None and not self.model_runner.use_async_scheduling:
            confidence = self.model_runner.drafter.take_confidence()
            if confidence is not None:
                drafts.faser_confidence = confidence.cpu().numpy()  # type: ignore[attr-defined]  # rides along
        return drafts
