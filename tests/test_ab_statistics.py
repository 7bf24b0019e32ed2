"""Intervals of an A/B test: known answers, how often they err, and that they find what is there.

Rates of errors are of fixed seeds; 200 tests of a true rate of 5 % are in 2 to 8 % nineteen times in twenty.
"""

import math

import numpy as np
import pytest

from faser.ab.comparison import Blocks
from faser.ab.plan import plan_of
from faser.ab.records import Records
from faser.ab.report import summary
from faser.ab.simulated import found, lines, split_of
from faser.ab.split import Arm, Split
from faser.ab.statistics import (
    EARLY,
    LEAST,
    Doubles,
    Interval,
    binomial,
    clustered,
    paired,
    sequence,
    student,
)

TESTS = 200


def aa(blocks: int, *, tests: int = TESTS, of_base: int = 1, seed: int = 0) -> list[tuple[Doubles, Doubles]]:
    """Tests of arms that are one: means of the windows of each in `blocks` blocks, in each a random order.

    The load has a wave and a memory of ten windows, times grow with it as in a queue, and their noise has heavy tails.
    """
    rng = np.random.default_rng(seed)
    count = blocks * (of_base + 1)
    memory = np.zeros((count, tests))
    for i, shock in enumerate(rng.standard_normal((count, tests))):
        memory[i] = 0.9 * memory[i - 1] + math.sqrt(1 - 0.9**2) * shock
    load = np.clip(0.55 + 0.15 * np.sin(np.arange(count) / 20) + 0.18 * memory.T, 0.05, 0.97)
    times = np.exp(0.4 * rng.standard_t(4, (tests, count))) / (1 - load)
    times = rng.permuted(times.reshape(tests, blocks, of_base + 1), axis=2)
    return [(test[:, 1:].mean(axis=1), test[:, 0]) for test in times]


@pytest.mark.parametrize("blocks", [10, 30, 100])
def test_the_interval_errs_as_often_as_it_says_on_a_load_that_drifts(blocks: int) -> None:
    effects = [paired(*test) for test in aa(blocks, tests=5 * TESTS)]
    assert 0.02 <= np.mean([effect.difference.excludes_zero for effect in effects]) <= 0.08
    assert all(effect.difference.excludes_zero == effect.relative.excludes_zero for effect in effects)


@pytest.mark.parametrize("blocks", [10, 30, 100])
def test_uneven_shares_err_little_more(blocks: int) -> None:
    effects = [paired(*test) for test in aa(blocks, of_base=3, tests=5 * TESTS)]
    assert 0.02 <= np.mean([effect.difference.excludes_zero for effect in effects]) <= 0.08


@pytest.mark.parametrize("blocks", [10, 30, 100])
def test_the_interval_has_a_true_effect_in_it(blocks: int) -> None:
    relative = [paired(base, 1.2 * other).relative for base, other in aa(blocks, tests=5 * TESTS)]
    assert 0.93 <= np.mean([interval.low <= 0.2 <= interval.high for interval in relative]) <= 0.97


def test_the_sequence_errs_in_less_than_5_of_100_tests_however_often_one_looks() -> None:
    erred = 0
    for base, other in aa(300, tests=5 * TESTS):
        _, low, high = sequence(other - base)
        erred += bool(((low > 0) | (high < 0)).any())
    assert erred / (5 * TESTS) <= 0.05


def test_looking_again_and_again_at_the_fixed_interval_errs_far_more() -> None:
    """What the sequence is for; and a sign that the test before could fail."""
    erred = 0
    for base, other in aa(60, tests=60):
        erred += any(paired(base[:k], other[:k]).difference.excludes_zero for k in range(LEAST, 60, 2))
    assert erred / 60 > 0.12


@pytest.mark.parametrize("of", ["gaussian", "heavy", "rare"])
def test_the_sequence_errs_little_on_any_symmetric_noise(of: str) -> None:
    rng = np.random.default_rng(1)
    noise = {
        "gaussian": lambda: rng.standard_normal(500),
        "heavy": lambda: rng.standard_t(1.5, 500),
        "rare": lambda: rng.standard_normal(500) * (rng.random(500) < 0.1),
    }[of]
    erred = 0
    for _ in range(5 * TESTS):
        _, low, high = sequence(noise())
        erred += bool(((low > 0) | (high < 0)).any())
    assert erred / (5 * TESTS) <= 0.05


def test_200_tests_of_a_policy_against_itself_end_to_end() -> None:
    """From log lines to the summary; 30 blocks each."""
    both = np.array([found("window", 61, seed, per_window=4) for seed in range(TESTS)])
    fixed, always = both.mean(axis=0)
    assert 0.02 <= fixed <= 0.08
    assert always <= 0.05


@pytest.mark.parametrize(("clients", "most"), [(0, 0.08), (40, 0.08)])
def test_a_policy_against_itself_by_request(clients: int, most: float) -> None:
    both = np.array([found("request", 25, seed, clients=clients, per_window=12) for seed in range(TESTS // 2)])
    fixed, always = both.mean(axis=0)
    assert fixed <= most
    assert always <= 0.05


def test_clients_that_come_again_are_not_taken_for_many() -> None:
    """Requests of few clients that differ, taken one by one, "find" differences between clients."""
    wrong = 0
    for seed in range(30):
        split = split_of("request", salt=str(seed))
        records = Records()
        for line in lines(split, 25, seed, clients=40, per_window=24):
            records.add({**line, "key": None})
        wrong += summary(records, split)["comparisons"][0]["metrics"][0]["differs"] != 0
    assert wrong / 30 > 0.15


@pytest.mark.parametrize("unit", ["window", "request"])
@pytest.mark.parametrize("slower", [1.6, 1 / 1.6])
def test_a_slowed_policy_is_found_with_its_sign(unit: str, slower: float) -> None:
    split = split_of(unit, policies=("none", "static:4"))
    records = Records()
    for line in lines(split, 80, 0, slower={"b": slower}):
        records.add(line)
    (compared,) = summary(records, split)["comparisons"]
    sign = 1 if slower > 1 else -1
    assert compared["metrics"][0]["differs"] == sign
    assert compared["sequence"]["decided"] is not None
    assert compared["sequence"]["sign"] == sign
    assert compared["metrics"][0]["relative"] == pytest.approx(slower - 1, abs=0.25)


def test_paired_by_hand() -> None:
    base, other = np.array([1.0, 2.0, np.nan, 3.0]), np.array([2.0, 2.0, 5.0, 4.0])
    effect = paired(base, other)
    assert (effect.blocks, effect.base) == (3, 2.0)
    assert effect.other == pytest.approx(8 / 3)
    assert effect.difference.value == pytest.approx(2 / 3)
    assert effect.relative.value == pytest.approx(1 / 3)
    assert math.isnan(effect.difference.low)  # too few


def test_paired_agrees_with_student_where_both_are_right() -> None:
    rng = np.random.default_rng(0)
    base = 10 + rng.standard_normal(200)
    other = base + 1 + rng.standard_normal(200)
    effect = paired(base, other)
    half = student(0.975, 199) * np.std(other - base, ddof=1) / math.sqrt(200)
    assert effect.difference.high - effect.difference.low == pytest.approx(2 * half, rel=0.15)
    assert effect == paired(base, other)  # no luck in it


def test_many_blocks_cost_no_more_and_say_the_same() -> None:
    rng = np.random.default_rng(0)
    base, other = rng.random(20_003), rng.random(20_003) + 0.1
    effect = paired(base, other)
    assert effect.blocks == 20_003
    assert effect.difference.low < 0.1 < effect.difference.high
    assert effect.difference.high - effect.difference.low == pytest.approx(
        2 * 1.96 * math.sqrt(2 / 12 / 20_003), rel=0.15
    )


@pytest.mark.parametrize("value", [np.zeros(20), np.ones(20)])
def test_arms_that_never_differ_are_not_told_apart(value: Doubles) -> None:
    effect = paired(value, value)
    assert effect.difference == Interval(0.0, 0.0, 0.0)
    assert not effect.difference.excludes_zero
    _, low, high = sequence(value - value)
    assert not ((low > 0) | (high < 0)).any()


def test_no_blocks_are_no_effect() -> None:
    effect = paired(np.zeros(0), np.zeros(0))
    assert effect.blocks == 0
    assert math.isnan(effect.difference.value)
    assert all(len(curve) == 0 for curve in sequence(np.zeros(0)))


def test_the_sequence_is_where_its_mixture_reaches_1_over_alpha() -> None:
    """The mixture's integral, done numerically: effect sizes are Gaussian with variance 1 / c^2, scales 1 / sigma."""
    differences = np.random.default_rng(3).standard_normal(12) + 0.4
    mean, low, high = sequence(differences)
    late = -2 * math.log(0.05)
    prior = EARLY / (late + math.log(late) + 1)
    size = np.linspace(-12, 12, 4001) / math.sqrt(prior)
    log_scale = np.linspace(-6, 6, 2001)
    for end in (low[-1], high[-1]):
        x = differences - end  # at its end, the interval's null is only just not refuted
        scale = np.exp(log_scale)[:, None]
        squares = (x**2).sum() / scale**2 - 2 * size * x.sum() / scale + len(x) * size**2
        weight = np.exp(-0.5 * prior * size**2) * math.sqrt(prior / (2 * math.pi)) * (size[1] - size[0])
        # dsigma / sigma is d(log sigma)
        mixed = float((scale ** -len(x) * np.exp(-squares / 2) * weight).sum())
        null = float((scale ** -len(x) * np.exp(-((x**2).sum()) / scale**2 / 2)).sum())
        assert mixed / null == pytest.approx(1 / 0.05, rel=1e-3)
    assert low[-1] < mean[-1] < high[-1]


def test_the_sequence_ignores_the_unit() -> None:
    differences = np.random.default_rng(3).standard_normal(50)
    assert np.allclose(sequence(1000 * differences)[1], 1000 * sequence(differences)[1])
    shifted = sequence(differences + 1e6)
    assert np.allclose(shifted[1][-1] - 1e6, sequence(differences)[1][-1], atol=1e-4)


def test_clustered_by_hand() -> None:
    """Clients of one request each: it is Welch's interval, with the smaller arm's freedom."""
    rng = np.random.default_rng(0)
    arm = np.repeat([0, 1], [20, 30])
    total = rng.random(50) + arm
    effect = clustered(arm, total, np.ones(50))
    a, b = total[:20], total[20:]
    half = student(0.975, 19) * math.sqrt(a.var(ddof=1) / 20 + b.var(ddof=1) / 30)
    assert effect.difference.value == pytest.approx(b.mean() - a.mean())
    assert effect.difference.high == pytest.approx(b.mean() - a.mean() + half)
    assert math.isnan(clustered(arm[15:], total[15:], np.ones(35)).difference.low)  # five clients of one arm


@pytest.mark.parametrize(("freedom", "quantile"), [(4, 2.776), (9, 2.262), (29, 2.045), (1000, 1.962)])
def test_students_table(freedom: int, quantile: float) -> None:
    assert student(0.975, freedom) == pytest.approx(quantile, rel=1e-3)


@pytest.mark.parametrize(
    ("count", "of", "share", "p"),
    [(5, 10, 0.5, 1.0), (0, 10, 0.5, 2 / 1024), (10, 10, 0.5, 2 / 1024), (1, 4, 0.75, 2 * (0.25**4 + 12 * 0.25**4))],
)
def test_the_binomial_by_hand(count: int, of: int, share: float, p: float) -> None:
    assert binomial(count, of, share) == pytest.approx(p)


def test_the_binomial_of_many_is_the_normal_one() -> None:
    assert binomial(2000 + 93, 4001, 0.5) == pytest.approx(binomial(2000 + 93, 4001, 0.4999999), rel=0.01)
    assert binomial(50_400, 100_000, 0.5) == pytest.approx(0.0114, rel=0.02)


def test_a_rotated_log_without_the_splits_line_still_shows_its_blocks() -> None:
    arms = (Arm("a", "none"), Arm("b", "static:4"))
    split = Split(arms=arms, shares=(0.75, 0.25), block=4, salt="x", start=1.7e9)
    whole, rest = Records(), Records()
    for line in lines(split, 80, 0):
        whole.add(line)
        if line["kind"] != "split" and (line["window"] or 0) >= 9:
            rest.add(line)
    plan = plan_of(rest, None)
    assert plan is not None
    assert (plan.names, plan.unit, plan.block, plan.policies) == (("a", "b"), "window", 4, split_policies(split))
    assert plan.window_s == pytest.approx(60, rel=0.02)
    known = plan_of(whole, None)
    assert known is not None
    ours, theirs = Blocks(rest, plan), Blocks(whole, known)
    shared = np.isin(theirs.index, ours.index[1:-1])  # the ends may hold fewer windows
    assert np.array_equal(ours.values[1:-1], theirs.values[shared], equal_nan=True)


def test_a_window_from_a_clock_that_jumped_costs_no_walk_to_it() -> None:
    """Without the bounds this walks 10^12 windows."""
    told = [*lines(split_of(), 40, 0)]
    jumped = next(line for line in told if line.get("window") == 20)
    told.append(jumped | {"window": 10**12, "t": jumped["t"] + 60e12})
    for which in (told, told[1:]):  # with the split's line, and without
        records = Records()
        for line in which:
            records.add(line)
        said = summary(records)
        assert sum(arm["steps"] for arm in said["arms"]) > 40
        assert sum(said["sample_ratio"]["counts"].values()) == 0


def test_a_relative_interval_has_two_ends_or_none() -> None:
    base, other = np.zeros(40), np.full(40, 2.0)
    base[:5] = 1.0
    effect = paired(base, other)
    assert effect.difference.excludes_zero
    assert effect.relative.value > 0
    assert math.isnan(effect.relative.low)
    assert math.isnan(effect.relative.high)


def split_policies(split: Split) -> dict[str, str]:
    return {arm.name: arm.policy for arm in split.arms}
