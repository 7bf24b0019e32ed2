"""The engine's side of a swap: called between two steps, on the thread that runs them, so nothing is locked.

A swap has two phases, since several engines may serve one address: every engine prepares the policy, which can fail,
and only when all have done so does each commit it, which cannot.
"""

from __future__ import annotations

import time
from typing import Any

from faser.controller import Controller
from faser.core import Policy
from faser.costs import StepCost
from faser.policies import PolicyError, make_policy
from faser.policies.learned import LearnedPolicy
from faser.policies.policy_file import PolicyFileError, parse
from faser.serving.metrics import StepMetrics

PATIENCE_S = 10.0
"""After this long a prepared policy whose commit never came gives way to another."""


class Control:
    """Answers for one engine; every answer is a dict of JSON types, `error` in it if it was refused."""

    def __init__(self, controller: Controller, cost: StepCost, metrics: StepMetrics) -> None:
        self._controller, self._cost, self._metrics = controller, cost, metrics
        self._prepared: tuple[str, str, Policy, float] | None = None  # token, name, policy, when
        self._since = time.time()
        metrics.set_policy(controller.name)

    def handle(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """verb: status, prepare (token, policy, data), commit (token), drop (token) or bench (benched).

        data: the bytes of a policy file, None for a rule.
        """
        answer: dict[str, Any] = getattr(self, f"_{verb}")(**arguments)
        return answer

    def _status(self) -> dict[str, Any]:
        tally, benched = self._controller.tally, self._controller.benched
        return {
            "policy": self._controller.name,
            "benched": benched,
            "since": self._since,
            "decisions": tally.decisions,
            "fallbacks": dict(tally.fallbacks),
        }

    def _prepare(self, token: str, policy: str, data: bytes | None) -> dict[str, Any]:
        if not self._controller.capabilities.max_depth:
            return {"error": "this server has no draft, so it cannot speculate: it was started with --policy none"}
        if self._prepared is not None and time.monotonic() < self._prepared[3] + PATIENCE_S:
            return {"error": "another swap is under way", "busy": True}
        try:
            made: Policy = make_policy(policy, self._cost) if data is None else LearnedPolicy(parse(data, policy))
        except (PolicyError, PolicyFileError) as error:
            return {"error": str(error)}
        self._prepared = token, policy, made, time.monotonic()
        return {}

    def _commit(self, token: str) -> dict[str, Any]:
        if self._prepared is None or self._prepared[0] != token:
            return {"error": "the swap took too long and was given up"}
        (_, name, policy, _), self._prepared = self._prepared, None
        self._controller.swap(policy, name)
        self._metrics.set_policy(name)
        self._metrics.count_swap()
        self._since = time.time()
        return self._status()

    def _drop(self, token: str) -> dict[str, Any]:
        if self._prepared is not None and self._prepared[0] == token:
            self._prepared = None
        return {}

    def _bench(self, benched: bool) -> dict[str, Any]:
        self._controller.bench(benched)
        return self._status()
