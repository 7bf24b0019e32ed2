"""token = argmax_v z_v,  confidence = exp(z_token - log sum_v exp z_v)  for logits z."""

from __future__ import annotations

import torch


def argmax_confidence(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From `logits` [B, V]: tokens [B] int64, as torch.argmax picks them, and their probabilities [B] float32."""
    tokens = logits.argmax(dim=-1)
    top = logits.gather(-1, tokens[:, None]).squeeze(-1).float()
    return tokens, torch.exp(top - torch.logsumexp(logits.float(), dim=-1))
