"""The grid of a profile: which batches, contexts and prompts the engine is given, and for how many steps.

Lengths and depths are the probe policy's (`policies/probe.py`), which walks them while a batch decodes. Not every one
meets every batch: the walk goes on from visit to visit, so neighbours on the ladder share out what all would take
minutes for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from faser.core import MAX_DEPTH
from faser.costs.step_cost import StepCost

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 1024, 3072)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_PROMPT = 1024
"""A step of more prompt tokens has several prompts: a single one would cost more, by its attention to itself."""
MIXED_BATCHES, MIXED_PROMPTS = (1, 8, 32, 128), (64, 256, 1024)
TEMPERATURES = (0.0, 0.8)
"""Of the requests that are timed, in turn: a step in which any is sampled has more to do, and on a server some are."""
HOLD = 9
"""Steps for which the probe holds a decision: one that does not count, and eight of which the median is taken."""
HOLDS = 8
"""Decisions of one visit, of the probe's 40; one of them drafts nothing."""
GROWTH = 4
"""Tokens that a request grows by in a step, at most, for what fits in the KV cache: one, and the probe's lengths, which
are 2.3 on average.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """batch: requests that decode, each with `context` prompt tokens; steps: for how long.

    prompt: tokens of a further request, or of several, that come with every step and ask for one token (0: none). With
    batch 0 the prompts come alone, one after the other.
    """

    batch: int
    context: int
    steps: int
    prompt: int = 0


def plan(*, max_batch: int, longest: int, kv_tokens: int, budget: int, quick: bool = False) -> list[Visit]:
    """The visits of a profile that fit an engine.

    max_batch: requests at once; longest: tokens of one; kv_tokens: of all that run; budget: of one step.
    quick: just enough to see it work.
    """
    steps = HOLD * (4 if quick else HOLDS)
    ladder = [b for b in ((1, 4) if quick else LADDER) if b <= max_batch]
    prompts = sorted({min(p, budget) for p in (PROMPTS[:2] if quick else PROMPTS)})
    visits = [Visit(batch=0, context=0, steps=2 * HOLD, prompt=p) for p in prompts]
    for context in CONTEXTS[:1] if quick else CONTEXTS:
        visits += [Visit(batch=b, context=context, steps=steps) for b in ladder]
    for batch in (b for b in (() if quick else MIXED_BATCHES) if b < max_batch):
        visits += [Visit(batch=batch, context=CONTEXTS[0], steps=3 * HOLD, prompt=p) for p in MIXED_PROMPTS]
    return [v for v in visits if _fits(v, longest, kv_tokens, budget)]


def prompts_of(visit: Visit, longest: int) -> list[int]:
    """Lengths of the prompts that come with a step, where a request has at most `longest` tokens."""
    whole = min(LONGEST_PROMPT, longest - 1)
    return [min(whole, visit.prompt - start) for start in range(0, visit.prompt, whole)]


def estimate_s(visits: Sequence[Visit], cost: StepCost) -> float:
    """Seconds that the visits take on a machine of this `cost`."""
    return sum(_visit_ms(v, cost) for v in visits) / 1e3


def _fits(visit: Visit, longest: int, kv_tokens: int, budget: int) -> bool:
    grown = visit.context + GROWTH * visit.steps
    rows = visit.batch * (1 + MAX_DEPTH)
    return (
        grown + MAX_DEPTH < longest
        and visit.batch * grown + 2 * visit.prompt <= 0.9 * kv_tokens
        and rows + (visit.prompt if visit.batch else 0) <= budget
    )


def _visit_ms(visit: Visit, cost: StepCost) -> float:
    length, depth = MAX_DEPTH // 3, 2 * MAX_DEPTH // 3  # what all pairs of the probe are on average, about
    rows = visit.batch * (1 + length) + visit.prompt
    context = visit.batch * (visit.context + visit.steps)
    batch = max(visit.batch, 1)
    step = cost.step_ms(rows=max(rows, 1), batch=batch, depth=depth, context=context, prefill=visit.prompt)
    prefill = cost.step_ms(rows=visit.batch * visit.context, batch=1) if visit.batch else 0.0
    return visit.steps * step + prefill
