"""Verification in one launch where nothing but a temperature shapes the target's distribution; else vLLM's own.

On an H200 that is 0.15 ms less of a step's host time for greedy requests and 0.35 ms for sampled ones
(`python -m faser.bench.kernels`). A batch in which one request asks for more than a temperature is vLLM's as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor
from vllm.v1.sample.rejection_sampler import RejectionSampler

from faser.kernels.verify import verify

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class OneLaunchSampler(RejectionSampler):
    """vLLM's rejection sampler, on a GPU with `faser.kernels.verify` where that does all."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        if draft_probs is not None or self.synthetic_mode or not (logits.is_cuda and plain(sampling_metadata)):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        return SamplerOutput(verified(metadata, logits, sampling_metadata), logprobs_tensors=None)

    def compile(self, vocabulary: int, longest: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have the kernel ready for drafts of up to `longest` tokens, so that no request waits for it."""
        for length in range(1, longest + 1):
            rows = torch.zeros(length + 1, vocabulary, dtype=dtype, device=device)
            drafts = torch.zeros(length, dtype=torch.int32, device=device)
            ends = torch.tensor([length], dtype=torch.int32, device=device)
            uniform = torch.zeros(length + 1, dtype=torch.float64, device=device)
            verify(rows, drafts, ends, torch.ones(1, device=device), uniform, length)


def plain(sampling: SamplingMetadata) -> bool:
    """Whether tokens are drawn from softmax(logits / temperature), or are its argmax, and nobody asks for more."""
    processors = sampling.logitsprocs
    thinking = sampling.thinking_budget_state_holder
    if (
        sampling.max_num_logprobs is not None
        or sampling.logprob_token_ids
        or not sampling.no_penalties
        or sampling.allowed_token_ids_mask is not None
        or sampling.bad_words_token_ids
        or processors.argmax_invariant
        or (thinking is not None and thinking.has_tracked_requests())
    ):
        return False
    if any(not isinstance(p, MinTokensLogitsProcessor) or p.min_toks for p in processors.non_argmax_invariant):
        return False
    cut = sampling.top_p is not None or sampling.top_k is not None or sampling.generators
    return sampling.all_greedy or not cut


def verified(metadata: SpecDecodeMetadata, logits: torch.Tensor, sampling: SamplingMetadata) -> torch.Tensor:
    """[B, longest + 1] int32 tokens, -1 after the last of a request. logits: [N + B, V], for N drafted tokens of B."""
    temperature = sampling.temperature
    if temperature is None:  # all are greedy
        temperature = logits.new_zeros(len(metadata.num_draft_tokens), dtype=torch.float32)
        uniform = logits.new_empty(len(logits), dtype=torch.float64)  # of no account
    else:
        uniform = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
    drafts, ends = metadata.draft_token_ids, metadata.cu_num_draft_tokens
    return verify(logits, drafts, ends, temperature, uniform, metadata.max_spec_len).tokens
