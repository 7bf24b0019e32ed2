"""The simulator: small cases by hand, and laws that hold in any case."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from faser.core import MAX_DEPTH, Capabilities, Decision, DecisionError, Observation, checked
from faser.costs import Curve, StepCost
from faser.envs.arrivals import Poisson
from faser.envs.engines import BLOCK, Engines
from faser.envs.simulator import Simulator, capacity, replay, run, without_speculation
from faser.envs.trace import Trace, sample_trace
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


def test_the_cache_admits_while_prompts_fit_and_the_last_admitted_gives_way_when_it_is_full() -> None:
    # 40 tokens of prompt: three blocks with the 8 ahead. The cache has seven, so two are admitted; after the first
    # token a request holds 41, from 49 on it needs a fourth block, and only one of the two can have the seventh.
    simulator = Simulator(tape_of(*["0" * 20] * 3, prompt=40), EVEN, slots=3, kv_tokens=7 * BLOCK)
    simulator.start(at(0.0, 0.0, 0.0))
    seen, prefill = [], []
    while not simulator.done:
        seen.append((len(simulator.slots), simulator.waiting))
        step = simulator.step(Decision(np.zeros(len(simulator.slots), np.int64), 0))
        prefill.append(step.outcome.prefill_tokens)
    assert seen[:2] == [(0, 3), (2, 1)]
    # When both have 41 + 8 tokens to hold, the second goes back, and again once each time that the first one ends.
    gone = seen.index((1, 2))
    assert prefill[0] == 80
    assert prefill[gone] == 0  # nobody is admitted in the step after
    assert sum(prefill) > 3 * 40  # some prompt was computed again, its output with it
    assert np.isfinite(simulator.time_in_system_s).all()
    assert simulator.engines._used[0] == 0


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
    assert simulator.engines._used[0] == 0
    assert simulator.engines._free.all()


@pytest.mark.parametrize(
    ("slots", "load", "kv", "host"),
    [(2, 0.2, 8000, 0.0), (8, 0.9, 8000, 8.02), (8, 2.0, 8000, 9.0), (8, 1.5, 1000, 0.0)],
)
def test_the_fast_baseline_equals_plain_steps_without_speculation(
    slots: int, load: float, kv: int, host: float
) -> None:
    tape = Tape.iid(0.6, requests=30, output_tokens=(1, 80), prompt_tokens=(5, 90))
    cost = replace(COST, host_ms=host, request=Curve((1.0, 8.0), (0.0, 0.3)))
    trace = sample_trace(Poisson(), np.random.default_rng(1), 60, load * capacity(tape, cost, slots), tape)
    fast = without_speculation(trace, tape, cost, slots=slots, max_batched_tokens=100, kv_tokens=kv)
    simulator = Simulator(tape, cost, slots=slots, max_batched_tokens=100, kv_tokens=kv)
    simulator.start(trace)
    steps = []
    while not simulator.done:
        steps.append(simulator.step(Decision(np.zeros(len(simulator.slots), np.int64), 0)))
    np.testing.assert_allclose(fast.time_in_system_s, simulator.time_in_system_s, rtol=1e-9)
    assert fast.system_s == pytest.approx(sum(s.system_s for s in steps), rel=1e-9)
    assert fast.busy_s == pytest.approx(sum(s.outcome.seconds for s in steps), rel=1e-9)


def test_the_baseline_sees_a_cache_that_runs_out_just_before_requests_end() -> None:
    # Eight of 100 + 400 tokens need 8 x 32 blocks at their common end; 209 are there.
    tape = Tape.iid(0.5, requests=8, prompt_tokens=(100, 100), output_tokens=(400, 400))
    trace = Trace(np.zeros(8), np.arange(8))
    settings = {"slots": 8, "max_batched_tokens": 2048, "kv_tokens": 209 * BLOCK}
    fast = without_speculation(trace, tape, COST, **settings)
    simulator = Simulator(tape, COST, **settings)
    simulator.start(trace)
    while not simulator.done:
        simulator.step(Decision(np.zeros(len(simulator.slots), np.int64), 0))
    assert fast.time_in_system_s == pytest.approx(simulator.time_in_system_s)
    assert fast.system_s > 1.03 * without_speculation(trace, tape, COST, slots=8).system_s


def test_engines_side_by_side_do_what_each_does_alone_also_when_started_again() -> None:
    tape = Tape.iid(0.6, requests=30, output_tokens=(1, 60), prompt_tokens=(5, 90))
    settings = {"slots": 6, "max_batched_tokens": 64, "kv_tokens": 1100}  # now and then the cache is full
    rng = np.random.default_rng(4)
    traces = [sample_trace(Poisson(), rng, n, 1.1 * capacity(tape, COST, 6), tape) for n in (40, 25, 55, 30)]
    alone = [run(Random(i), trace, tape, COST, **settings) for i, trace in enumerate(traces)]
    seeds = iter(range(4))
    assert replay(lambda _: Random(next(seeds)), traces, tape, COST, **settings) == alone
    engines = Engines(tape, COST, engines=2, **settings)
    for trace in (traces[2], traces[0]):  # the second start finds an engine that was stopped on its way
        engines.start(0, trace)
        for _ in range(50):
            engines.step(np.full(len(engines.slots), 2), np.array([3, 3]))
    once = Engines(tape, COST, **settings)
    once.start(0, traces[0])
    for _ in range(50):
        once.step(np.full(len(once.slots), 2), np.array([3]))
    assert engines.now[0] == once.now[0]
    np.testing.assert_array_equal(engines.observe().of(0).requests, once.observe().of(0).requests)


def test_capacity_is_what_a_full_engine_reaches() -> None:
    tape = Tape.iid(0.5, requests=400)
    trace = Trace(np.zeros(400), np.arange(400))
    cost = replace(EVEN, verify=Curve((0.0, 1.0), (5.0, 5.01)))
    busy = without_speculation(trace, tape, cost, slots=16).busy_s
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
        ({"kv_tokens": 31}, "kv_tokens is 31; the longest request needs 32"),
        ({"engines": 0}, "engines is 0"),
    ],
)
def test_settings_that_cannot_work_are_named(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Simulator(tape_of("00"), EVEN, **wrong)
