"""A server that cheats: it leans towards the drafted token. Only to show that the distribution test can fail."""

import sys
from typing import Any

from faser.serving import serve
from faser.serving.worker import FaserWorker

LEAN = 3.0
"""Added to the logit of each drafted token before it is judged."""


class BiasedWorker(FaserWorker):  # type: ignore[misc]  # its base depends on the platform
    def init_device(self) -> None:
        super().init_device()
        sampler = self.model_runner.rejection_sampler
        honest = sampler.forward

        def forward(metadata: Any, draft_probs: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
            logits[metadata.target_logits_indices, metadata.draft_token_ids.long()] += LEAN
            return honest(metadata, draft_probs, logits, *args, **kwargs)

        sampler.forward = forward


if __name__ == "__main__":
    serve.WORKER = "biased_server.BiasedWorker"
    sys.exit(serve.main(sys.argv[2:]))  # argv[1] is "serve"
