"""Tokens in place of rejected ones, by inversion: one uniform number a token instead of one for each of the vocabulary.

vLLM draws exponential noise [B, V] for them, on a CPU one number after the other: on two cores, of 16 requests and a
vocabulary of 49,152, in 15 ms, where the target's whole step takes 36. A distribution's running sum finds the same
token in 0.5. It is summed in blocks, in float64: no token's share is lost in rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import pad

BLOCK = 256


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[N] int64: of each row of `weights` [N, V] float32, not negative, the first token whose running sum is over
    `uniform` [N] float64, from [0, 1), of its total. A row of zeros or NaN gives some token.
    """
    rows, vocabulary = weights.shape
    blocks = pad(weights, (0, -vocabulary % BLOCK)).view(rows, -(-vocabulary // BLOCK), BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    at = uniform[:, None] * sums[:, -1:]
    block = _first_over(sums, at)
    before = sums.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    inner = blocks[torch.arange(rows)[:, None], block].squeeze(1).double().cumsum(-1)
    token = block * BLOCK + _first_over(inner, at - before)
    return token.squeeze(1).clamp(max=vocabulary - 1)


def _first_over(sums: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """[N, 1]: where `sums` [N, M] first exceed `at` [N, 1]; if rounding has made it as much as the last, where that is
    reached: an entry that adds nothing is never it.
    """
    below = torch.nextafter(sums[:, -1:], torch.zeros_like(at))
    return torch.searchsorted(sums, torch.minimum(at, below), right=True).clamp(max=sums.shape[1] - 1)


def recovered_tokens(
    probabilities: torch.Tensor,
    drafts: torch.Tensor,
    counts: Sequence[int],
    generators: Mapping[int, torch.Generator],
) -> torch.Tensor:
    """[N] of the type of `drafts`: for each drafted token one from its row of `probabilities` [N, V] without it.

    drafts: [N], -1: none; counts: [B] of each request; generators: of requests with a seed.
    """
    uniform = torch.rand(len(drafts), dtype=torch.float64)
    for part, (request, count) in zip(uniform.split(list(counts)), enumerate(counts), strict=True):
        if count and request in generators:
            part.uniform_(generator=generators[request])
    column = drafts.long().clamp(min=0)[:, None]
    own = probabilities.gather(1, column)
    probabilities.scatter_(1, column, own * (drafts[:, None] < 0))
    tokens = draw(probabilities, uniform)
    probabilities.scatter_(1, column, own)
    return tokens.to(drafts.dtype)
