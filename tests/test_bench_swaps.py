"""The benchmark of swaps finds a difference that is there and none that is not, and runs."""

import re

import numpy as np
import pytest

from faser.bench.swaps import main, ratio


def test_the_ratio_is_of_percentiles_and_its_interval_holds_it() -> None:
    rng = np.random.default_rng(0)
    pairs = rng.lognormal(0.0, 0.3, (20, 1)) * rng.lognormal(0.0, 0.05, (20, 32))  # a round differs from a round
    same = ratio(pairs * rng.lognormal(0.0, 0.01, pairs.shape), pairs, 99)
    assert same.low < 1.0 < same.high
    assert same.value == pytest.approx(1.0, abs=0.05)
    slower = ratio(1.2 * pairs, pairs, 99)
    assert (slower.value, slower.low, slower.high) == pytest.approx((1.2, 1.2, 1.2))
    lost = pairs.copy()
    lost[3, 4] = np.nan
    assert ratio(lost, pairs, 50).value == pytest.approx(1.0, abs=0.01)


@pytest.mark.server
def test_it_swaps_while_streams_run_and_prints_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pairs", "2", "--streams", "4", "--tokens", "12", "--every", "0.05"]) in (0, 1)  # as chance has it
    out = capsys.readouterr().out
    assert int(out.split()[0]) > 4  # swaps
    assert len(re.findall(r"p(?:50|99): \d\.\d{3} \(\d\.\d{3} to \d+\.\d{3}\)", out)) == 6
