"""`verify` as one launch: a program a row, and the last of a request's rows to finish keeps what is to be kept.

A row's token does not depend on the rows before it, so all are worked on at once; what a request's rows wait for is a
count of arrivals, not each other. A row is read once for its argmax or its softmax's sum, and again, from the cache as
a rule, up to the token that is drawn; nothing of size V is written. One uniform number draws a token by the inverse
distribution function, where an exponential race wants V of them. Sums are float32: of a tile, and of tiles.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from faser.kernels.tiles import LEAST, LOWEST, rank, tile
from faser.kernels.verify.reference import Verified


@triton.jit
def _argmax(row, V, BLOCK: tl.constexpr):
    """int32 of row [V], as torch.argmax: ties and NaN by the first."""
    best = LEAST
    token = 0
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        ranked = rank(tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32))
        top = tl.max(ranked)
        token = tl.where(top > best, tl.min(tl.where(ranked == top, index, V)), token)
        best = tl.maximum(best, top)
    return token


@triton.jit
def _softmax(row, x, rate, V, BLOCK: tl.constexpr):
    """The largest of rate * row [V], and the sum of exp(rate * row - largest) over all but x."""
    largest = LOWEST
    others = 0.0
    for start in range(0, V, BLOCK):
        index = start + tl.arange(0, BLOCK)
        z = tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32) * rate
        larger = tl.maximum(largest, tl.max(z))
        e = tl.where(index == x, 0.0, tl.exp(z - larger))
        others = others * tl.exp(largest - larger) + tl.sum(e)
        largest = larger
    return largest, others


@triton.jit
def _residual(row, q, x, rate, largest, total, index, V, ONE_HOT: tl.constexpr):
    """max(p - q, 0) * total at `index` [BLOCK], with q = 0 if x is none (-1)."""
    e = tl.exp(tl.load(row + index, mask=index < V, other=float("-inf")).to(tl.float32) * rate - largest)
    if ONE_HOT:
        weight = tl.where(index == x, 0.0, e)
    else:
        chance = tl.load(q + index, mask=(index < V) & (x >= 0), other=0.0).to(tl.float32)
        weight = tl.maximum(e - chance * total, 0.0)
    return weight


@triton.jit
def _draw(row, q, x, u, rate, largest, total, others, V, BLOCK: tl.constexpr, ONE_HOT: tl.constexpr):
    """int32 drawn from the residual by u; x if that is nowhere positive. others: the residual's sum if ONE_HOT."""
    mass = others
    if not ONE_HOT:
        mass = 0.0
        for start in range(0, V, BLOCK):
            index = start + tl.arange(0, BLOCK)
            mass += tl.sum(_residual(row, q, x, rate, largest, total, index, V, ONE_HOT))
    left = u * mass
    drawn = V
    last = x  # that could be drawn: as sums round, nothing may be left after all
    start = 0
    while (drawn == V) & (start < V):
        index = start + tl.arange(0, BLOCK)
        weight = _residual(row, q, x, rate, largest, total, index, V, ONE_HOT)
        drawn = tl.min(tl.where((weight > 0.0) & (tl.cumsum(weight) > left), index, V))
        top = tl.max(tl.where(weight > 0.0, index, -1))
        last = tl.where(top >= 0, top, last)
        left -= tl.sum(weight)
        start += BLOCK
    return tl.where(drawn == V, last, drawn)


@triton.jit
def _sample(row, q, x, u, rate, V, BLOCK: tl.constexpr, ONE_HOT: tl.constexpr):
    """int32 token of row [V] by the rule, from x int32, -1 for none, and u float64; without a softmax its argmax."""
    largest, others = _softmax(row, x, rate, V, BLOCK)
    e_x = tl.exp(tl.load(row + x, mask=x >= 0, other=float("-inf")).to(tl.float32) * rate - largest)
    total = others + e_x
    token = x
    if total > 0.0:  # neither NaN nor nothing but -inf
        ratio = e_x / total
        if not ONE_HOT:
            q_x = tl.load(q + x, mask=x >= 0, other=0.0).to(tl.float32)
            ratio = tl.where(q_x > 0.0, ratio / q_x, 0.0)
        if u >= ratio:
            again = ((u - ratio) / (1.0 - ratio)).to(tl.float32)
            token = _draw(row, q, x, again, rate, largest, total, others, V, BLOCK, ONE_HOT)
    else:
        token = _argmax(row, V, BLOCK)
    return token


@triton.jit
def _verify(
    logits,
    stride,
    drafts,
    ends,
    temperature,
    uniform,
    draft_probs,
    drawn,
    arrivals,
    tokens,
    accepted,
    bonus,
    longest,
    V,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_HOT: tl.constexpr,
):
    """Grid (B, longest + 1). drawn: [N + B] int32, the rows' tokens. COLUMNS: a power of two over `longest`."""
    request = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1)
    begin = tl.load(ends + request - 1, mask=request > 0, other=0).to(tl.int64)
    count = (tl.load(ends + request) - begin).to(tl.int32)
    if position > count:
        return
    row = begin + request + position
    heat = tl.load(temperature + request).to(tl.float32)
    if heat == 0.0:
        token = _argmax(logits + row * stride, V, BLOCK)
    else:
        x = tl.load(drafts + begin + position, mask=position < count, other=-1)
        x = tl.where((x >= 0) & (x < V), x, -1).to(tl.int32)
        u = tl.load(uniform + row).to(tl.float64)
        q = draft_probs + (begin + position) * V
        token = _sample(logits + row * stride, q, x, u, 1.0 / heat, V, BLOCK, ONE_HOT)
    tl.store(drawn + row, token)
    tl.debug_barrier()  # this row's token before its arrival, and that, which acquires too, before the others' are read
    if tl.atomic_add(arrivals + request, 1) == count:
        column = tl.arange(0, COLUMNS)
        own = tl.load(drawn + begin + request + column, mask=column <= count, other=-1)
        draft = tl.load(drafts + begin + column, mask=column < count, other=-1)
        kept = tl.min(tl.where(own == draft, COLUMNS, column))  # at most count, as no token is -1
        tl.store(tokens + request * (longest + 1) + column, tl.where(column <= kept, own, -1), mask=column <= longest)
        tl.store(accepted + request, kept)
        tl.store(bonus + request, tl.sum(tl.where(column == kept, own, 0)))
        tl.store(arrivals + request, 0)


@cache
def _arrivals(device: torch.device, batch: int) -> torch.Tensor:
    """[batch] int32 zeros, which each launch leaves as zeros: one launch at a time may use them. Not to be made while a
    CUDA graph is recorded, which Triton's compiling before it sees to.
    """
    return torch.zeros(batch, dtype=torch.int32, device=device)


def verify(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    ends: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    longest: int,
    draft_probs: torch.Tensor | None = None,
) -> Verified:
    """As the reference, on one stream at a time; rows of `logits` are contiguous, at any stride."""
    (rows, vocabulary), batch, device = logits.shape, len(ends), logits.device
    tokens = torch.empty(batch, longest + 1, dtype=torch.int32, device=device)
    accepted, bonus = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
    _verify[(batch, longest + 1)](
        logits,
        logits.stride(0),
        drafts,
        ends,
        temperature,
        uniform,
        logits if draft_probs is None else draft_probs,
        torch.empty(rows, dtype=torch.int32, device=device),
        _arrivals(device, max(4096, triton.next_power_of_2(batch))),
        tokens,
        accepted,
        bonus,
        longest,
        vocabulary,
        COLUMNS=triton.next_power_of_2(longest + 1),
        ONE_HOT=draft_probs is None,
        **tile(vocabulary),
    )
    return Verified(tokens, accepted, bonus)
