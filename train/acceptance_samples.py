"""`Samples`: drafts of a tape's requests as a speculating engine meets them, with what it knows of each and what came.

One decision: acceptance averages depend on what was verified before, so they are not computed but lived through: the
tape is replayed in the engine's own `RequestTable` under policies that verify differently, random lengths among them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.acceptance import HISTORY_FEATURES
from faser.core import MAX_DEPTH, Floats, Ints
from faser.requests import RequestTable
from faser.tapes import Tape

SLOTS = 32
POLICIES = ("random", "steady", "static-3")
"""How many tokens the replayed engine verifies: any number for every request in every step; any number, but a request
keeps its own; or 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """M drafts of K tokens.

    confidence: [M, K] float32. history: [M, H] float32, HISTORY_FEATURES. run: [M] tokens that
    are accepted if all are verified. left: [M] output tokens to come. context: [M] tokens before. request, domain: [M].
    """

    confidence: Floats
    history: Floats
    run: Ints
    left: Ints
    context: Ints
    request: Ints
    domain: Ints

    def __len__(self) -> int:
        return len(self.run)

    @property
    def temperature(self) -> Floats:
        """[M]."""
        return self.history[:, HISTORY_FEATURES.index("temperature")]

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[M, K] which tokens' verdicts are known: all before them match, and the text goes that far."""
        at = np.arange(MAX_DEPTH)
        return (at <= self.run[:, None]) & (at < self.left[:, None])

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """[M, K] which tokens match, with all before them."""
        return np.arange(MAX_DEPTH) < self.run[:, None]

    def part(self, chosen: NDArray[np.bool_] | Ints) -> Samples:
        """Those samples."""
        return Samples(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


def samples_of(tape: Tape, *, seed: int = 0, policies: tuple[str, ...] = POLICIES) -> Samples:
    """A replay of `tape` per policy; in every other one like requests come together, as an engine's load drifts."""
    parts = []
    for i, policy in enumerate(policies):
        rng = np.random.default_rng([seed, i])
        order = rng.permutation(len(tape))
        if i % 2:
            order = order[np.lexsort((tape.temperature[order], tape.domain[order]))]
        parts += _replay(tape, order, policy, rng)
    return Samples(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Samples)})


def _replay(tape: Tape, order: Ints, policy: str, rng: np.random.Generator) -> list[Samples]:
    """The samples of each step while an engine of SLOTS runs requests in `order`, drafting K in each step."""
    queue = [int(r) for r in order if tape.output_tokens[r] > 1][::-1]  # the first token is the prompt's
    table = RequestTable(SLOTS, capacity=SLOTS)
    request, keeps = np.full(SLOTS, -1), rng.integers(1, MAX_DEPTH + 1, SLOTS)
    steps = []
    while queue or (request >= 0).any():
        for slot in np.flatnonzero(request < 0):
            if queue:
                request[slot], keeps[slot] = queue.pop(), rng.integers(1, MAX_DEPTH + 1)
                _admit(table, int(slot), tape, int(request[slot]))
        slots = np.flatnonzero(request >= 0)
        sample = _sample(tape, table, slots, request[slots])
        lengths = {
            "random": rng.integers(0, MAX_DEPTH + 1, len(slots)),
            "steady": keeps[slots],
            "static-3": np.full(len(slots), 3),
        }[policy]
        accepted = np.minimum(sample.run, lengths)
        table.record(slots, lengths, accepted)
        emitted = np.minimum(accepted + 1, sample.left)
        table.generated[slots] += emitted
        table.context[slots] += emitted
        request[slots[emitted == sample.left]] = -1
        steps.append(sample)
    return steps


def _admit(table: RequestTable, slot: int, tape: Tape, request: int) -> None:
    prompt, most = int(tape.prompt_tokens[request]), int(tape.max_tokens[request])
    table.admit(slot, context=prompt, max_tokens=most, arrival=0.0)
    table.generated[slot] = 1


def _sample(tape: Tape, table: RequestTable, slots: Ints, request: Ints) -> Samples:
    at = tape.offsets[request] + table.generated[slots]
    columns: dict[str, NDArray[Any]] = {
        "acceptance_fast": table.acceptance_fast[slots],
        "acceptance_slow": table.acceptance_slow[slots],
        "last_accepted": table.last_accepted[slots],
        "temperature": tape.temperature[request],
    }
    return Samples(
        confidence=tape.probability[at],
        history=np.stack([columns[name] for name in HISTORY_FEATURES], axis=1).astype(np.float32),
        run=np.minimum(tape.run_lengths[at], MAX_DEPTH),
        left=tape.output_tokens[request] - table.generated[slots],
        context=table.context[slots].copy(),
        request=request.copy(),
        domain=tape.domain[request].astype(np.int64),
    )
