"""The rule of speculative sampling (Leviathan et al., arXiv 2211.17192), row by row, from one uniform number u a row.

With target p, draft distribution q and drafted token x of a row, r = p(x) / q(x):

    x                                                if u < r
    v with probability max(p(v) - q(v), 0) / their sum    otherwise, where (u - r) / (1 - r) is uniform and draws v

What comes out has distribution p. A greedy draft's q is 1 at x: x is kept with probability p(x), and otherwise v is
drawn from p without x. Rows without a drafted token draw from p. So every row has a token as if all before it were
kept, and a request keeps its rows' tokens up to the first that is not the drafted one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verified(NamedTuple):
    """Of B requests whose longest draft may be K tokens; all int32."""

    tokens: torch.Tensor
    """[B, K + 1]: the drafted tokens kept, then one of the target's own; -1 after it."""
    accepted: torch.Tensor
    """[B]: how many drafted tokens are kept."""
    bonus: torch.Tensor
    """[B]: the target's own token, `tokens` at `accepted`."""


def verify(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    ends: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    longest: int,
    draft_probs: torch.Tensor | None = None,
) -> Verified:
    """The arguments are described in `faser.kernels.verify`."""
    batch, (rows, vocabulary), device = len(ends), logits.shape, logits.device
    counts = ends.diff(prepend=ends.new_zeros(1)).long()
    request = torch.arange(batch, device=device).repeat_interleave(counts + 1)
    position = torch.arange(rows, device=device) - (ends - counts + torch.arange(batch, device=device))[request]
    drafted = position < counts[request]
    x = torch.full((rows,), -1, device=device)
    x[drafted] = drafts.long()
    known = (x >= 0) & (x < vocabulary)
    at = torch.where(known, x, 0)[:, None]

    q = torch.zeros(rows, vocabulary, device=device)
    if draft_probs is None:
        q.scatter_(1, at, 1.0)
    else:
        q[drafted] = draft_probs.float()
    q[~known] = 0.0

    heat = temperature.float()[request]
    p = torch.softmax(logits.float() / torch.where(heat == 0.0, 1.0, heat)[:, None], dim=-1)
    q_x = q.gather(1, at).squeeze(1)
    r = torch.where(q_x > 0.0, p.gather(1, at).squeeze(1) / q_x, 0.0).double()
    reached = (p - q).clamp(min=0.0).cumsum(dim=1, dtype=torch.float64)
    total = reached[:, -1]
    u = (uniform - r) / (1.0 - r)
    threshold = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))  # below the sum when rounded
    drawn = torch.searchsorted(reached, threshold[:, None], right=True).squeeze(1)
    token = torch.where((uniform < r) | (total == 0.0), x, drawn)  # no sum: p is q, and only rounding rejected x
    token = torch.where((heat == 0.0) | p[:, 0].isnan(), logits.argmax(dim=-1), token)

    tokens = torch.full((batch, longest + 1), -1, dtype=torch.int32, device=device)
    tokens[request, position] = token.int()
    kept = torch.zeros(batch, longest + 1, dtype=torch.int64, device=device)
    kept[request, position] = (token == x).long()
    accepted = kept.cumprod(dim=1).sum(dim=1)
    tokens[torch.arange(longest + 1, device=device) > accepted[:, None]] = -1
    return Verified(tokens, accepted.int(), tokens.gather(1, accepted[:, None]).squeeze(1))
