"""Known answers of the scores of stated chances."""

import numpy as np
import pytest

from faser.train.acceptance_scores import auc, calibration_error, log_losses, scores


def of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_perfectly_calibrated_predictor_has_no_calibration_error() -> None:
    chance = np.repeat(of(0.26, 0.76), 100)
    accepted = np.concatenate([np.arange(100) < 26, np.arange(100) < 76])
    assert calibration_error(chance, accepted) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("share", [0, 25, 60, 100])
def test_a_constant_predictor_is_wrong_by_its_distance_to_the_share(share: int) -> None:
    accepted = np.arange(100) < share
    assert calibration_error(np.full(100, 0.6, np.float32), accepted) == pytest.approx(abs(0.6 - share / 100), abs=1e-6)


def test_errors_of_bins_do_not_cancel_but_those_in_a_bin_do() -> None:
    accepted = np.array([True, False] * 2)
    assert calibration_error(of(0.1, 0.1, 0.9, 0.9), accepted) == pytest.approx(0.4, abs=1e-6)
    assert calibration_error(of(0.51, 0.51, 0.53, 0.53), accepted) == pytest.approx(0.02, abs=1e-6)


def test_log_loss_of_known_chances_and_of_certain_mistakes() -> None:
    losses = log_losses(of(0.5, 0.25, 1.0), np.array([True, False, False]))
    np.testing.assert_allclose(losses, [np.log(2), np.log(4 / 3), np.log(1000)], rtol=1e-5)


@pytest.mark.parametrize(
    ("chance", "expected"),
    [((0.9, 0.8, 0.2, 0.1), 1.0), ((0.1, 0.2, 0.8, 0.9), 0.0), ((0.5,) * 4, 0.5), ((0.9, 0.4, 0.4, 0.1), 0.875)],
)
def test_auc_of_known_orders(chance: tuple[float, ...], expected: float) -> None:
    assert auc(of(*chance), np.array([True, True, False, False])) == pytest.approx(expected)


def test_intervals_resample_requests_and_not_their_verdicts() -> None:
    rng = np.random.default_rng(0)
    alike = np.repeat(rng.random(20) < 0.5, 50)  # a request's verdicts are all the same
    mixed = rng.permutation(alike)
    request = np.repeat(np.arange(20), 50)
    chance = np.full(1000, 0.7, np.float32)
    wide, narrow = (scores(chance, accepted, request).log_loss_interval for accepted in (alike, mixed))
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_gain_is_the_log_loss_less_than_the_reference() -> None:
    accepted = np.arange(400) % 4 > 0
    request = np.repeat(np.arange(20), 20)
    s = scores(np.full(400, 0.75, np.float32), accepted, request, reference=np.full(400, 0.5, np.float32))
    expected = np.log(2) - (-0.75 * np.log(0.75) - 0.25 * np.log(0.25))
    assert s.gain == pytest.approx(expected, abs=1e-5)
    assert s.gain_interval == pytest.approx((expected, expected), abs=1e-5)  # every request is the same
    assert s.verdicts == 400
