"""Several policies in one engine: each decides for its own, each fails alone, and one stays."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.ab.arms import ArmedController, assigned
from faser.ab.split import Split, parse
from faser.controller import Controller, ControllerConfig
from faser.core import LOAD_FEATURES, REQUEST_FEATURES, Capabilities, Decision, Observation, Policy
from faser.costs import Curve, StepCost
from faser.live.history import History
from faser.policies import make_policy
from faser.serving.admin import Engines, RefusedError
from faser.serving.control import Control
from faser.serving.loop import Ended, Newcomer, Rows, SpeculationLoop
from faser.serving.metrics import StepMetrics
from faser.serving.step_log import StepLog

COST = StepCost(name="t", device="t", source="t", verify=Curve((1.0,), (8.0,)))
PATIENT = ControllerConfig(deadline_ms=1000, fallback_length=1, bench_after=3)


class Raises:
    """A policy that always does."""

    def decide(self, observation: Observation) -> Decision:
        raise RuntimeError(f"no idea what to do with {observation.running}")


def armed(policies: dict[str, str], unit: str = "request", **changed: float) -> ArmedController:
    split = parse([f"{name}={policy}" for name, policy in policies.items()], None, unit=unit, start=time.time())
    assert split is not None
    return controlled(replace(split, **changed), {n: make_policy(p, COST) for n, p in policies.items()})  # type: ignore[arg-type]


def controlled(split: Split, policies: dict[str, Policy]) -> ArmedController:
    made = {name: Controller(policy, Capabilities(), PATIENT, name) for name, policy in policies.items()}
    return ArmedController(split, made)


def seen(running: int) -> Observation:
    return Observation(np.zeros((running, len(REQUEST_FEATURES)), np.float32), np.zeros(len(LOAD_FEATURES), np.float32))


def arrive(arms: ArmedController, **of: str) -> None:
    for request, arm in of.items():
        arms.arrive(request, {"arm": arm, "window": None, "washout": False, "key": "k"}, time.time())


def test_a_request_takes_its_arms_length_and_the_deepest_arm_drafts() -> None:
    arms = armed({"a": "none", "b": "static:2", "c": "static:5"})
    arrive(arms, r1="b", r2="a", r3="b")
    decision = arms.decide(seen(3), ["r1", "r2", "r3"])
    assert (decision.lengths.tolist(), decision.draft_depth) == ([2, 0, 2], 2)  # nobody is c's
    assert [arms.depth_of(r) for r in ("r1", "r2", "r3", "gone")] == [2, 0, 2, None]
    arrive(arms, r4="c")  # it has a prompt only, after whose step its draft is due
    decision = arms.decide(seen(3), ["r1", "r2", "r3"])
    assert (decision.lengths.tolist(), decision.draft_depth) == ([2, 0, 2], 5)
    assert arms.depth_of("r1") == 2
    for request in ("r1", "r3", "r4"):
        assert arms.leave(request)["key"] == "k"
    assert arms.decide(seen(1), ["r2"]).draft_depth == 0
    assert arms.decide(seen(0), []).draft_depth == 0
    arms.close()


def test_a_fault_is_its_arms_alone() -> None:
    split = parse(["good=static:4", "bad=none"], None, unit="request")
    assert split is not None
    arms = controlled(split, {"good": make_policy("static:4", COST), "bad": Raises()})
    arrive(arms, r1="good", r2="bad")
    for i in range(5):
        decision = arms.decide(seen(2), ["r1", "r2"])
        assert decision.lengths.tolist() == [4, 1]
        assert arms.told()["fallbacks"] == {"bad": "raised" if i < 3 else "benched"}
    assert (arms.arms["good"].tally.decisions, arms.arms["bad"].tally.decisions) == (5, 0)
    assert arms.tally.fallbacks == {"raised": 3, "benched": 2}
    assert (arms.arms["bad"].benched, arms.arms["good"].benched, arms.benched) == (True, False, False)
    arms.close()


def test_by_window_one_arm_decides_for_all() -> None:
    arms = armed({"a": "static:1", "b": "static:6"}, "window", window_s=0.02, washout_s=0.0)
    lengths = {"a": 1, "b": 6}
    met = set()
    deadline = time.monotonic() + 20
    while len(met) < 2 and time.monotonic() < deadline:
        decision = arms.decide(seen(2), ["r1", "r2"])
        told = arms.told()
        met.add(told["arm"])
        assert decision.lengths.tolist() == [lengths[told["arm"]]] * 2
        assert arms.depth_of("r1") is None
        time.sleep(0.005)
    assert met == {"a", "b"}
    arms.close()


def test_who_is_not_told_its_arm_gets_one_by_its_id_or_its_time() -> None:
    arms = armed({"a": "none", "b": "static:2"})
    assert arms.split is not None
    arms.arrive("r1", None, 5.0)
    arms.arrive("r2", {"arm": "of another test"}, 5.0)
    assert [arms.leave(r)["arm"] for r in ("r1", "r2")] == [arms.split.arm_of_key(r) for r in ("r1", "r2")]
    by_window = replace(arms.split, unit="window", start=0.0)
    assert assigned(by_window, 61.0, request="r1") == by_window.arm_at(61.0)._asdict()
    arms.close()


def test_only_clients_that_tell_their_key_are_known_again() -> None:
    arms = armed({"a": "none", "b": "static:2"})
    assert arms.split is not None
    told = [assigned(arms.split, 5.0, client="me", request=f"r{i}") for i in range(9)]
    assert [*map(told.count, told)] == [9] * 9
    assert told[0]["key"] == arms.split.pseudonym("me")
    anew = [assigned(arms.split, 5.0, request=f"r{i}") for i in range(99)]
    assert {said["arm"] for said in anew} == {"a", "b"}
    assert {said["key"] for said in anew} == {None}
    arms.close()


def test_after_a_stop_the_kept_arm_decides_alone_and_can_be_swapped() -> None:
    arms = armed({"a": "static:1", "b": "static:6"})
    loop = SpeculationLoop(arms, COST, capacity=4, arms=arms)
    control = Control(arms, COST, loop.metrics, History(), arms)
    arrive(arms, r1="a", r2="b")
    arms.decide(seen(2), ["r1", "r2"])
    assert {*control.handle("status", {})["arms"]} == {"a", "b"}
    swap = {"token": "t", "policy": "none", "data": None}
    assert "faser ab stop --keep" in control.handle("prepare", swap)["error"]
    assert "the arms are a, b" in control.handle("prepare_stop", {"token": "t", "keep": "c"})["error"]
    assert control.handle("prepare_stop", {"token": "t", "keep": "b"}) == {}
    assert arms.split is not None  # nothing happens until all engines can
    assert control.handle("commit", {"token": "t"})["policy"] == "b"
    assert "no A/B test runs" in control.handle("prepare_stop", {"token": "t", "keep": "b"})["error"]
    decision = arms.decide(seen(2), ["r1", "r2"])
    assert (decision.lengths.tolist(), decision.draft_depth, arms.depth_of("r1")) == ([6, 6], 6, None)
    assert arms.leave("r1")["arm"] is None  # what it was given is mixed
    assert arms.tally.decisions == 3
    assert control.handle("prepare", swap) == {}
    assert control.handle("commit", {"token": "t"})["policy"] == "none"
    assert arms.decide(seen(1), ["r2"]).lengths.tolist() == [0]
    assert control.handle("records", {})["counts"]["lines"] == 1
    loop.close()


def test_a_stop_reaches_all_engines_or_none() -> None:
    engines = [armed({"a": "static:1", "b": "none"}), armed({"a": "static:1", "c": "none"})]
    controls = [Control(arms, COST, StepMetrics(), History(), arms) for arms in engines]

    class Core:
        """What vLLM's client of its engines does for `Engines`."""

        async def call_utility_all_async(self, _: str, verb: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
            return [control.handle(verb, arguments) for control in controls]

    async def stop(keep: str) -> list[dict[str, Any]]:
        return await Engines(Core()).change("prepare_stop", keep=keep)

    with pytest.raises(RefusedError, match="the arms are a, c"):
        asyncio.run(stop("b"))
    assert all(arms.split is not None for arms in engines)
    assert [answer["policy"] for answer in asyncio.run(stop("a"))] == ["a", "a"]
    assert [arms.split for arms in engines] == [None, None]
    for arms in engines:
        arms.close()


def rows(*names: str, **drafted: int) -> Rows:
    """Requests with nothing drafted, and others with as many tokens as said."""
    ids, drafts = [*names, *drafted], [0] * len(names) + [*drafted.values()]
    return Rows(ids, [9] * len(ids), [1] * len(ids), drafts, lambda _: Newcomer(64, 0.0, 0.0, excluded=False))


def ended(name: str, tokens: int, arrival: float) -> Ended:
    return Ended(request_id=name, arrival=arrival, prompt=8, tokens=tokens, status="stop" if tokens else "abort")


@pytest.mark.parametrize("split", [True, False])
def test_a_request_that_ends_leaves_a_line_and_nothing_else(tmp_path: Path, split: bool) -> None:
    arms = armed({"a": "none", "b": "static:2"}) if split else None
    plain = Controller(make_policy("static:2", COST), Capabilities(), PATIENT, "static:2")
    log = StepLog(tmp_path / "log.jsonl")
    of = SpeculationLoop(arms or plain, COST, capacity=1, log=log, arms=arms)
    arrived = time.time() - 1.0
    if arms is not None:
        arrive(arms, r1="b", r2="a", r3="b")
    of.wrote({"r1": (1, True)})  # with its prompt
    for _ in range(2):
        of.decide(rows(r1=2, r2=0), waiting=1, kv_usage=0.0, prefill_tokens=0)
        of.record({"r1": (2, 1)}, prefill_tokens=0)
        of.wrote({"r1": (2, True), "r2": (1, False), "r4": (1, False)})  # r4 ended with its first token
        of.draft(rows(r1=2), np.ones((1, 2), np.float32))
    for line in (ended("r1", 7, arrived), ended("r2", 1, arrived), ended("r3", 0, arrived)):
        of.finish(line)
    assert of.tracked == 0
    of.close()
    plain.close()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines][-4:] == ["step", "request", "request", "request"]  # their step goes first
    r1, r2, r3 = lines[-3:]
    assert (r1["drafted"], r1["verified"], r1["accepted"], r1["tokens"], r1["prompt"]) == (4, 4, 2, 7, 8)
    assert 1.0 <= r1["ttft"] <= r1["seconds"] == pytest.approx(r1["t"] - r1["arrival"], abs=1e-3)
    assert r2["ttft"] == r2["seconds"]  # its first token was its last
    assert (r3["ttft"], r3["status"], r3["tokens"], r3["drafted"]) == (None, "abort", 0, 0)
    assert [r["arm"] for r in (r1, r2, r3)] == (["b", "a", "b"] if split else [None] * 3)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["drafted"] for step in steps] == [[2, 0]] * 2
    assert [step["written"] for step in steps] == [[2, 1]] * 2
    assert not of._first
    assert [step.get("arms") for step in steps] == [["b", "a"] if split else None] * 2
    assert lines[0]["kind"] == ("split" if split else "step")
    if arms is not None:  # the ledger has what the log has
        assert arms.records.counts["lines"] == len(lines)
        assert {request.arm for request in arms.records.requests} == {"a", "b"}
        assert not arms.records.counts["unread"]


def test_a_step_without_a_split_says_who_decided(tmp_path: Path) -> None:
    controller = Controller(Raises(), Capabilities(), PATIENT, "bad")
    of = SpeculationLoop(controller, COST, capacity=1, log=StepLog(tmp_path / "log.jsonl"))
    of.decide(rows("r1"), waiting=0, kv_usage=0.0, prefill_tokens=0)
    of.record({}, prefill_tokens=0)
    of.close()
    (step,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert (step["policy"], step["decided"], step["fallback"]) == ("bad", False, "raised")
