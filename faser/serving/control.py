"""The engine's side of a swap: called between two steps, on the thread that runs them, so nothing is locked.

A swap has two phases, since several engines may serve one address: every engine prepares the policy, which can fail,
and only when all have done so does each commit it, which cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from faser.ab.arms import ArmedController
from faser.controller import Controller
from faser.core import Policy
from faser.costs import StepCost
from faser.live.history import History
from faser.policies import PolicyError, make_policy
from faser.policies.learned import LearnedPolicy
from faser.policies.policy_file import PolicyFileError, parse
from faser.serving.metrics import StepMetrics

PATIENCE_S = 10.0
"""After this long a prepared policy whose commit never came gives way to another."""


class Control:
    """Answers for one engine; every answer is a dict of JSON types, `error` in it if it was refused."""

    def __init__(
        self,
        controller: Controller | ArmedController,
        cost: StepCost,
        metrics: StepMetrics,
        history: History,
        arms: ArmedController | None = None,
    ) -> None:
        """arms: the controller, if it has several."""
        self._controller, self._cost, self._metrics, self._history = controller, cost, metrics, history
        self._arms = arms
        self._prepared: tuple[str, Callable[[], None], float] | None = None  # token, what commits it, when
        self._since = time.time()
        metrics.set_policy(controller.name)

    def handle(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """verb: status, live (since), prepare (token, policy, data), prepare_stop (token, keep), commit (token),
        drop (token), bench (benched) or records.

        data: the bytes of a policy file, None for a rule. keep: an arm of the A/B test.
        """
        answer: dict[str, Any] = getattr(self, f"_{verb}")(**arguments)
        return answer

    def _status(self) -> dict[str, Any]:
        status = {**_said(self._controller), "since": self._since}
        if self._arms is not None and self._arms.split is not None:
            status["arms"] = {name: _said(controller) for name, controller in self._arms.arms.items()}
        return status

    def _live(self, since: float) -> dict[str, Any]:
        return {**self._status(), "seconds": self._history.since(since)}

    def _prepare(self, token: str, policy: str, data: bytes | None) -> dict[str, Any]:
        if not self._controller.capabilities.max_depth:
            return {"error": "this server has no draft, so it cannot speculate: it was started with --policy none"}
        if self._arms is not None and self._arms.split is not None:
            return {"error": "an A/B test runs; end it with: faser ab stop --keep ARM", "busy": True}
        if self._busy():
            return {"error": "another swap is under way", "busy": True, "again": True}
        try:
            made: Policy = make_policy(policy, self._cost) if data is None else LearnedPolicy(parse(data, policy))
        except (PolicyError, PolicyFileError) as error:
            return {"error": str(error)}
        self._prepared = token, partial(self._controller.swap, made, policy), time.monotonic()
        return {}

    def _prepare_stop(self, token: str, keep: str) -> dict[str, Any]:
        if self._arms is None or self._arms.split is None:
            return {"error": "no A/B test runs"}
        if keep not in self._arms.arms:
            return {"error": f"keep is {keep[:40]!r}; the arms are {', '.join(self._arms.arms)}"}
        if self._busy():
            return {"error": "another stop is under way", "busy": True, "again": True}
        self._prepared = token, partial(self._arms.stop, keep), time.monotonic()
        return {}

    def _busy(self) -> bool:
        return self._prepared is not None and time.monotonic() < self._prepared[2] + PATIENCE_S

    def _commit(self, token: str) -> dict[str, Any]:
        if self._prepared is None or self._prepared[0] != token:
            return {"error": "the swap took too long and was given up"}
        (_, put_in_force, _), self._prepared = self._prepared, None
        put_in_force()
        self._metrics.set_policy(self._controller.name)
        self._metrics.count_swap()
        self._since = time.time()
        return self._status()

    def _records(self) -> dict[str, Any]:
        return {"error": "no A/B test"} if self._arms is None else self._arms.records.to_json()

    def _drop(self, token: str) -> dict[str, Any]:
        if self._prepared is not None and self._prepared[0] == token:
            self._prepared = None
        return {}

    def _bench(self, benched: bool) -> dict[str, Any]:
        self._controller.bench(benched)
        return self._status()


def _said(controller: Controller | ArmedController) -> dict[str, Any]:
    tally = controller.tally
    return {
        "policy": controller.name,
        "benched": controller.benched,
        "decisions": tally.decisions,
        "fallbacks": dict(tally.fallbacks),
    }
