"""The live loop, fed as a scheduler feeds it: what it tells the policy, what it counts, and that it forgets."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from faser.controller import Controller, ControllerConfig
from faser.core import MAX_DEPTH, Capabilities, Decision, Observation
from faser.costs import Curve, StepCost
from faser.policies.static import Static
from faser.serving.loop import Ended, Newcomer, Rows, SpeculationLoop
from faser.serving.step_log import StepLog

COST = StepCost(name="t", device="t", source="t", verify=Curve((1.0,), (8.0,)))


class Recorder:
    """A policy that keeps copies of what it saw and asks for two tokens."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(Observation(observation.requests.copy(), observation.load.copy()))
        return Decision(np.full(observation.running, 2), 2)


def rows(*names: str, **drafted: int) -> Rows:
    """Requests with nothing drafted, and others with as many tokens as said."""
    ids, drafts = [*names, *drafted], [0] * len(names) + [*drafted.values()]
    return Rows(ids, [11] * len(ids), [1] * len(ids), drafts, lambda _: Newcomer(64, 0.0, 0.0, excluded=False))


def ended(name: str) -> Ended:
    return Ended(request_id=name, arrival=0.0, prompt=3, tokens=2, status="abort")


def loop(policy: Recorder, *, capacity: int = 4, log: StepLog | None = None) -> SpeculationLoop:
    controller = Controller(policy, Capabilities(), ControllerConfig(deadline_ms=1000))
    return SpeculationLoop(controller, COST, capacity=capacity, log=log)


def step(of: SpeculationLoop, of_rows: Rows, verdicts: dict[str, tuple[int, int]]) -> Decision:
    decision = of.decide(of_rows, waiting=0, kv_usage=0.0, prefill_tokens=0)
    of.record(verdicts, prefill_tokens=0)
    return decision


def test_a_draft_is_seen_by_the_next_decision_up_to_what_is_left_of_it() -> None:
    policy = Recorder()
    of = loop(policy)
    step(of, rows("a", "b"), {})
    confidence = np.array([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]], np.float32)
    of.draft(rows(a=3, b=1), confidence)
    step(of, rows(b=1, a=2), {"a": (2, 1)})  # a grammar cut one of a's since
    b, a = policy.seen[-1].confidence
    assert b.tolist() == pytest.approx([0.6, 0, 0, 0, 0, 0, 0])
    assert a.tolist() == pytest.approx([0.9, 0.8, 0, 0, 0, 0, 0])
    assert policy.seen[-1].drafted.tolist() == [1, 2]


def test_a_draft_without_confidences_is_seen_as_hopeless() -> None:
    policy = Recorder()
    of = loop(policy)
    of.draft(rows(a=MAX_DEPTH), np.zeros((1, 0), np.float32))
    step(of, rows(a=MAX_DEPTH), {})
    assert not policy.seen[-1].survival.any()


def test_verdicts_reach_their_request_and_no_other() -> None:
    policy = Recorder()
    of = loop(policy)
    for _ in range(20):
        step(of, rows("good", "bad", "idle"), {"bad": (2, 0), "good": (2, 2)})
    step(of, rows("good", "bad", "idle"), {})
    good, bad, idle = policy.seen[-1].request("acceptance_slow")
    assert bad < idle < good


def test_a_request_that_ends_in_mid_step_is_forgotten_and_its_slot_starts_anew() -> None:
    policy = Recorder()
    of = loop(policy, capacity=1)
    of.decide(rows("a", "b"), waiting=0, kv_usage=0.0, prefill_tokens=0)
    of.forget("a")  # an abort while the step runs
    of.forget("a")
    of.forget("never seen")
    of.record({"a": (2, 0), "b": (2, 2)}, prefill_tokens=0)
    step(of, rows("b", "c"), {})
    b, c = policy.seen[-1].request("last_accepted")
    assert b == 1.0
    assert c not in (0.0, 1.0)  # a newcomer's, not the aborted one's


def test_more_requests_than_slots_are_no_fault() -> None:
    policy = Recorder()
    of = loop(policy, capacity=1)
    names = [f"r{i}" for i in range(9)]
    assert step(of, rows(*names), {}).lengths.tolist() == [2] * 9
    assert policy.seen[-1].running == 9


def test_two_thousand_requests_that_end_at_any_time_leave_nothing_behind() -> None:
    """At their end, aborted while they wait, in mid-step, after it; some twice, as a client and a limit may."""
    rng, of, slots = np.random.default_rng(0), loop(Recorder(), capacity=8), 16
    live: list[str] = []
    for n in range(2000):
        live.append(f"r{n}")
        if n % 7 == 0:
            of.finish(ended(f"waits-{n}"))
        of.decide(rows(*live), waiting=0, kv_usage=0.0, prefill_tokens=0)
        while live and (len(live) > 12 or rng.random() < 0.3):
            of.finish(ended(live.pop(int(rng.integers(len(live))))))
        of.record(dict.fromkeys(live, (1, 1)), prefill_tokens=0)
        of.wrote(dict.fromkeys(live, (1, True)))
        of.draft(rows(**dict.fromkeys(live, 1)), np.full((len(live), 1), 0.5, np.float32))
        if live and rng.random() < 0.5:
            for _ in range(2):
                of.finish(ended(live[-1]))
            live.pop()
    for name in live:
        of.finish(ended(name))
    assert of.tracked == 0
    assert not of._slot
    assert not of._first
    assert sorted(of._free) == [*range(slots)]


def test_the_log_has_a_line_for_every_step(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    of = loop(Recorder(), log=StepLog(log))
    step(of, rows("a", "b"), {"b": (2, 1)})
    of.decide(rows(), waiting=3, kv_usage=0.5, prefill_tokens=100)
    of.record({}, prefill_tokens=77)
    of.close()
    first, second = map(json.loads, log.read_text().splitlines())
    assert (first["running"], first["verified"], first["accepted"], first["depth"]) == (2, [0, 2], [0, 1], 2)
    assert (second["running"], second["waiting"], second["prefill"]) == (0, 3, 77)
    assert first["ms"] > 0


def test_a_step_is_told_of_while_the_next_one_runs(tmp_path: Path) -> None:
    """In `account`, before those who ended in it; at the latest when the next decision is made."""
    log = tmp_path / "steps.jsonl"
    of = loop(Recorder(), log=StepLog(log))
    for n in range(3):
        step(of, rows(f"r{n}", "stays"), {})
        of.finish(ended(f"r{n}"))
    of.decide(rows("stays"), waiting=0, kv_usage=0.0, prefill_tokens=0)
    told = []
    for _ in range(2):
        told.append(sum(second["steps"] for second in of.history.since(0.0)))
        of.account()
    assert told == [2, 3]  # the third waited
    of.close()
    lines = [(line["kind"], line["request"]) for line in map(json.loads, log.read_text().splitlines())]
    assert lines == [each for n in range(3) for each in (("step", [f"r{n}", "stays"]), ("request", f"r{n}"))]


def decide(of: SpeculationLoop, of_rows: Rows) -> Decision:
    return of.decide(of_rows, waiting=0, kv_usage=0.0, prefill_tokens=0)


def test_verdicts_of_two_steps_under_way_come_in_the_order_of_decisions(tmp_path: Path) -> None:
    """Each is logged once, and their times do not overlap."""
    log = tmp_path / "steps.jsonl"
    of = loop(Recorder(), log=StepLog(log))
    began = time.perf_counter()
    decide(of, rows("a"))
    decide(of, rows("a", "b"))
    for accepted in range(1, 5):
        time.sleep(0.01)
        of.record({"a": (accepted, accepted)}, prefill_tokens=accepted)
        of.wrote({"a": (accepted + 1, True)})
        decide(of, rows("a", "b"))
    took = 1000.0 * (time.perf_counter() - began)
    of.record({}, prefill_tokens=5)
    of.close()
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [s["prefill"] for s in steps] == [1, 2, 3, 4, 5]
    assert [s["running"] for s in steps] == [1, 2, 2, 2, 2]
    assert [s["accepted"][0] for s in steps] == [1, 2, 3, 4, 0]
    assert [s["written"][0] for s in steps] == [2, 3, 4, 5, 0]
    assert all(s["ms"] > 5 for s in steps[:4])
    assert sum(s["ms"] for s in steps[:4]) <= took


def test_a_verdict_of_one_who_has_ended_is_not_that_of_who_has_its_slot() -> None:
    policy = Recorder()
    of = loop(policy, capacity=1)
    decide(of, rows("a"))
    decide(of, rows("a"))  # a's rows are in the next step already
    of.record({"a": (2, 2)}, prefill_tokens=0)
    slot = of._slot["a"]
    of.forget("a")
    decide(of, rows("b"))
    assert of._slot["b"] == slot
    for _ in range(2):
        of.record({"a": (7, 0)}, prefill_tokens=0)
    decide(of, rows("b"))
    (b,) = policy.seen[-1].request("last_accepted")
    assert b > 0.5


def test_a_decision_before_the_drafts_are_there_goes_by_the_averages() -> None:
    policy = Recorder()
    of = loop(policy)
    for _ in range(30):
        step(of, rows(good=2, bad=2), {"good": (2, 2), "bad": (2, 0)})
        of.draft(rows(good=2, bad=2), np.full((2, 2), 0.5, np.float32))
    decide(of, rows(good=2, bad=2))
    assert policy.seen[-1].survival.tolist() == [[0.5, 0.25, 0, 0, 0, 0, 0]] * 2
    decide(of, rows(good=2, bad=2))
    good, bad = policy.seen[-1].survival
    assert good[0] > 0.9
    assert bad[0] < 0.3
    assert good[1] == pytest.approx(good[0] ** 2)
    assert not policy.seen[-1].survival[:, 2:].any()  # two were drafted


def test_who_looks_at_confidences_waits_where_they_may_save_more_than_a_pause() -> None:
    dear = StepCost(name="t", device="t", source="t", verify=Curve((1.0, 64.0), (8.0, 8.0 + 63 * 0.1)))
    seeing = SpeculationLoop(Controller(Recorder(), Capabilities()), dear, capacity=64)
    blind = SpeculationLoop(Controller(Static(4), Capabilities()), dear, capacity=64)
    assert [n for n in range(1, 17) if seeing.waits(n, 4, 0)] == [*range(6, 17)]  # n x 4 rows of 0.1 ms, over 2 ms
    assert not seeing.waits(16, 0, 0)
    assert not blind.waits(16, 4, 0)
    for each in (seeing, blind):
        each.close()
