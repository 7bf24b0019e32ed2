"""The draft's greedy continuation from EVERY position of a known text, in K forward passes.

One pass over the text gives the first drafted token after each of its prefixes. Each further pass feeds, for all T
positions at once, the token drafted last: T rows share one KV cache, and a mask lets row t see the text before
position t and its own earlier drafts, nothing else. Naively it would be K passes for each of T prefixes.
"""

from __future__ import annotations

from typing import Any

import torch

from faser.core import MAX_DEPTH


@torch.inference_mode()
def rollout(model: Any, tokens: torch.Tensor, start: int, depth: int = MAX_DEPTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy drafts of a Hugging Face causal `model` before each of the positions `start`..n-1 of `tokens` [n] int64.

    Returns drafted [T, depth] int64 and confidence [T, depth] float32 (largest softmax probability), T = n - start:
    row t continues tokens[:start + t]. ValueError: `start` is not in 1..n-1.
    """
    from transformers import DynamicCache

    n = len(tokens)
    if not 1 <= start < n:
        raise ValueError(f"start is {start}; allowed: 1 to {n - 1}")
    cache = DynamicCache()
    text = tokens[:-1].unsqueeze(0)
    logits = model(input_ids=text, past_key_values=cache, use_cache=True).logits[0, start - 1 :]
    steps = [_most_likely(logits)]
    rows = torch.arange(n - start, device=tokens.device)
    sees_text = torch.arange(n - 1, device=tokens.device) < (start + rows)[:, None]
    own = torch.eye(n - start, dtype=torch.bool, device=tokens.device)
    for step in range(1, depth):
        mask = torch.cat((sees_text, own.repeat(1, step)), dim=1)
        logits = model(
            input_ids=steps[-1][0].unsqueeze(0),
            position_ids=(start + rows + step - 1).unsqueeze(0),
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        steps.append(_most_likely(logits))
    drafted, confidence = zip(*steps, strict=True)
    return torch.stack(drafted, dim=1), torch.stack(confidence, dim=1)


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, V] -> token [T] and its probability [T]."""
    probability, token = logits.float().softmax(-1).max(-1)
    return token, probability
