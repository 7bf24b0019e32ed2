"""Greedy token and how sure the draft is of it, from logits.

Serving calls `argmax_confidence`, which is plain torch until `python -m faser.bench.kernels` has shown on a GPU that
the one in `triton.py`, which is `confidence` without entropy and margin, is not slower.
"""

from __future__ import annotations

import torch

from faser.kernels.confidence import reference
from faser.kernels.confidence.reference import Confidence, argmax_confidence

__all__ = ["Confidence", "argmax_confidence", "confidence"]


def confidence(logits: torch.Tensor) -> Confidence:
    """Tokens, their probabilities, entropies and margins, of `logits` [B, V] bfloat16 or float32."""
    if logits.is_cuda:
        from faser.kernels.confidence import triton

        return triton.confidence(logits)
    return reference.confidence(logits)
