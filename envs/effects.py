"""What an engine might do besides, as switches of the simulator; the engine that serves does neither yet.

Pruning: after `layer` of the target's layers, the drafted token of a row that is not among the target's `rank` + 1 most
likely looks rejected, and what follows it leaves the step: its own row, too. If it is right after all it is kept, and
the request goes on from it without a further token. So outputs stay the target's: a draft is cut, nothing else. What a
layer thinks of a token is recorded (`Tape.rank`); past the first mismatch nothing is, and nothing leaves there.

Frontiers: while the target verifies, the draft goes on for `frontier` tokens, as if all were right and its next token
the target's. All requests draft together, so it saves time only if that was so of every one, and otherwise was for
nothing. How much of it hides behind verification was measured with two streams on an H200 (13B and 1.1B shapes).

Both leave out what they would cost an engine that has CUDA graphs of fixed sizes: they are bounds of what there is to
gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.core import Ints
from faser.costs import Curve, StepCost
from faser.tapes import Tape

HIDDEN = Curve((1.0, 8.0, 32.0, 128.0, 256.0, 512.0), (0.58, 0.46, 0.35, 0.02, 0.0, 0.0))
"""By batch, the share of a draft step that takes no time beside verification."""
WIDTHS = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary")
"""Of a target, as a profile has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """layer: of the target, one that the tape has ranks of; None: the middle one of these. rank: the largest that keeps
    what follows.
    """

    layer: int | None = None
    rank: int = 254


class Pruner:
    """`Pruning` of what a tape has recorded, at a profile's times. ValueError: not enough is known for it."""

    def __init__(self, rule: Pruning, tape: Tape, cost: StepCost) -> None:
        if not tape.layers:
            raise ValueError("pruning needs a tape with ranks of early layers; this one has none")
        layer = tape.layers[len(tape.layers) // 2] if rule.layer is None else rule.layer
        if layer not in tape.layers:
            known = ", ".join(map(str, tape.layers))
            raise ValueError(f"pruning after layer {layer}; the tape has ranks of layers: {known}")
        layers, self._head = _target(cost)
        if layer >= layers:
            raise ValueError(f"pruning after layer {layer}; the target of profile {cost.name} has {layers}")
        self._share = layer / layers
        self._cost = cost
        looks_right = tape.rank[:, tape.layers.index(layer)] <= rule.rank
        self._looks_right = tape.runs(looks_right)

    def rows(self, at: Ints, lengths: Ints, right: Ints) -> Ints:
        """[M] rows that run to the end, of drafts of `lengths` [M] at positions `at` [M] of the tape, of which the
        first `right` [M] are.
        """
        suspect = self._looks_right[at]
        pruned = (suspect < lengths) & (suspect <= right)
        rows: Ints = np.where(pruned, suspect, lengths) + 1
        return rows

    def ms(self, *, rows: Ints, left: Ints, drafted: Ints, **other: Ints) -> NDArray[np.float64]:
        """[E] ms of steps of `rows`, of which `left` run to the end, and an early look at `drafted` of them. other: as
        for `StepCost.ms`.
        """
        start, end = self._cost.ms(rows=rows, **other), self._cost.ms(rows=left, **other)
        look = (drafted > 0) * self._head * self._cost.verify(drafted)
        ms: NDArray[np.float64] = self._share * start + (1.0 - self._share) * end + look
        return ms


def ahead_ms(
    cost: StepCost, *, frontier: Ints, depth: Ints, hit: NDArray[np.bool_], batch: Ints
) -> NDArray[np.float64]:
    """[E] what drafting `frontier` [E] tokens beside verification adds to a step that drafts `depth` [E] after it.

    The first of them is the target's own next token, which the step emits; the others, where every request could use
    them (`hit`), need not be drafted any more.
    """
    beside = np.minimum(frontier, depth + 1)
    saved = np.where(hit, np.maximum(beside - 1, 0), 0)
    added: NDArray[np.float64] = (beside * (1.0 - HIDDEN(batch)) - saved) * cost.draft(batch)
    return added


def _target(cost: StepCost) -> tuple[int, float]:
    """The target's layers, and weights of its output head over all that a step reads."""
    try:
        of = {key: int(cost.measured["target"][key]) for key in WIDTHS}
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"profile {cost.name} does not say its target's {', '.join(WIDTHS)}; pruning needs them"
        ) from None
    attention = 2 * (of["heads"] + of["kv_heads"]) * of["head_dim"]
    layers = of["layers"] * of["hidden"] * (attention + 3 * of["intermediate"])
    head = of["vocabulary"] * of["hidden"]
    return of["layers"], head / (head + layers)
