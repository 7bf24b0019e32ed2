"""One policy in a live loop: whatever the policy does, the engine gets a decision in time.

The policy runs on a thread of its own. When it raises, returns nonsense or overruns its deadline, that step uses a
static length and a counter says why; after `bench_after` faults in a row the policy is benched. A thread, because
nothing else can bound a call that hangs; the hand-over costs some tens of microseconds. A policy that takes over gets
a new thread, so one that hangs cannot keep its successor waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from faser.core import Capabilities, Decision, DecisionError, Observation, Policy, checked

logger = logging.getLogger("faser")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """How long a policy may think, and what happens when it fails."""

    deadline_ms: float = 20.0
    fallback_length: int = 0
    bench_after: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.deadline_ms <= 1000:
            raise ValueError(f"deadline_ms is {self.deadline_ms}; allowed: over 0, at most 1000")
        if not 0 <= self.fallback_length <= 7:
            raise ValueError(f"fallback_length is {self.fallback_length}; allowed: 0 to 7")
        if self.bench_after < 1:
            raise ValueError(f"bench_after is {self.bench_after}; allowed: at least 1")


@dataclass(slots=True)
class Tally:
    """What a controller has done so far."""

    decisions: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    last_seconds: float = 0.0


class Controller:
    """Asks `policy` and falls back. Used from one thread.

    fallback: why the last decision was not the policy's own; None if it was.
    """

    fallback: str | None = None

    def __init__(
        self, policy: Policy, capabilities: Capabilities, config: ControllerConfig | None = None, name: str = ""
    ) -> None:
        """name: of the policy, for people."""
        self.policy, self.name = policy, name
        self.capabilities = capabilities
        self.config = config or ControllerConfig()
        self.tally = Tally()
        self.benched = False
        self._faults_in_a_row = 0
        self._quiet_until = 0.0
        self._worker = _Worker(policy)

    @property
    def blind(self) -> bool:
        """Whether decisions are made without confidences: see `faser.core.Policy`."""
        return self.benched or getattr(self.policy, "blind", False)

    def decide(self, observation: Observation, _requests: Sequence[str] = ()) -> Decision:
        """A decision within the engine's capabilities, within `deadline_ms` and a thread switch; never raises."""
        if self.benched:
            return self._fall_back(observation, "benched")
        started = time.perf_counter()
        try:
            raw = self._worker.ask(observation, self.config.deadline_ms / 1000)
            decision = checked(raw, observation.running, self.capabilities)
        except _LateError:
            return self._fault(observation, "deadline", f"no decision within {self.config.deadline_ms:g} ms")
        except DecisionError as error:
            return self._fault(observation, error.reason, str(error))
        except Exception as error:  # a policy may raise anything; it must not reach the engine
            return self._fault(observation, "raised", f"{type(error).__name__}: {error}")
        self.tally.last_seconds = time.perf_counter() - started
        self.tally.decisions += 1
        self._faults_in_a_row, self.fallback = 0, None
        return decision

    def told(self) -> dict[str, Any]:
        """What the log says of the last decision."""
        why = {"decided": True} if self.fallback is None else {"decided": False, "fallback": self.fallback}
        return {"policy": self.name, **why}

    def swap(self, policy: Policy, name: str) -> None:
        """Let `policy` decide from the next step on; it starts with no faults and not benched."""
        self._worker.close()
        self.policy, self.name, self._worker = policy, name, _Worker(policy)
        self.bench(False)

    def bench(self, benched: bool = True) -> None:
        """Use the fallback length until told otherwise, or ask the policy again."""
        self.benched = benched
        self._faults_in_a_row = 0

    def close(self) -> None:
        """Let the policy's thread end."""
        self._worker.close()

    def _fault(self, observation: Observation, reason: str, message: str) -> Decision:
        self._faults_in_a_row += 1
        now = time.monotonic()
        if self._faults_in_a_row >= self.config.bench_after:
            self.benched = True
            logger.error("policy benched after %d faults in a row; last: %s", self._faults_in_a_row, message)
        elif now >= self._quiet_until:
            self._quiet_until = now + 10.0
            logger.warning("policy fault (%s): %s; using length %d", reason, message, self.config.fallback_length)
        return self._fall_back(observation, reason)

    def _fall_back(self, observation: Observation, reason: str) -> Decision:
        self.tally.fallbacks[reason] += 1
        self.fallback = reason
        length = min(self.config.fallback_length, self.capabilities.max_depth)
        return Decision(np.full(observation.running, length), length)


class _LateError(Exception):
    pass


class _Worker:
    """A daemon thread that calls `policy.decide` on what it is handed, one question at a time."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._questions: SimpleQueue[Observation | None] = SimpleQueue()
        self._answers: SimpleQueue[Decision | Exception] = SimpleQueue()
        self._unanswered = 0
        threading.Thread(target=self._run, name="faser-policy", daemon=True).start()

    def ask(self, observation: Observation, timeout_s: float) -> Decision:
        """The policy's decision. Raises what it raised, or _LateError; while an old question hangs, at once."""
        while self._unanswered and not self._answers.empty():
            self._answers.get()  # the answer to a question whose step has passed
            self._unanswered -= 1
        if self._unanswered:
            raise _LateError
        self._questions.put(observation)
        self._unanswered = 1
        try:
            answer = self._answers.get(timeout=timeout_s)
        except Exception:  # queue.Empty
            raise _LateError from None
        self._unanswered = 0
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._questions.put(None)

    def _run(self) -> None:
        while (observation := self._questions.get()) is not None:
            try:
                answer: Decision | Exception = self._policy.decide(observation)
            except Exception as error:  # handed to the asking thread
                answer = error
            self._answers.put(answer)
