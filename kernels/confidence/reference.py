"""For logits z, p_v = exp z_v / sum_w exp z_w, and p_(1) >= p_(2) the two largest:

token = argmax_v z_v,  confidence = p_token,  entropy = -sum_v p_v log p_v,  margin = p_(1) - p_(2)
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Confidence(NamedTuple):
    """Of B rows. A row with NaN or +inf in it, or -inf everywhere, has no softmax: all but its token are NaN."""

    tokens: torch.Tensor
    """[B] int64, as torch.argmax picks them: the first of equals, or the first NaN."""
    probability: torch.Tensor
    """[B] float32 of the tokens."""
    entropy: torch.Tensor
    """[B] float32, nats."""
    margin: torch.Tensor
    """[B] float32: their probability over the next token's, 0 for equals; over 0 if V is 1."""


def argmax_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From `logits` [B, V]: tokens [B] int64, as torch.argmax picks them, and their probabilities [B] float32."""
    tokens = logits.argmax(dim=-1)
    top = logits.gather(-1, tokens[:, None]).squeeze(-1).float()
    return tokens, torch.exp(top - torch.logsumexp(logits.float(), dim=-1))


def confidence(logits: torch.Tensor) -> Confidence:
    """From `logits` [B, V], bfloat16 or float32, in float64 throughout."""
    tokens, p = logits.argmax(dim=-1), torch.softmax(logits.double(), dim=-1)
    top, second = p.gather(-1, tokens[:, None]).squeeze(-1), p.scatter(-1, tokens[:, None], 0.0).amax(dim=-1)
    return Confidence(tokens, top.float(), torch.special.entr(p).sum(dim=-1).float(), (top - second).float())
