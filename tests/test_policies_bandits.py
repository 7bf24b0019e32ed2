"""Bandits read the speed of the last step from observations, and find what is best without being told."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from faser.core import MAX_DEPTH, Capabilities, Decision, Observation, Policy, checked
from faser.costs import Curve, StepCost
from faser.envs.arrivals import Poisson
from faser.envs.engines import Engines
from faser.envs.trace import Trace, sample_trace
from faser.policies import PolicyError, make_policy
from faser.policies.bandit import HOLD, Bandit
from faser.policies.gp_lcb import OFFSET, SIGNAL, SLOPE, WINDOW, GpLcb, kernel, posterior
from faser.policies.last_step import LastStep, Speed
from faser.requests import RequestTable
from faser.tapes import Tape

COST = StepCost(
    name="t",
    device="t",
    source="t",
    verify=Curve((1.0, 32.0, 256.0), (8.0, 8.0, 20.0)),
    sync=Curve((1.0,), (0.3,)),
    draft=Curve((1.0, 64.0), (0.4, 0.5)),
    context_ms=0.0002,
)


class Watched:
    """A policy's decisions, and what `LastStep` says of each step."""

    def __init__(self, decide: Callable[[Observation], Decision]) -> None:
        self._decide, self._last = decide, LastStep(COST)
        self.speeds: list[Speed | None] = []

    def decide(self, observation: Observation) -> Decision:
        self.speeds.append(self._last.speed(observation))
        decision = self._decide(observation)
        self._last.decided(observation, decision)
        return decision


def random_lengths(seed: int) -> Callable[[Observation], Decision]:
    rng = np.random.default_rng(seed)
    return lambda seen: Decision(rng.integers(0, MAX_DEPTH + 1, seen.running), int(rng.integers(0, MAX_DEPTH + 1)))


def walk(policy: Policy, trace: Trace, tape: Tape) -> list[tuple[float, float, int, int]]:
    """Of each step: its gain by the truth (NaN if none decoded), mean verified, depth, prompt tokens."""
    engines, steps = Engines(tape, COST, slots=16), []
    engines.start(0, trace)
    while not engines.done[0]:
        seen = engines.observe().of(0)
        decision = checked(policy.decide(seen), seen.running, Capabilities())
        n = seen.running
        context = int(engines.table.context[engines.slots].sum())
        step = engines.step(decision.lengths, np.array([decision.draft_depth]))
        gain, verified = float("nan"), 0.0
        if n:
            without = COST.step_ms(rows=n, batch=n, context=context)
            gain = (n + step.accepted.sum()) / n / (1e3 * step.seconds[0]) * without
            verified = float(step.verified.mean())
        steps.append((gain, verified, decision.draft_depth, int(step.prefill_tokens[0])))
    return steps


def test_the_last_steps_speed_is_what_it_was() -> None:
    """Requests that end in a step cannot be seen after it: the mean over the others stands for them."""
    tape = Tape.iid(0.6, requests=64, seed=1)
    trace = sample_trace(Poisson(), np.random.default_rng(0), 64, 2.0, tape)
    watched = Watched(random_lengths(0))
    truth = walk(watched, trace, tape)
    pairs = [(a, b) for a, b in zip(watched.speeds[1:], truth, strict=False) if a and not b[3]]
    assert len(pairs) > 0.8 * len(truth)
    for speed, (_, verified, depth, _) in pairs:
        assert speed.verified == pytest.approx(verified)
        assert speed.drafted == depth
    off = np.array([speed.gain / gain - 1.0 for speed, (gain, *_) in pairs])
    assert np.median(np.abs(off)) < 1e-3
    assert abs(off.mean()) < 0.02


def test_a_step_without_speculation_gains_nothing_and_its_prompts_are_taken_off() -> None:
    tape = Tape.iid(0.6, requests=32, seed=1)
    trace = sample_trace(Poisson(), np.random.default_rng(0), 32, 4.0, tape)
    watched = Watched(lambda seen: Decision(np.zeros(seen.running, np.int64), 0))
    truth = walk(watched, trace, tape)
    assert any(prompts for *_, prompts in truth[1:])
    gains = [speed.gain for speed in watched.speeds if speed]
    assert gains == pytest.approx([1.0] * len(gains), rel=0.02)


def test_of_no_step_and_of_requests_that_cannot_be_told_apart_nothing_is_said() -> None:
    table, last = RequestTable(4, capacity=4), LastStep(COST)

    def seen(slots: list[int]) -> Observation:
        return table.observe(
            np.array(slots, np.int64), COST, now=0.0, waiting=0, kv_usage=0.0, prefill_tokens=0, step_ms=9.0
        )

    def step(before: list[int], tokens: list[int], after: list[int]) -> Speed | None:
        """`before` decode and get `tokens`; then `after` are there."""
        last.decided(seen(before), Decision(np.zeros(len(before), np.int64), 0))
        table.context[before] += np.array(tokens, np.int64)
        table.generated[before] += np.array(tokens, np.int64)
        return last.speed(seen(after))

    table.admit(np.arange(4), context=np.array([10, 10, 11, 50]), max_tokens=50, arrival=0.0)
    assert last.speed(seen([0, 1])) is None  # no step yet
    assert step([0, 1], [1, 1], [0]) is None  # which of two alike is it?
    assert step([0], [1], []) is None
    assert step([], [], [0]) is None
    assert step([2], [1], [3]) is None  # another request
    without = COST.step_ms(rows=2, batch=2, context=12 + 13)
    alike = step([0, 2], [1, 3], [0, 2])
    assert alike is not None
    assert alike.requests == 2
    assert alike.gain == pytest.approx(2.0 / 9.0 * without, rel=1e-3)


@pytest.mark.parametrize("excluded", [[2], [0, 1, 2]])
def test_the_tokens_of_excluded_requests_are_no_merit_of_a_length(excluded: list[int]) -> None:
    table, last, slots = RequestTable(3, capacity=4), LastStep(COST), np.arange(3)

    def seen() -> Observation:
        return table.observe(slots, COST, now=0.0, waiting=0, kv_usage=0.0, prefill_tokens=0, step_ms=9.0)

    for slot in slots.tolist():
        table.admit(slot, context=10 + slot, max_tokens=50, arrival=0.0, excluded=slot in excluded)
    table.draft(slots, np.full((3, MAX_DEPTH), 0.5, np.float32), np.full(3, 4))
    last.decided(seen(), Decision(np.array([4, 4, 0]), 4))
    tokens = np.array([5, 3, 1])
    table.context[slots] += tokens
    table.generated[slots] += tokens
    speed = last.speed(seen())
    if len(excluded) == 3:
        assert speed is None
        return
    assert speed is not None
    without = COST.step_ms(rows=3, batch=3, context=33)
    assert (speed.requests, speed.verified) == (3, 4.0)
    assert speed.gain == pytest.approx(4.0 / 9.0 * without, rel=1e-3)  # the others' mean, in the time of all


def steady(policy: Policy, cost: StepCost, rate: float, steps: int, batch: int = 8) -> list[Decision]:
    """A stationary engine: `batch` endless requests whose tokens match with probability `rate`."""
    rng, table, slots = np.random.default_rng(5), RequestTable(batch, capacity=batch), np.arange(batch)
    table.admit(slots, context=100 + slots, max_tokens=20_000, arrival=0.0)
    made, ms = [], 0.0
    for _ in range(steps):
        context = int(table.context[slots].sum())
        seen = table.observe(slots, cost, now=0.0, waiting=0, kv_usage=0.0, prefill_tokens=0, step_ms=ms)
        decision = checked(policy.decide(seen), batch, Capabilities())
        lengths = np.minimum(decision.lengths, table.drafted)
        right = np.minimum(rng.geometric(1.0 - rate, batch) - 1, lengths)
        rows = batch + int(lengths.sum())
        ms = cost.step_ms(rows=rows, batch=batch, depth=decision.draft_depth, context=context)
        table.record(slots, lengths, right)
        table.context[slots] += right + 1
        table.generated[slots] += right + 1
        table.draft(slots, np.full((batch, MAX_DEPTH), rate, np.float32), np.full(batch, decision.draft_depth))
        made.append(decision)
    return made


def best_length(cost: StepCost, rate: float, batch: int = 8) -> int:
    k = np.arange(MAX_DEPTH + 1)
    tokens = np.cumsum(rate ** k.astype(np.float64))
    return int((tokens / cost.ms(rows=batch * (1 + k), batch=batch, depth=k)).argmax())


@pytest.mark.parametrize("rate", [0.1, 0.45, 0.9])
def test_the_bandit_ends_at_the_best_length_of_a_stationary_engine(rate: float) -> None:
    """Both where the acceptance that it starts from is right and where it is not."""
    best = best_length(COST, rate)
    made = steady(Bandit(COST, explore=1.0, discount=1.0, trust=1.0), COST, rate, 2000)
    late = [decision.draft_depth for decision in made[-400:]]
    assert abs(float(np.mean(late)) - best) < 0.75
    assert {best_length(COST, r) for r in (0.1, 0.45, 0.9)} == {1, 3, 7}


def test_the_bandit_holds_a_length_and_keeps_batches_apart() -> None:
    bandit = Bandit(COST)
    before = bandit.means.copy()
    depths = [decision.draft_depth for decision in steady(bandit, COST, 0.9, 10 * HOLD)]
    held = np.array(depths).reshape(-1, HOLD)
    assert (held == held[:, :1]).all()
    changed = (bandit.means != before).any(axis=1)
    assert changed.nonzero()[0].tolist() == [3]  # 8 requests


def test_the_bandits_bound_is_the_formula() -> None:
    bandit = Bandit(COST, explore=2.0)
    bandit.counts[0] = [100, 4, 50, 50, 50, 50, 50, 50]
    bandit.means[0] = [2.0, 1.0, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    bonus = 2.0 * np.sqrt(np.log(405.0))
    assert 1.0 + bonus / 2.0 > 2.0 + bonus / 10.0
    assert bandit.best(0) == 1
    assert Bandit(COST, explore=0.0).best(3) == best_length(COST, 0.6)


def test_a_bandit_that_forgets_finds_a_new_best() -> None:
    bandit = Bandit(COST, explore=0.5, discount=0.95, trust=1.0)
    first = steady(bandit, COST, 0.9, 800)
    assert float(np.mean([d.draft_depth for d in first[-400:]])) > 4.0
    second = steady(bandit, COST, 0.1, 800)
    assert float(np.mean([d.draft_depth for d in second[-400:]])) < 2.5


def test_the_posterior_is_that_of_a_direct_solve() -> None:
    rng = np.random.default_rng(0)
    x, at = rng.uniform(0, [7, 1, 6], (30, 3)), rng.uniform(0, [7, 1, 6], (9, 3))
    residual, noise = rng.normal(size=30), rng.uniform(0.01, 0.1, 30)
    mean, deviation = posterior(x, residual, noise, at)
    inverse = np.linalg.inv(kernel(x, x) + np.diag(noise))
    for i, point in enumerate(at):
        k = np.array([float(kernel(point[None], other[None])[0, 0]) for other in x])
        assert mean[i] == pytest.approx(k @ inverse @ residual, abs=1e-9)
        assert deviation[i] ** 2 == pytest.approx(
            float(kernel(point[None], point[None])[0, 0]) - k @ inverse @ k, abs=1e-9
        )


def test_the_process_knows_much_where_it_looked_and_little_of_the_rest() -> None:
    at = np.array([[3.0, 0.6, 3.0], [7.0, 0.6, 60.0]])
    mean, before = posterior(np.zeros((0, 3)), np.zeros(0), np.zeros(0), at)
    assert mean.tolist() == [0.0, 0.0]
    assert before**2 == pytest.approx(OFFSET**2 + SIGNAL**2 + SLOPE**2 * np.array([3 / 7, 1.0]) ** 2)
    mean, after = posterior(at[:1].repeat(20, axis=0), np.full(20, 0.3), np.full(20, 1e-3), at)
    assert mean[0] == pytest.approx(0.3, abs=0.01)
    assert after[0] < 0.1 * before[0]
    assert after[1] > 0.5 * before[1]


def test_what_is_seen_of_short_lengths_is_carried_on_to_long_ones() -> None:
    """The slope: a cost that grows with the length is expected to go on growing."""
    x = np.array([[k, 0.6, 3.0] for k in (0.0, 1.0, 2.0) for _ in range(20)])
    at = np.array([[0.0, 0.6, 3.0], [2.0, 0.6, 3.0], [7.0, 0.6, 3.0]])
    mean, _ = posterior(x, 0.05 * x[:, 0], np.full(60, 1e-4), at)
    assert mean[:2] == pytest.approx([0.0, 0.1], abs=0.01)
    assert mean[2] > mean[1] + 0.02


@pytest.mark.parametrize("rate", [0.1, 0.45, 0.9])
def test_gp_lcb_ends_at_the_best_length_of_a_stationary_engine(rate: float) -> None:
    made = steady(GpLcb(COST), COST, rate, 800)
    late = float(np.mean([decision.draft_depth for decision in made[-400:]]))
    assert abs(late - best_length(COST, rate)) <= 1.0


def test_gp_lcb_unlearns_a_wrong_cost_model() -> None:
    """It is told that drafting costs next to nothing; in truth a draft step takes half of a plain step."""
    dear = StepCost(name="t", device="t", source="t", verify=COST.verify, draft=Curve((1.0,), (4.0,)))
    cheap = StepCost(name="t", device="t", source="t", verify=COST.verify, draft=Curve((1.0,), (0.1,)))
    best = best_length(dear, 0.6)
    policy = GpLcb(cheap)
    made = steady(policy, dear, 0.6, 1200)
    assert best <= 1
    assert np.mean([d.draft_depth for d in made[:HOLD]]) >= 4
    assert np.mean([d.draft_depth for d in made[-400:]]) <= best + 1.5


def test_gp_lcb_gives_a_request_the_length_of_its_own_acceptance_and_its_window_is_bounded() -> None:
    policy = GpLcb(COST)
    steady(policy, COST, 0.6, 9 * (WINDOW + 8))
    assert len(policy.points) == WINDOW
    lengths = policy.lengths(8)
    assert lengths[0] < lengths[-1]
    assert lengths.max() <= MAX_DEPTH


@pytest.mark.parametrize("spec", ["bandit", "bandit:0.3:0.99", "gp_lcb", "gp_lcb:1.5", "ema", "schedule"])
def test_the_same_arrivals_get_the_same_decisions(spec: str) -> None:
    tape = Tape.iid(0.6, requests=24, output_tokens=(16, 64), seed=2)
    trace = sample_trace(Poisson(), np.random.default_rng(1), 24, 8.0, tape)
    first, second = (walk(make_policy(spec, COST), trace, tape) for _ in range(2))
    assert np.array_equal(first, second, equal_nan=True)


@pytest.mark.parametrize(
    "spec",
    [
        "bandit:x",
        "bandit:1:0",
        "bandit:1:2",
        "bandit:99",
        "bandit:1:1:0.5",
        "bandit:1:1:9:9",
        "gp_lcb:-1",
        "gp_lcb:11",
        "gp_lcb:1:2",
    ],
)
def test_a_bandit_that_cannot_be_is_refused_in_a_line(spec: str) -> None:
    with pytest.raises(PolicyError, match=f"policy {spec}.*allowed") as error:
        make_policy(spec, COST)
    assert "\n" not in str(error.value)
