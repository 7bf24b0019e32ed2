"""Arrivals come at the asked mean rate, each process with its own kind of unevenness; periods are apart."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.envs.arrivals import ARRIVALS, Arrivals, Bursty, Diurnal, Mixed, Poisson, Ramp, Spikes, Swing
from faser.envs.periods import PERIODS, period
from faser.envs.trace import Drift, Mix, Trace, kinds_of, sample_trace
from faser.tapes import Tape, TapeError

Times = NDArray[np.float64]


@pytest.mark.parametrize("name", ARRIVALS)
def test_arrivals_increase_and_repeat_by_seed(name: str) -> None:
    process, n = ARRIVALS[name], 256
    first = process.sample(np.random.default_rng(4), n, 5.0)
    assert first.shape == (n,)
    assert first.dtype == np.float64
    assert first[0] >= 0.0
    assert (np.diff(first) >= 0).all()
    assert np.array_equal(first, process.sample(np.random.default_rng(4), n, 5.0))
    assert not np.array_equal(first, process.sample(np.random.default_rng(5), n, 5.0))
    assert process.sample(np.random.default_rng(4), 1, 5.0).shape == (1,)


@pytest.mark.parametrize(
    "process",
    [Poisson(), Bursty(cv=6.0), Spikes(), Spikes(share=0.1, contrast=20.0), Diurnal(), Swing(), Swing(contrast=4.0)],
)
def test_short_samples_have_the_asked_mean_rate(process: Arrivals) -> None:
    """They start at a request, so n of them take (n - 1) / rate on average; 4 standard errors of that average."""
    rng, n, rate, samples = np.random.default_rng(5), 40, 3.0, 3000
    spans = np.array([np.ptp(process.sample(rng, n, rate)) for _ in range(samples)])
    assert spans.mean() == pytest.approx((n - 1) / rate, abs=4 * spans.std() / samples**0.5)


def swing_variance(swing: Swing) -> float:
    """Variance of the span of n requests over n / rate^2, for many plateaus: see `test_long_samples...`."""
    c = swing.contrast
    square = float(np.log(c)) * (c + 1) / (2 * (c - 1))  # mean of (plateau's rate / rate)^2
    return 1.0 + 2.0 * swing.plateau_requests * (square - 1.0)


@pytest.mark.parametrize(
    ("process", "variance", "cycle"),
    [
        (Poisson(), 1.0, 0.0),
        (Bursty(cv=3.0), 9.0, 0.0),
        (Spikes(), 1.0, 64.0),
        (Diurnal(), 1.0, 256.0),
        (Swing(), swing_variance(Swing()), 0.0),
    ],
)
def test_long_samples_have_the_asked_mean_rate(process: Arrivals, variance: float, cycle: float) -> None:
    """Of n requests, the span is normal around n / rate: with the variance of n gaps, or, where the rate has a cycle,
    with Poisson's number of requests and an error of a cycle at most; for plateaus (d long, at r times the rate, d
    exponential) the variance of a renewal process with reward, E[(d - d r)^2] / E[d] for each unit of time.
    """
    n, rate = 200_000, 7.0
    span = np.ptp(process.sample(np.random.default_rng(6), n, rate))
    assert span * rate / n == pytest.approx(1.0, abs=4 * (variance / n) ** 0.5 + cycle / n)


def test_a_ramp_spreads_its_requests_over_just_the_time_that_they_need() -> None:
    rng = np.random.default_rng(7)
    for ramp in (Ramp(), Ramp(start=1.8, end=0.2), Ramp(start=0.0, end=5.0), Ramp(start=3.0, end=3.0)):
        times = ramp.sample(rng, 1000, 4.0)
        assert (np.diff(times) > 0).all()
        assert 240.0 < times[-1] < 250.0  # even at 0.2 of the mean rate a pause of 10 s comes once in 3,000 samples


def variation(times: Times) -> float:
    between = np.diff(times)
    return float(between.std() / between.mean())


def test_bursty_gaps_have_the_asked_variation_and_poisson_gaps_one() -> None:
    rng = np.random.default_rng(0)
    assert variation(Poisson().sample(rng, 100_000, 3.0)) == pytest.approx(1.0, abs=0.03)
    assert variation(Bursty().sample(rng, 100_000, 3.0)) == pytest.approx(3.0, abs=0.15)


def test_spikes_are_as_high_and_as_long_as_asked() -> None:
    process, rate = Spikes(share=0.2, contrast=10.0, cycle_requests=6400.0), 200.0
    times = process.sample(np.random.default_rng(1), 200_000, rate)
    counts = np.bincount((times * 4).astype(int))[:-1] * 4.0  # requests per second, by quarter second
    low = rate / (0.2 * 10 + 0.8)
    assert (counts > 5 * low).mean() == pytest.approx(0.2, abs=0.03)
    assert counts[counts <= 5 * low].mean() == pytest.approx(low, rel=0.1)


def test_a_ramp_ends_faster_than_it_starts() -> None:
    times = Ramp(start=0.2, end=1.8).sample(np.random.default_rng(2), 20_000, 10.0)
    assert 2000 / np.ptp(times[:2000]) < 2000 / np.ptp(times[9000:11000]) < 2000 / np.ptp(times[-2000:])
    assert 100 / np.ptp(times[-100:]) == pytest.approx(18.0, rel=0.35)
    assert 100 / np.ptp(times[:100]) < 7.0


def test_days_have_both_harmonics() -> None:
    """Fourier coefficients of the arrivals, over the time of day, are those asked for."""
    n, day = 200_000, 20_000.0
    times = Diurnal(first=0.6, second=0.2, cycle_requests=day).sample(np.random.default_rng(3), n, 1.0)
    times = times[times < times[-1] // day * day]  # whole days
    found = [2 * abs(np.exp(2j * np.pi * k * times / day).mean()) for k in (1, 2, 3)]
    assert found == pytest.approx([0.6, 0.2, 0.0], abs=4 * (2 / len(times)) ** 0.5)


def test_a_swing_is_log_uniform_over_its_contrast() -> None:
    rate, swing = 100.0, Swing(contrast=35.0, plateau_requests=20_000.0)
    times = swing.sample(np.random.default_rng(3), 4_000_000, rate)
    level = np.log(np.bincount((times / 10.0).astype(int))[:-1] / 10.0)  # each 10 s; a plateau lasts 200
    lowest = np.log(rate * np.log(35.0) / 34.0)
    assert np.exp(level.max() - level.min()) == pytest.approx(35.0, rel=0.25)  # ~100 requests at the lowest: 10 % each
    below = [(level < lowest + part * np.log(35.0)).mean() for part in (0.25, 0.5, 0.75)]
    assert below == pytest.approx([0.25, 0.5, 0.75], abs=0.15)  # of ~200 plateaus: 4 standard errors
    assert (np.abs(np.diff(level)) < 0.5).mean() > 0.85  # it stays where it is, mostly


def test_mixed_draws_each_of_its_kinds() -> None:
    mixed = Mixed(kinds=(Bursty(cv=0.01), Bursty(cv=5.0)))
    rng = np.random.default_rng(0)
    even = [variation(mixed.sample(rng, 50, 1.0)) < 0.1 for _ in range(100)]
    assert 30 < sum(even) < 70


@pytest.mark.parametrize(
    ("process", "given", "says"),
    [
        (Bursty, {"cv": 0.0}, "cv is 0.0; allowed: over 0"),
        (Spikes, {"share": 1.0}, "share is 1.0; allowed: between 0 and 1"),
        (Spikes, {"contrast": 0.5}, "contrast is 0.5; allowed: 1 or more"),
        (Spikes, {"cycle_requests": 0.0}, "cycle_requests is 0.0"),
        (Diurnal, {"second": -0.1}, "second is -0.1; allowed: 0 or more"),
        (Diurnal, {"first": 0.8}, r"first \+ second is 1.0; allowed: less than 1"),
        (Diurnal, {"cycle_requests": float("nan")}, "cycle_requests is nan"),
        (Swing, {"contrast": 1.0}, "contrast is 1.0; allowed: over 1"),
        (Swing, {"plateau_requests": -1.0}, "plateau_requests is -1.0"),
        (Ramp, {"start": -0.1}, "start is -0.1; allowed: 0 or more"),
        (Ramp, {"start": 0.0, "end": 0.0}, r"start \+ end is 0.0; allowed: over 0"),
        (Mixed, {"kinds": ()}, "kinds is empty"),
    ],
)
def test_a_wrong_parameter_is_named(process: type, given: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        process(**given)


def recorded(*domains: str, temperatures: tuple[float, ...] = (0.0,), each: int = 8) -> Tape:
    """A tape of `each` requests of every kind, temperature after temperature; prompt_tokens number the prompts from 1,
    and of the i-th domain's four output tokens i are right.
    """
    made = [(i, heat) for heat in temperatures for i in range(len(domains)) for _ in range(each)]
    n, domain = len(made), np.array([i for i, _ in made], np.uint8)
    return Tape(
        domains=domains,
        domain=domain,
        prompt_tokens=np.tile(np.arange(1, len(domains) * each + 1, dtype=np.int32), len(temperatures)),
        output_tokens=np.full(n, 4, np.int32),
        max_tokens=np.full(n, 4, np.int32),
        match=(np.arange(4) < domain[:, None]).reshape(-1),
        confidence=np.zeros((4 * n, 7), np.uint8),
        temperature=np.array([heat for _, heat in made], np.float32),
        source="a test",
    )


def test_a_trace_uses_each_row_once_before_any_again() -> None:
    tape = Tape.iid(0.5, requests=10)
    trace = sample_trace(Poisson(), np.random.default_rng(0), 25, 1.0, tape)
    assert sorted(trace.row[:10]) == sorted(trace.row[10:20]) == list(range(10))
    assert len(set(trace.row[20:])) == 5


def test_a_mix_sets_how_often_domains_and_temperatures_come() -> None:
    tape = recorded("chat", "code", "maths", temperatures=(0.0, 0.7))
    mix = Mix(domains={"chat": 3.0, "code": 1.0}, temperatures={0.0: 1.0, 0.7: 4.0})
    n = 20_000
    trace = sample_trace(Poisson(), np.random.default_rng(0), n, 1.0, tape, mix)
    chat, hot = tape.domain[trace.row] == 0, tape.temperature[trace.row] > 0
    assert not (tape.domain[trace.row] == 2).any()
    assert (chat.mean(), hot.mean()) == pytest.approx((0.75, 0.8), abs=4 * 0.5 / n**0.5)
    assert (chat & hot).mean() == pytest.approx(0.6, abs=4 * 0.5 / n**0.5)


def test_a_mix_uses_each_row_once_before_any_of_its_kind_again() -> None:
    tape = recorded("chat", "code", each=6)
    trace = sample_trace(Poisson(), np.random.default_rng(1), 100, 1.0, tape, Mix(domains={"chat": 1.0, "code": 2.0}))
    for domain in (0, 1):
        mine = trace.row[tape.domain[trace.row] == domain]
        assert len(mine) > 12
        assert sorted(mine[:6]) == sorted(mine[6:12]) == np.flatnonzero(tape.domain == domain).tolist()


def test_kinds_that_a_mix_does_not_name_never_come_and_an_empty_mix_is_even() -> None:
    tape = recorded("chat", "code", temperatures=(0.0, 0.7))
    assert list(kinds_of(tape)) == [
        ("chat", 0.0),
        ("chat", pytest.approx(0.7)),
        ("code", 0.0),
        ("code", pytest.approx(0.7)),
    ]
    assert Mix().shares(tape, 2).tolist() == [[0.25] * 4] * 2
    assert Mix(temperatures={0.7: 2.0}).shares(tape, 1).tolist() == [[0.0, 0.5, 0.0, 0.5]]
    uneven = tape.take(np.flatnonzero((tape.domain == 0) | (tape.temperature == 0)))
    assert Mix(domains={"code": 1.0}).shares(uneven, 1).tolist() == [[0.0, 0.0, 1.0]]


def test_a_drift_goes_linearly_from_one_mix_to_the_other() -> None:
    tape, n = recorded("chat", "code"), 40_001
    drift = Drift(start=Mix(domains={"chat": 1.0}), end=Mix(domains={"chat": 1.0, "code": 3.0}))
    assert drift.shares(tape, 3).tolist() == [[1.0, 0.0], [0.625, 0.375], [0.25, 0.75]]
    code = tape.domain[sample_trace(Poisson(), np.random.default_rng(2), n, 1.0, tape, drift).row] == 1
    tenths = code[1:].reshape(10, -1).mean(axis=1)
    assert tenths == pytest.approx(0.75 * (np.arange(10) + 0.5) / 10, abs=4 * 0.5 / 4000**0.5)
    assert not code[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"domains": {"chat": -1.0}}, "the weight of 'chat' in domains is -1.0; allowed: 0 or more"),
        ({"temperatures": {0.7: 0.0}}, "temperatures is {0.7: 0.0}; allowed: a weight over 0"),
        ({"domains": {"poetry": 1.0}}, "domains of a mix is 'poetry'; allowed: chat, code"),
        ({"temperatures": {0.7: 1.0}}, "temperatures of a mix is 0.7.*; allowed: 0.0"),
    ],
)
def test_a_wrong_mix_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sample_trace(Poisson(), np.random.default_rng(0), 5, 1.0, recorded("chat", "code"), Mix(**given))


@pytest.mark.parametrize(
    ("n", "rate", "says"), [(0, 1.0, "n is 0"), (3, 0.0, "rate is 0.0"), (3, np.inf, "rate is inf")]
)
def test_a_trace_of_nothing_or_at_no_rate_is_an_error(n: int, rate: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sample_trace(Poisson(), np.random.default_rng(0), n, rate, Tape.iid(0.5, requests=10))


def test_a_trace_that_goes_back_in_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not decrease"):
        Trace(np.array([1.0, 0.5]), np.array([0, 0]))
    with pytest.raises(ValueError, match="not empty"):
        Trace(np.zeros(0), np.zeros(0, np.int64))


DOMAINS = ("hard", "middling", "easy")


def test_periods_share_no_prompt_and_no_seed() -> None:
    tape = recorded(*DOMAINS, temperatures=(0.0, 0.8), each=7)  # odd: parity within a kind is not parity in the tape
    all_of = {name: period(name, tape) for name in PERIODS}
    prompts = {name: {*of.tape.prompt_tokens.tolist()} for name, of in all_of.items()}
    assert {*range(1, 22)} == {*prompts["train"], *prompts["validation"], *prompts["test"]}
    assert all(not prompts[a] & prompts[b] for a, b in combinations(PERIODS, 2))
    assert prompts["train"] == {1, 2, 3, 4, 8, 9, 10, 11, 15, 16, 17, 18}
    assert prompts["validation"] == {5, 6, 12, 13, 19, 20}
    assert [len(of.tape) for of in all_of.values()] == [24, 12, 6]  # each at both temperatures
    assert [of.first_seed for of in all_of.values()] == [0, 1_000_000, 2_000_000]


def test_an_episode_is_the_same_whenever_it_is_asked_for_and_others_differ() -> None:
    tape = recorded(*DOMAINS)
    of = period("test", tape)
    first, again = (of.trace("swing", 3, 50, 2.0) for _ in range(2))
    assert np.array_equal(first.arrival, again.arrival)
    assert np.array_equal(first.row, again.row)
    assert not np.array_equal(first.arrival, of.trace("swing", 4, 50, 2.0).arrival)
    same_episode = period("train", tape).trace("steady", 3, 50, 2.0)
    assert not np.array_equal(of.trace("steady", 3, 50, 2.0).arrival, same_episode.arrival)


def test_test_has_suites_processes_and_mixes_that_training_never_sees() -> None:
    tape = recorded(*DOMAINS)
    train, validation, test = (period(name, tape) for name in PERIODS)
    assert [*train.arrivals] == [*validation.arrivals] == ["steady", "bursty", "spikes", "mixed"]
    assert [*test.arrivals] == ["steady", "bursty", "spikes", "diurnal", "swing", "mixed", "drift"]
    for a, b in combinations((train, validation, test), 2):
        assert processes(a.arrivals["mixed"]) & processes(b.arrivals["mixed"]) == {Poisson()}  # which has no parameter
        assert a.mix["mixed"] != b.mix["mixed"]
    assert {type(process) for process in processes(test.arrivals["mixed"])} == {Poisson, Bursty, Spikes, Diurnal, Swing}


def processes(arrivals: Arrivals) -> set[Arrivals]:
    if isinstance(arrivals, Mixed):
        return {process for kind in arrivals.kinds for process in processes(kind)}
    return {arrivals}


def test_domains_come_as_often_as_their_difficulty_says() -> None:
    tape, n = recorded(*DOMAINS, each=40), 20_000
    expected = {
        "train": np.ones(3),
        "validation": np.array([1 / 3, 3**-0.5, 1.0]),
        "test": np.array([3.0, 3**0.5, 1.0]),
    }
    for name, weights in expected.items():
        of = period(name, tape)
        came = np.bincount(of.tape.domain[of.trace("steady", 0, n, 1.0).row], minlength=3) / n
        assert came == pytest.approx(weights / weights.sum(), abs=4 * 0.5 / n**0.5)
    of = period("test", tape)
    hard = of.tape.domain[of.trace("drift", 0, n, 1.0).row] == 0
    assert hard[:1000].mean() == pytest.approx(9 / 13, abs=0.08)
    assert hard[-1000:].mean() == pytest.approx(1 / 13, abs=0.08)


def test_a_wrong_period_suite_or_episode_is_named() -> None:
    tape = recorded(*DOMAINS)
    with pytest.raises(ValueError, match="period is 'tset'; allowed: train, validation, test"):
        period("tset", tape)
    with pytest.raises(ValueError, match=r"suite is 'swing'; allowed: steady, bursty, spikes, mixed \(in train\)"):
        period("train", tape).trace("swing", 0, 5, 1.0)
    with pytest.raises(ValueError, match="episode is 1000000; allowed: 0 to 999999"):
        period("train", tape).trace("steady", 1_000_000, 5, 1.0)
    with pytest.raises(TapeError, match="the tape has 2 requests, none of them for test; allowed: 4 or more"):
        period("test", recorded("chat", each=2))
