"""`argmax_confidence` and `confidence` in one pass: a program a row, which reads it tile by tile.

With m the largest logit so far, s = sum exp(z - m) and w = sum exp(z - m) (z - m) go from tile to tile: when m grows by
d, w becomes (w - d s) exp(-d), and s becomes s exp(-d). At the end the largest probability is 1 / s and the entropy
log s - w / s. Plain torch copies the logits to float32 and reads them several times over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from faser.kernels.confidence.reference import Confidence
from faser.kernels.tiles import LEAST, LOWEST, rank, tile, unrank


@triton.jit
def _confidence(logits, stride, tokens, probability, entropy, margin, V, BLOCK: tl.constexpr, MORE: tl.constexpr):
    """Grid (B,). MORE: entropy and margin as well, which may otherwise be None."""
    request = tl.program_id(0).to(tl.int64)
    row = logits + request * stride
    token = 0
    best = LEAST
    second = LEAST
    m = LOWEST
    s = 0.0
    w = 0.0
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32)
        ranked = rank(z)
        top = tl.max(ranked)
        first = tl.min(tl.where(ranked == top, index, V))
        if MORE:
            rest = tl.max(tl.where(index == first, LEAST, ranked))
            second = tl.maximum(tl.minimum(best, top), tl.maximum(second, rest))
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
        larger = tl.maximum(unrank(best), LOWEST)
        step = tl.maximum(m - larger, -200.0)  # whose exp is 0 already
        e = tl.exp(z - larger)
        if MORE:
            w = (w + step * s) * tl.exp(step) + tl.sum(tl.where(e > 0.0, e * (z - larger), 0.0))
        s = s * tl.exp(step) + tl.sum(e)
        m = larger
    p = tl.where(s > 0.0, 1.0 / s, float("nan"))
    tl.store(tokens + request, token)
    tl.store(probability + request, p)
    if MORE:
        tl.store(entropy + request, tl.log(s) - w / s)
        tl.store(margin + request, p * (1.0 - tl.exp(unrank(second) - m)))


def argmax_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    made = _run(logits, more=False)
    return made.tokens, made.probability


def confidence(logits: torch.Tensor) -> Confidence:
    """As the reference."""
    return _run(logits, more=True)


def _run(logits: torch.Tensor, more: bool) -> Confidence:
    """logits: [B, V], rows contiguous, at any stride. Without `more`, entropy and margin are empty."""
    batch, vocabulary = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    probability, entropy, margin = (
        torch.empty(n, dtype=torch.float32, device=logits.device) for n in (batch, batch * more, batch * more)
    )
    _confidence[(batch,)](
        logits,
        logits.stride(0),
        tokens,
        probability,
        entropy,
        margin,
        vocabulary,
        MORE=more,
        **tile(vocabulary),
    )
    return Confidence(tokens, probability, entropy, margin)
