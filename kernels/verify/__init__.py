"""Which drafted tokens the target keeps, and its own token after them, for drafts of any lengths in one launch.

Whether vLLM 0.32's kernels would do was read in its `v1/sample/rejection_sampler.py`, and counted, not measured. The
two that accept are short, and ragged as they are. What costs is what they want beforehand: bonus rows gathered and
sampled by the ordinary sampler; draft rows gathered, made float32, copied, divided by the temperature, their argmax or
softmax written out, and for every drafted token, kept or not, another drawn from V exponential numbers a request. For
256 sampled requests of 7 drafted tokens and a vocabulary of 128,256 that moves 10 GB (5 if all are greedy) and holds
three float32 copies of 0.9 GB, where the bfloat16 logits are 0.5 GB and reading them once, or nearly twice, would do.
So there a kernel of our own is warranted. With few rows all of it is launches, and vLLM's are good enough.

The kernel here takes logits, not probabilities: as the model leaves them, where temperature is all there is; and after
vLLM's `apply_logits_processors` and `apply_top_k_top_p` where a request has penalties, grammars or a cut vocabulary,
whose -inf is probability 0 (divided by their temperatures already, they go with temperatures of 1 and 0). Those two
stay vLLM's, being many rules and no pass over V worth saving, as do log-probabilities, seeded generators (one number a
row suffices) and `parse_output`, which reads the same -1. Serving calls none of this yet.
"""

from __future__ import annotations

import torch

from faser.kernels.verify import reference
from faser.kernels.verify.reference import Verified

__all__ = ["Verified", "verify"]


def verify(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    ends: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    longest: int,
    draft_probs: torch.Tensor | None = None,
) -> Verified:
    """B requests, of which the i-th has n_i <= `longest` drafted tokens; N = sum of n_i.

    logits: [N + B, V] bfloat16 or float32, request after request: a row for each drafted token and one after them.
    drafts: [N] integers; one that is not in 0..V-1, such as vLLM's padding -1, is rejected, as if there were none.
    ends: [B] int32 or int64, running sum of n. temperature: [B], 0 is greedy. uniform: [N + B] in [0, 1), float32 or
    float64, of no account for greedy requests. draft_probs: [N, V], which drafts were drawn from; None: greedy drafts.

    A greedy row's token is torch.argmax's, NaN included, and so is that of a sampled row that has no softmax: with NaN
    or +inf in it, or -inf everywhere. All but logits are contiguous.
    """
    if logits.is_cuda:
        from faser.kernels.verify import triton

        return triton.verify(logits, drafts, ends, temperature, uniform, longest, draft_probs)
    return reference.verify(logits, drafts, ends, temperature, uniform, longest, draft_probs)
