"""`Writer`: a target that writes many texts at once, through vLLM in this process; for making data, not for serving."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Tokens = list[int]


class Writer:
    """One vLLM engine over `model`. seed: of sampling; sequences: written side by side; length: tokens of one."""

    def __init__(self, model: Path, *, seed: int = 0, sequences: int = 1024, length: int = 2048) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # CUDA may be in use here already
        from vllm import LLM
        from vllm.platforms import current_platform

        self._engine = LLM(
            model=str(model),
            kv_cache_memory_bytes=(1 if current_platform.is_cpu() else 10) * 2**30,
            gpu_memory_utilization=0.1,  # only checked at the start, which engines side by side must pass
            max_model_len=length,
            max_num_seqs=sequences,
            max_num_batched_tokens=max(length, 16_384),
            enforce_eager=True,  # graphs would take longer to record than they save here
            enable_prefix_caching=False,
            seed=seed,
        )

    def write(
        self,
        prompts: Sequence[Tokens],
        *,
        max_tokens: Sequence[int],
        temperatures: Sequence[float],
        ends: Sequence[int],
    ) -> list[Tokens]:
        """What follows each of `prompts` (token ids), up to and with one of `ends`, or as long as allowed.

        max_tokens, temperatures: one per prompt; temperature 0 is greedy.
        """
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=t, max_tokens=m, stop_token_ids=list(ends), detokenize=False)
            for t, m in zip(temperatures, max_tokens, strict=True)
        ]
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(made.outputs[0].token_ids) for made in self._engine.generate(asked, params, use_tqdm=False)]

    def close(self) -> None:
        """End the engine's process."""
        self._engine.llm_engine.engine_core.shutdown()
