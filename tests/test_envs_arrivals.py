"""Arrivals come at the asked mean rate, each process with its own kind of unevenness."""

from __future__ import annotations

import numpy as np
import pytest

from faser.envs.arrivals import ARRIVALS, Bursty, Poisson, Ramp, Spikes, Trace, sample_trace
from faser.tapes import Tape


@pytest.mark.parametrize("name", ARRIVALS)
def test_arrivals_increase_repeat_by_seed_and_keep_the_mean_rate(name: str) -> None:
    process, rate, n = ARRIVALS[name], 5.0, 256
    first = process.sample(np.random.default_rng(4), n, rate)
    assert first.shape == (n,)
    assert first.dtype == np.float64
    assert first[0] >= 0.0
    assert (np.diff(first) >= 0).all()
    assert np.array_equal(first, process.sample(np.random.default_rng(4), n, rate))
    rng = np.random.default_rng(5)
    spans = [np.ptp(process.sample(rng, n, rate)) for _ in range(300)]
    assert np.mean(spans) * rate / n == pytest.approx(1.0, abs=0.06)


def gaps(times: np.ndarray) -> float:
    between = np.diff(times)
    return float(between.std() / between.mean())


def test_bursty_gaps_have_the_asked_variation_and_poisson_gaps_one() -> None:
    rng = np.random.default_rng(0)
    assert gaps(Poisson().sample(rng, 100_000, 3.0)) == pytest.approx(1.0, abs=0.03)
    assert gaps(Bursty().sample(rng, 100_000, 3.0)) == pytest.approx(3.0, abs=0.15)


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


def test_a_trace_uses_each_row_once_before_any_again() -> None:
    tape = Tape.iid(0.5, requests=10)
    trace = sample_trace(Poisson(), np.random.default_rng(0), 25, 1.0, tape)
    assert sorted(trace.row[:10]) == sorted(trace.row[10:20]) == list(range(10))
    assert len(set(trace.row[20:])) == 5


def test_a_trace_that_goes_back_in_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not decrease"):
        Trace(np.array([1.0, 0.5]), np.array([0, 0]))
    with pytest.raises(ValueError, match="not empty"):
        Trace(np.zeros(0), np.zeros(0, np.int64))
