"""The simulator: small cases by hand, and laws that hold in any case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from faser.core import MAX_DEPTH, Capabilities, Decision, DecisionError, Observation, checked
from faser.costs import Curve, StepCost
from faser.envs.arrivals import Poisson, Trace, sample_trace
from faser.envs.simulator import Simulator, capacity, run, without_speculation
from faser.tapes import Tape

COST = StepCost(
    name="test",
    device="none",
    source="made up",
    verify=Curve((0.0, 32.0, 33.0), (8.0, 8.0, 8.05)),
    sync=Curve((1.0,), (0.1,)),
    draft=Curve((1.0, 2.0), (0.3, 0.301)),
    context_ms=0.0001,
)
EVEN = StepCost(name="1 ms", device="none", source="made up", verify=Curve((1.0,), (1.0,)))


class Static:
    """Length and depth k for all."""

    def __init__(self, k: int) -> None:
        self.k = k

    def decide(self, observation: Observation) -> Decision:
        return Decision(np.full(observation.running, self.k), self.k)


class Long(Static):
    """A faulty one."""

    def __init__(self) -> None:
        super().__init__(3)

    def decide(self, observation: Observation) -> Decision:
        return Decision(np.full(observation.running, 9), 3)


class Random:
    """Any allowed decision."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def decide(self, observation: Observation) -> Decision:
        lengths = self.rng.integers(0, MAX_DEPTH + 1, observation.running)
        return Decision(lengths, int(self.rng.integers(0, MAX_DEPTH + 1)))


def tape_of(*matches: str, prompt: int = 10, limit: int = 64) -> Tape:
    """One request per string of 0s and 1s."""
    bits = np.array([b == "1" for b in "".join(matches)], np.bool_)
    return Tape(
        domains=("d",),
        domain=np.zeros(len(matches), np.uint8),
        prompt_tokens=np.full(len(matches), prompt, np.int32),
        output_tokens=np.array([len(m) for m in matches], np.int32),
        max_tokens=np.full(len(matches), limit, np.int32),
        match=bits,
        confidence=np.where(bits, 200, 50).astype(np.uint8)[:, None].repeat(MAX_DEPTH, axis=1),
        source="by hand",
    )


def at(*seconds: float) -> Trace:
    return Trace(np.array(seconds), np.arange(len(seconds)))


def test_drafts_are_verified_one_step_later_and_the_output_length_cuts_them() -> None:
    simulator = Simulator(tape_of("0110111"), EVEN, slots=1)
    simulator.start(at(5.0))
    seen = []
    while not simulator.done:
        observation = simulator.observe()
        step = simulator.step(
            checked(Decision(np.full(observation.running, 2), 3), observation.running, Capabilities())
        )
        drafted = observation.drafted.tolist()
        seen.append((drafted, step.outcome.verified.tolist(), step.outcome.accepted.tolist(), step.tokens))
    assert seen == [
        ([], [], [], 1),  # the prompt and its first token; 3 drafted for positions 1, 2, 3
        ([3], [2], [2], 3),  # both right, and one more from the target: position 3
        ([3], [2], [2], 3),  # positions 4, 5 right, then 6 from the target: the end
    ]
    assert simulator.now == pytest.approx(5.003)
    assert simulator.time_in_system_s.tolist() == pytest.approx([0.003])


def test_a_mismatch_ends_acceptance_and_a_length_of_zero_still_emits_one() -> None:
    simulator = Simulator(tape_of("0101000"), EVEN, slots=1)
    simulator.start(at(0.0))
    simulator.step(Decision(np.zeros(0, np.int64), 4))
    assert simulator.step(Decision(np.array([4]), 4)).outcome.accepted.tolist() == [1]  # positions 1; then 2
    step = simulator.step(Decision(np.array([0]), 0))
    assert (step.outcome.verified.tolist(), step.tokens) == ([0], 1)
    step = simulator.step(Decision(np.array([7]), 0))  # nothing was drafted: nothing to verify
    assert (step.outcome.verified.tolist(), step.outcome.accepted.tolist(), step.tokens) == ([0], [0], 1)


def test_a_step_takes_what_the_cost_model_says() -> None:
    simulator = Simulator(tape_of("0111", "0111", prompt=100), COST, slots=2)
    simulator.start(at(0.0, 0.0))
    step = simulator.step(Decision(np.zeros(0, np.int64), 3))
    assert step.outcome.prefill_tokens == 200
    assert step.outcome.seconds * 1e3 == pytest.approx(COST.step_ms(rows=200, batch=2, depth=3))
    step = simulator.step(Decision(np.array([3, 1]), 2))
    assert step.outcome.seconds * 1e3 == pytest.approx(COST.step_ms(rows=2 + 4, batch=2, depth=2, context=200))


def test_prompts_share_the_rows_that_decoding_leaves_in_chunks_first_come_first_served() -> None:
    simulator = Simulator(tape_of("0" * 9, "0" * 9, "0" * 9, prompt=10), EVEN, slots=3, max_batched_tokens=8)
    simulator.start(at(0.0, 0.0, 0.0))
    depth = 7
    filled: list[int] = []
    running: list[int] = []
    while len(running) < 5:
        running.append(len(simulator.slots))
        assert simulator.observe().of_load("prefill_share") > 0 or len(simulator.slots) == 3
        filled.append(simulator.step(Decision(np.full(len(simulator.slots), 7), depth)).outcome.prefill_tokens)
        depth = 0
    # 8 of the first prompt; its last 2 and 6 of the second; then 7 beside one decoding request, 4 to end the second ...
    assert filled == [8, 8, 7, 6, 1]
    assert running == [0, 0, 1, 2, 2]


def test_lengths_are_cut_when_the_rows_of_a_step_do_not_suffice() -> None:
    simulator = Simulator(tape_of(*["1" * 30] * 4, prompt=1), EVEN, slots=4, max_batched_tokens=10)
    simulator.start(at(0.0, 0.0, 0.0, 0.0))
    simulator.step(Decision(np.zeros(0, np.int64), 5))
    assert simulator.step(Decision(np.full(4, 5), 0)).outcome.verified.tolist() == [5, 1, 0, 0]


def test_the_cache_admits_only_what_fits_at_its_full_length() -> None:
    simulator = Simulator(tape_of("000", "000", "000", prompt=10, limit=5), EVEN, slots=3, kv_tokens=30)
    simulator.start(at(0.0, 0.0, 0.0))
    simulator.step(Decision(np.zeros(0, np.int64), 0))
    assert (len(simulator.slots), simulator.waiting) == (2, 1)
    assert simulator.observe().of_load("kv_usage") == pytest.approx(20 / 30)
    for _ in range(2):
        simulator.step(Decision(np.zeros(2, np.int64), 0))
    simulator.step(Decision(np.zeros(0, np.int64), 0))
    assert (len(simulator.slots), simulator.waiting) == (1, 0)


def test_the_system_integral_counts_arrivals_inside_a_step_and_skips_idle_time() -> None:
    cost = replace(EVEN, verify=Curve((1.0,), (1000.0,)))
    simulator = Simulator(tape_of("00", "0", "0"), cost, slots=4)
    simulator.start(at(1.0, 1.75, 10.0))
    steps = []
    while not simulator.done:
        steps.append(simulator.step(Decision(np.zeros(len(simulator.slots), np.int64), 0)).system_s)
    assert steps == pytest.approx([1.25, 2.0, 1.0])
    assert simulator.now == pytest.approx(11.0)
    assert simulator.time_in_system_s.tolist() == pytest.approx([2.0, 1.25, 1.0])


@pytest.mark.parametrize(("seed", "slots", "load"), [(0, 4, 0.3), (1, 8, 1.5), (2, 32, 0.8)])
def test_laws_of_any_run(seed: int, slots: int, load: float) -> None:
    tape = Tape.iid(0.6, requests=20, output_tokens=(1, 60), seed=seed)
    rng = np.random.default_rng(seed)
    trace = sample_trace(Poisson(), rng, 40, load * capacity(tape, COST, slots), tape)
    simulator = Simulator(tape, COST, slots=slots, max_batched_tokens=max(64, slots), kv_tokens=4000)
    simulator.start(trace)
    policy, tokens, system_s, clock = Random(seed), 0, 0.0, simulator.now
    while not simulator.done:
        observation = simulator.observe()
        assert observation.running == len(simulator.slots) <= slots
        assert simulator.in_system > 0
        assert ((observation.requests >= 0) & (observation.requests <= 1)).all()
        assert ((observation.load >= 0) & (observation.load <= 1)).all()
        drafted = observation.drafted
        step = simulator.step(policy.decide(observation))
        assert (step.outcome.accepted <= step.outcome.verified).all()
        assert (step.outcome.verified <= drafted).all()
        assert step.outcome.verified.sum() + observation.running + step.outcome.prefill_tokens <= max(64, slots)
        assert simulator.now > clock
        tokens, system_s, clock = tokens + step.tokens, system_s + step.system_s, simulator.now
    assert tokens == tape.output_tokens[trace.row].sum()
    assert system_s == pytest.approx(simulator.time_in_system_s.sum())  # the integral is the sum of times in system
    assert len(simulator.slots) == simulator.waiting == 0
    assert simulator._kv_free == 4000
    assert sorted(simulator._free) == list(range(slots))


@pytest.mark.parametrize(("slots", "load", "kv"), [(2, 0.2, 4000), (8, 0.9, 4000), (8, 2.0, 4000), (8, 1.5, 1000)])
def test_the_fast_baseline_equals_plain_steps_without_speculation(slots: int, load: float, kv: int) -> None:
    tape = Tape.iid(0.6, requests=30, output_tokens=(1, 80), prompt_tokens=(5, 90))
    trace = sample_trace(Poisson(), np.random.default_rng(1), 60, load * capacity(tape, COST, slots), tape)
    simulator = Simulator(tape, COST, slots=slots, max_batched_tokens=100, kv_tokens=kv)
    fast = without_speculation(simulator, trace)
    finished = simulator.time_in_system_s.copy()
    simulator.start(trace)
    steps = []
    while not simulator.done:
        steps.append(simulator.step(Decision(np.zeros(len(simulator.slots), np.int64), 0)))
    np.testing.assert_allclose(finished, simulator.time_in_system_s, rtol=1e-9)
    assert fast.system_s == pytest.approx(sum(s.system_s for s in steps), rel=1e-9)
    assert fast.busy_s == pytest.approx(sum(s.outcome.seconds for s in steps), rel=1e-9)


def test_capacity_is_what_a_full_engine_reaches() -> None:
    tape = Tape.iid(0.5, requests=400)
    trace = Trace(np.zeros(400), np.arange(400))
    cost = replace(EVEN, verify=Curve((0.0, 1.0), (5.0, 5.01)))
    busy = without_speculation(Simulator(tape, cost, slots=16), trace).busy_s
    assert 400 / busy == pytest.approx(capacity(tape, cost, 16), rel=0.05)


def test_more_of_a_perfect_draft_is_faster_and_of_a_hopeless_one_slower() -> None:
    ratios = {}
    for rate, k in itertools.product((0.0, 1.0), (0, 1, 3, 7)):
        tape = Tape.iid(rate, requests=20, output_tokens=(20, 60))
        trace = sample_trace(Poisson(), np.random.default_rng(3), 20, 0.5, tape)
        summary = run(Static(k), trace, tape, COST, slots=8)
        ratios[rate, k] = summary.ratio_to_none
        assert summary.mean_length == pytest.approx(k)
        assert summary.mean_depth == pytest.approx(k)
        assert summary.finished == 20
        assert summary.mean_accepted <= k * rate
    assert ratios[0.0, 0] == pytest.approx(1.0)
    assert ratios[0.0, 0] < ratios[0.0, 1] < ratios[0.0, 3] < ratios[0.0, 7]
    assert ratios[1.0, 0] > ratios[1.0, 1] > ratios[1.0, 3] > ratios[1.0, 7]


def test_acceptance_of_a_fixed_length_is_that_of_the_geometric_law() -> None:
    tape = Tape.iid(0.6, requests=200, output_tokens=(400, 400), seed=5)
    trace = Trace(np.zeros(200), np.arange(200))
    for k in (1, 4):
        summary = run(Static(k), trace, tape, COST, slots=200)
        assert summary.mean_accepted == pytest.approx(sum(0.6**j for j in range(1, k + 1)), rel=0.03)


def test_run_clamps_to_capabilities_and_refuses_a_faulty_decision() -> None:
    tape = Tape.iid(0.9, requests=5)
    trace = Trace(np.zeros(5), np.arange(5))
    assert run(Static(7), trace, tape, COST, capabilities=Capabilities(max_depth=2)).mean_depth == 2.0
    with pytest.raises(DecisionError, match="lengths span 9"):
        run(Long(), trace, tape, COST)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"slots": 8, "max_batched_tokens": 7}, "max_batched_tokens is 7; allowed: 8"),
        ({"kv_tokens": 73}, "kv_tokens is 73; the longest request needs 74"),
    ],
)
def test_settings_that_cannot_work_are_named(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Simulator(tape_of("00"), EVEN, **wrong)
