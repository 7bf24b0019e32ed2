"""The nouns of FASER: what a policy sees, what it decides, and what comes of it.

One decision stands behind this file: a policy is one method, `decide(observation) -> Decision`, over plain numpy
arrays. The simulator, the live engine and every policy share these types, so whatever runs in one runs in the
others.

Symbols: N running requests (decoding, not prefilling), K = MAX_DEPTH, F request features, L load features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

MAX_DEPTH = 7
"""K: the most tokens that may be drafted for a request in one step; an engine may be set lower."""

MAX_FRONTIER = 4
"""W: the largest frontier. 0: verify, then draft; w >= 1: draft w tokens past the chunk that is being verified."""

REQUEST_FEATURES: tuple[str, ...] = (
    *(f"confidence_{j}" for j in range(1, MAX_DEPTH + 1)),
    *(f"survival_{j}" for j in range(1, MAX_DEPTH + 1)),
    "drafted",
    "acceptance_fast",
    "acceptance_slow",
    "last_accepted",
    "context",
    "budget",
    "lateness",
    "excluded",
)
"""Columns of `Observation.requests`, all in [0, 1]; `RequestTable.observe` documents how each is made."""

LOAD_FEATURES: tuple[str, ...] = (
    "running",
    "waiting",
    "kv_usage",
    "prefill_share",
    "step_floor",
    "verify_cost",
    "verify_cost_full",
    "draft_cost",
    "row_price",
    *(f"depth_value_{d}" for d in range(MAX_DEPTH + 1)),
)
"""Entries of `Observation.load`, all in [0, 1]; `RequestTable.observe` documents how each is made."""

_R = {name: i for i, name in enumerate(REQUEST_FEATURES)}
_L = {name: i for i, name in enumerate(LOAD_FEATURES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can carry out. Decisions are clamped to it, so a policy runs on an engine that lacks a feature."""

    max_depth: int = MAX_DEPTH
    max_frontier: int = 0
    pruning: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth is {self.max_depth}; allowed: 0 to {MAX_DEPTH}")
        if not 0 <= self.max_frontier <= MAX_FRONTIER:
            raise ValueError(f"max_frontier is {self.max_frontier}; allowed: 0 to {MAX_FRONTIER}")


@dataclass(frozen=True, slots=True)
class Observation:
    """The engine before one step: `requests` [N, F] and `load` [L], float32 in [0, 1]; a policy only reads them."""

    requests: Floats
    load: Floats

    @property
    def running(self) -> int:
        """N: requests that decode in this step."""
        return len(self.requests)

    @property
    def confidence(self) -> Floats:
        """[N, K] largest softmax probability of each drafted token; 0 past the drafted ones."""
        return self.requests[:, :MAX_DEPTH]

    @property
    def survival(self) -> Floats:
        """[N, K] estimated probability that the first j tokens are all accepted; see `RequestTable.observe_all`."""
        return self.requests[:, MAX_DEPTH : 2 * MAX_DEPTH]

    @property
    def drafted(self) -> Ints:
        """[N] number of tokens drafted for each request, 0..K."""
        return np.rint(self.requests[:, _R["drafted"]] * MAX_DEPTH).astype(np.int64)

    def request(self, feature: str) -> Floats:
        """[N] one column of `requests` by its name in REQUEST_FEATURES."""
        return self.requests[:, _R[feature]]

    def of_load(self, feature: str) -> float:
        """One entry of `load` by its name in LOAD_FEATURES."""
        return float(self.load[_L[feature]])


@dataclass(frozen=True, slots=True)
class Observations:
    """Those of E engines at once: `requests` [M, F], engine e's at rows starts[e] to starts[e + 1]; `load` [E, L]."""

    requests: Floats
    load: Floats
    starts: Ints

    def of(self, engine: int) -> Observation:
        """What the policy of one engine sees (views)."""
        return Observation(self.requests[self.starts[engine] : self.starts[engine + 1]], self.load[engine])


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do in one step.

    lengths: [N] int, 0..K: at most how many of each request's drafted tokens are verified now; more than were drafted
        is the same as all of them.
    draft_depth: 0..K: how many tokens to draft, for every request, at the end of this step.
    frontier: 0..W.
    """

    lengths: Ints
    draft_depth: int
    frontier: int = 0


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of one step.

    seconds: duration of the step.
    verified, accepted: [N] int, in the observation's row order: drafted tokens verified, and accepted of those.
    draft_depth: tokens drafted per request at its end.
    prefill_tokens: prompt tokens computed in it.
    """

    seconds: float
    verified: Ints
    accepted: Ints
    draft_depth: int
    prefill_tokens: int

    @property
    def empty(self) -> bool:
        """Whether nothing ran in it: a server takes one such step after its last request. Its depth drafts nothing."""
        return not len(self.verified) and not self.prefill_tokens


class Policy(Protocol):
    """The one method that an engine asks of a policy. It may keep state, but not the arrays that it is given.

    With a class attribute `blind = True` it says that it looks at no confidence or survival, nor at `row_price` and
    `depth_value_d`, which are made of them: nobody need wait for those of the newest drafts.
    """

    def decide(self, observation: Observation) -> Decision: ...


class DecisionError(ValueError):
    """A decision that no engine can carry out; `reason` is a short label for counters."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def checked(decision: Decision, running: int, capabilities: Capabilities) -> Decision:
    """`decision` with its lengths as [N] int64, depth and frontier clamped to `capabilities`.

    Raises DecisionError (reason "shape", "nan" or "range") when the policy is at fault: wrong shape, not whole numbers,
    negative, or over MAX_DEPTH / MAX_FRONTIER.
    """
    raw = np.asarray(decision.lengths)
    if raw.shape != (running,):
        raise DecisionError("shape", f"lengths has shape {raw.shape}; {(running,)} expected")
    scalars = np.array([decision.draft_depth, decision.frontier], dtype=np.float64)
    if raw.dtype.kind not in "iuf" or not (np.isfinite(raw).all() and np.isfinite(scalars).all()):
        raise DecisionError("nan", f"lengths ({raw.dtype}), draft_depth or frontier is not a finite number")
    lengths = raw.astype(np.int64)
    if (lengths != raw).any() or (scalars != np.rint(scalars)).any():
        raise DecisionError("nan", "lengths, draft_depth and frontier must be whole numbers")
    if running and not 0 <= lengths.min() <= lengths.max() <= MAX_DEPTH:
        raise DecisionError("range", f"lengths span {lengths.min()}..{lengths.max()}; allowed: 0..{MAX_DEPTH}")
    depth, frontier = int(scalars[0]), int(scalars[1])
    if not 0 <= depth <= MAX_DEPTH or not 0 <= frontier <= MAX_FRONTIER:
        raise DecisionError(
            "range",
            f"draft_depth {depth} (allowed: 0..{MAX_DEPTH}), frontier {frontier} (allowed: 0..{MAX_FRONTIER})",
        )
    return Decision(lengths, min(depth, capabilities.max_depth), min(frontier, capabilities.max_frontier))
