"""The draft's greedy continuation from EVERY position of known texts, in K forward passes.

One pass over the texts gives the first drafted token after each of their prefixes. Each further pass feeds, for all T
positions at once, the token drafted last: T rows share their text's KV cache, and a mask lets row t see the text before
position t and its own earlier drafts, nothing else. Naively it would be K passes for each of T prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from faser.core import MAX_DEPTH

CHUNK = 1 << 25
"""Logits that exist at once: 128 MiB in float32. A long text has far more of them than a memory wants."""


@dataclass(frozen=True)
class Texts:
    """B known texts, of whose positions `start`..`end`-1 we ask; M = sum(end - start) of them, text after text.

    tokens: [B, n] int64, padded on the right with whatever; start, end: [B] int64, 1 <= start < end <= n.
    """

    tokens: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], start: Sequence[int], device: torch.device | str = "cpu") -> Texts:
        """Whole `texts` of token ids from `start` on. ValueError: a start outside of its text."""
        for text, first in zip(texts, start, strict=True):
            if not 1 <= first < len(text):
                raise ValueError(f"start is {first}; allowed: 1 to {len(text) - 1}")
        n = max(map(len, texts))
        tokens = torch.tensor([[*text, *[0] * (n - len(text))] for text in texts], device=device)
        end = torch.tensor([len(text) for text in texts], device=device)
        return cls(tokens, torch.tensor(start, device=device), end)

    @property
    def positions(self) -> torch.Tensor:
        """[B, T] int64, the positions asked of each text, past its end too; T is the largest number of them."""
        return self.start[:, None] + torch.arange(int((self.end - self.start).max()), device=self.tokens.device)

    @property
    def valid(self) -> torch.Tensor:
        """[B, T] bool, which of `positions` lie in their text."""
        return self.positions < self.end[:, None]


@torch.inference_mode()
def rollout(model: Any, texts: Texts, depth: int = MAX_DEPTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy drafts of a Hugging Face causal `model` before each position of `texts`.

    Returns drafted [M, depth] int64 and confidence [M, depth] float32 (largest softmax probability): each row continues
    its text up to its position.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    positions, valid = texts.positions, texts.valid
    known = texts.tokens[:, :-1]
    hidden = model.base_model(input_ids=known, past_key_values=cache, use_cache=True).last_hidden_state
    before = (positions - 1).clamp(max=known.shape[1] - 1)  # the row that predicts a position
    token, chance = _most_likely(model, hidden.gather(1, before[..., None].expand(-1, -1, hidden.shape[-1])))
    steps = [(token[valid], chance[valid])]
    sees_text = torch.arange(known.shape[1], device=known.device) < positions[..., None]
    own = torch.eye(positions.shape[1], dtype=torch.bool, device=known.device).expand(len(known), -1, -1)
    for step in range(1, depth):
        hidden = model.base_model(
            input_ids=token,
            position_ids=positions + step - 1,
            attention_mask=torch.cat((sees_text, own.repeat(1, 1, step)), dim=2)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        token, chance = _most_likely(model, hidden)
        steps.append((token[valid], chance[valid]))
    drafted, confidence = zip(*steps, strict=True)
    return torch.stack(drafted, dim=1), torch.stack(confidence, dim=1)


def by_logits(
    model: Any, hidden: torch.Tensor, use: Callable[[torch.Tensor, slice], tuple[torch.Tensor, ...]]
) -> list[torch.Tensor]:
    """What `use` makes of the float32 logits [m, V] of `hidden` [M, H], chunk by chunk (their slice of M), joined."""
    head = model.get_output_embeddings()
    rows = max(CHUNK // head.weight.shape[0], 1)
    chunks = [slice(at, at + rows) for at in range(0, len(hidden), rows)]
    return [torch.cat(parts) for parts in zip(*(use(head(hidden[c]).float(), c) for c in chunks), strict=True)]


def _most_likely(model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, T, H] -> the most likely token [B, T] and its probability [B, T]."""

    def best(logits: torch.Tensor, _: slice) -> tuple[torch.Tensor, torch.Tensor]:
        top, token = logits.max(-1)
        return token, (top - logits.logsumexp(-1)).exp()

    token, chance = by_logits(model, hidden.flatten(0, 1), best)
    return token.view(hidden.shape[:2]), chance.view(hidden.shape[:2])
