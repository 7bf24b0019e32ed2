"""`ArmedController`: stands where a `Controller` does while an A/B test runs, with one of them for each arm.

By window, one arm decides for the whole engine. By request, every arm that has requests here decides as if all of them
were its own, and each request takes the length of its arm. Drafting is one pass over all, so the deepest arm's depth is
drafted, and what a request has beyond its own arm's depth is dropped (`depth_of`): its policy never sees it, but its
time was spent. Faults count against the arm whose policy made them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from faser.ab.records import Records
from faser.ab.split import Split, Turn
from faser.controller import Controller, Tally
from faser.core import Capabilities, Decision, Observation, Policy

Assigned = dict[str, Any]
"""What a request belongs to, as its line in the log says it: arm, window, washout, and by request the client's key."""

NOBODY: Assigned = {"arm": None, "window": None, "washout": False}


def assigned(split: Split, at: float, *, client: str | None = None, request: str = "") -> Assigned:
    """What a request belongs to that arrives `at` s since the epoch. client: its key, None if it has told none; then
    the `request` itself has an arm.
    """
    if split.unit == "request":
        key = None if client is None else split.pseudonym(client)
        return {**NOBODY, "arm": split.arm_of_key(request if client is None else client), "key": key}
    return split.arm_at(at)._asdict()


class ArmedController:
    """Used from one thread. split: None once the test was stopped; then the arm that was kept decides alone."""

    def __init__(self, split: Split, controllers: dict[str, Controller]) -> None:
        """controllers: by arm, all of one engine."""
        self.split: Split | None = split
        self.records = Records()
        self.arms = controllers
        self._kept: Controller | None = None
        self._assigned: dict[str, Assigned] = {}  # by request, while it is in the system
        self._live: Counter[str] = Counter()  # requests by arm
        self._depth = dict.fromkeys(controllers, 0)
        self._asked: list[Controller] = []
        self._told: dict[str, Any] = {}

    def arrive(self, request: str, said: Assigned | None, at: float) -> None:
        """A request came: `said` by the API process, or if it does not say, by id and time of arrival."""
        if self.split is None:
            return
        if said is None or said.get("arm") not in self.arms:
            said = assigned(self.split, at, request=request)
        self._assigned[request] = said
        self._live[said["arm"]] += 1

    def leave(self, request: str) -> Assigned:
        """A request is gone; what it belonged to."""
        said = self._assigned.pop(request, NOBODY)
        if said is not NOBODY:
            self._live[said["arm"]] -= 1
        return said

    def depth_of(self, request: str) -> int | None:
        """How many tokens its own arm drafts in this step, if arms share steps."""
        if self.split is None or self.split.unit == "window":
            return None
        said = self._assigned.get(request)
        return None if said is None else self._depth[said["arm"]]

    @property
    def blind(self) -> bool:
        """Whether no arm that decided last looks at confidences."""
        return all(each.blind for each in self._asked)

    def decide(self, observation: Observation, requests: Sequence[str] = ()) -> Decision:
        """A decision for the rows of `requests` [N]; never raises."""
        if self._kept is not None:
            self._asked = [self._kept]
            decision = self._kept.decide(observation)
            self._told = self._kept.told()
            return decision
        assert self.split is not None
        if self.split.unit == "request":
            return self._mixed(observation, [self._assigned.get(request, NOBODY)["arm"] for request in requests])
        return self._whole(observation, self.split.arm_at(time.time()))

    def told(self) -> dict[str, Any]:
        """What the log says of the last decision."""
        return self._told

    def stop(self, keep: str) -> None:
        """Let the arm `keep` decide alone from the next step on."""
        for name, controller in self.arms.items():
            if name != keep:
                controller.close()
        self._kept, self.split = self.arms[keep], None
        self._assigned.clear()  # what a request gets from now on is no longer its arm's
        self._live.clear()

    @property
    def name(self) -> str:
        """Of the policy in force, or of the arms."""
        if self._kept is not None:
            return self._kept.name
        return ", ".join(f"{name}={controller.name}" for name, controller in self.arms.items())

    @property
    def capabilities(self) -> Capabilities:
        """The engine's."""
        return next(iter(self.arms.values())).capabilities

    @property
    def tally(self) -> Tally:
        """Of all arms. last_seconds: of all that decided in the last step."""
        tallies = [controller.tally for controller in self.arms.values()]
        fallbacks: Counter[str] = Counter()
        for tally in tallies:
            fallbacks.update(tally.fallbacks)
        last = sum(controller.tally.last_seconds for controller in self._asked)
        return Tally(sum(tally.decisions for tally in tallies), fallbacks, last)

    @property
    def benched(self) -> bool:
        """Whether no policy is asked."""
        return all(c.benched for c in ([self._kept] if self._kept else self.arms.values()))

    def bench(self, benched: bool = True) -> None:
        """As `Controller.bench`, all arms."""
        for controller in self.arms.values():
            controller.bench(benched)

    def swap(self, policy: Policy, name: str) -> None:
        """As `Controller.swap`, once the test was stopped."""
        assert self._kept is not None
        self._kept.swap(policy, name)

    def close(self) -> None:
        """Let the policies' threads end."""
        for controller in self.arms.values():
            controller.close()

    def _whole(self, observation: Observation, turn: Turn) -> Decision:
        controller = self.arms[turn.arm]
        self._asked = [controller]
        decision = controller.decide(observation)
        self._told = {**controller.told(), **turn._asdict()}
        return decision

    def _mixed(self, observation: Observation, arms: list[str]) -> Decision:
        """arms: [N] of the rows."""
        asked = {name: controller for name, controller in self.arms.items() if self._live[name] > 0}
        lengths = np.zeros(observation.running, np.int64)
        of = np.array(arms, object)
        for name, controller in asked.items():
            decision = controller.decide(observation)
            lengths = np.where(of == name, decision.lengths, lengths)
            self._depth[name] = decision.draft_depth
        self._asked = [*asked.values()]
        fallbacks = {name: c.fallback for name, c in asked.items() if c.fallback is not None}
        self._told = {"policy": self.name, "decided": True, "fallbacks": fallbacks, **NOBODY, "arms": arms}
        return Decision(lengths, max((self._depth[name] for name in asked), default=0))
