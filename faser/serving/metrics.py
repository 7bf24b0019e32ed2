"""FASER's Prometheus series, in the same `/metrics` as vLLM's.

The scheduler runs in an engine process and `/metrics` in an API process, so `faser serve` turns on
prometheus_client's own multiprocess mode (PROMETHEUS_MULTIPROC_DIR): each process writes its counts, and the
endpoint adds them up, over several engines and API servers too. No series is labelled by request.
"""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from faser.controller import Tally
from faser.core import MAX_DEPTH, Ints, StepOutcome

FALLBACKS = ("benched", "deadline", "nan", "raised", "range", "shape")
"""Reasons that are there from the start: the first of a kind would otherwise be no increase."""

DECISION_BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)


class StepMetrics:
    """Counts steps. `faser:steps` counts the steps of an engine in which some request decoded."""

    def __init__(self) -> None:
        own = CollectorRegistry()  # each engine's: what is shared is the multiprocess folder
        self._steps = Counter("faser:steps", "Engine steps in which a request decoded.", registry=own)
        self._decisions = Counter(
            "faser:decisions",
            "Decisions taken by the policy; steps in which no request decodes have one too.",
            registry=own,
        )
        self._fallbacks = Counter(
            "faser:fallbacks", "Steps that used the fallback length, by reason.", ["reason"], registry=own
        )
        for reason in FALLBACKS:
            self._fallbacks.labels(reason)
        self._seconds = Histogram(
            "faser:decision_seconds", "Time to a decision.", buckets=DECISION_BUCKETS, registry=own
        )
        self._drafted = Counter("faser:drafted_tokens", "Tokens drafted.", registry=own)
        self._verified = Counter("faser:verified_tokens", "Drafted tokens verified by the target.", registry=own)
        self._accepted = Counter("faser:accepted_tokens", "Drafted tokens accepted by the target.", registry=own)
        self._tracked = Gauge(
            "faser:tracked_requests", "Requests with state here.", multiprocess_mode="livesum", registry=own
        )
        lengths = Counter(
            "faser:verify_length", "Request-steps by drafted tokens verified, 0 included.", ["length"], registry=own
        )
        depths = Counter("faser:draft_depth", "Steps by tokens drafted for each request.", ["depth"], registry=own)
        self._lengths = [lengths.labels(str(k)) for k in range(MAX_DEPTH + 1)]
        self._depths = [depths.labels(str(k)) for k in range(MAX_DEPTH + 1)]
        self._swaps = Counter("faser:policy_swaps", "Policies that took over in a running server.", registry=own)
        self._info = Gauge(
            "faser:policy_info", "1 for the policy in force.", ["policy"], multiprocess_mode="livemax", registry=own
        )
        self._arm_rows = Counter("faser:arm_request_steps", "Request-steps by arm of the test.", ["arm"], registry=own)
        self._arm_verified = Counter(
            "faser:arm_verified_tokens", "Drafted tokens verified, by arm.", ["arm"], registry=own
        )
        self._arm_accepted = Counter(
            "faser:arm_accepted_tokens", "Drafted tokens accepted, by arm.", ["arm"], registry=own
        )
        self._policy: str | None = None
        self._lost = Counter("faser:log_lines_lost", "Lines that the decision log could not write.", registry=own)
        self._seen_lost = 0
        self._seen_decisions = 0
        self._seen_fallbacks: dict[str, int] = {}

    def count_decision(self, tally: Tally) -> None:
        """Add what `tally` has gained since the last call."""
        if tally.decisions > self._seen_decisions:
            self._decisions.inc(tally.decisions - self._seen_decisions)
            self._seen_decisions = tally.decisions
            self._seconds.observe(tally.last_seconds)
        for reason, count in tally.fallbacks.items():
            if count > (seen := self._seen_fallbacks.get(reason, 0)):
                self._fallbacks.labels(reason).inc(count - seen)
                self._seen_fallbacks[reason] = count

    def count_step(self, outcome: StepOutcome) -> None:
        """Add one step."""
        if not outcome.empty:
            self._depths[outcome.draft_depth].inc()
        if len(outcome.verified) == 0:
            return
        self._steps.inc()
        for length, count in enumerate(np.bincount(outcome.verified, minlength=1)):
            if count:
                self._lengths[length].inc(float(count))
        self._verified.inc(float(outcome.verified.sum()))
        self._accepted.inc(float(outcome.accepted.sum()))

    def count_arm(self, arm: str, verified: Ints, accepted: Ints) -> None:
        """Add a step's request-steps of one arm of a test, [n] by those of its requests."""
        self._arm_rows.labels(arm).inc(len(verified))
        self._arm_verified.labels(arm).inc(float(verified.sum()))
        self._arm_accepted.labels(arm).inc(float(accepted.sum()))

    def count_drafted(self, tokens: int) -> None:
        """Add tokens that the draft proposed."""
        self._drafted.inc(tokens)

    def count_lost(self, lines: int) -> None:
        """Add what `lines`, all that the log has lost so far, has gained since the last call."""
        if lines > self._seen_lost:
            self._lost.inc(lines - self._seen_lost)
            self._seen_lost = lines

    def set_policy(self, name: str) -> None:
        """Which policy is in force."""
        if self._policy is not None:
            self._info.labels(self._policy).set(0)
        self._policy = name
        self._info.labels(name).set(1)

    def count_swap(self) -> None:
        """Add one policy that took over."""
        self._swaps.inc()

    def set_tracked(self, requests: int) -> None:
        """How many requests any state is kept of."""
        self._tracked.set(requests)
