"""vLLM's worker with a draft model that says how sure it is.

Confidences ride on vLLM's own DraftTokenIds, from the worker to the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser.serving import compat
from faser.serving.catch_up import LazyDrafter

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds


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

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts: DraftTokenIds | None = super().take_draft_token_ids()
        if drafts is not None:
            confidence = self.model_runner.drafter.take_confidence()
            if confidence is not None:
                drafts.faser_confidence = confidence.cpu().numpy()  # type: ignore[attr-defined]  # rides along
        return drafts
