"""From a tape to a predictor: histories as an engine keeps them, a known law, the shipped file, the command."""

from pathlib import Path

import numpy as np
import pytest

from faser.acceptance import HISTORY_FEATURES, load_predictor
from faser.core import MAX_DEPTH, Floats
from faser.costs import Curve, StepCost
from faser.requests import FAST, PRIOR
from faser.tapes import Tape, load_tape
from faser.train import acceptance, acceptance_value
from faser.train.acceptance_fit import Fit, binned, fit
from faser.train.acceptance_samples import samples_of
from faser.train.acceptance_scores import bin_of, scores
from faser.train.acceptance_value import clairvoyant, lengths_by, replay

K = MAX_DEPTH
STALE = 0.4
"""How a made-up draft overrates itself: at place j it says c where the truth is c ** (1 + STALE j)."""


def tape_of_a_known_law(requests: int, seed: int) -> Tape:
    """Tokens match with probability q, and 0.6 q at T = 0.8; the draft's confidence is q ** (1 / (1 + STALE j))."""
    rng = np.random.default_rng(seed)
    length = np.full(requests, 60, np.int32)
    temperature = np.where(np.arange(requests) % 2, 0.8, 0.0).astype(np.float32)
    q = rng.uniform(0.2, 0.95, 60 * requests)
    match = rng.random(len(q)) < q * np.repeat(np.where(temperature > 0, 0.6, 1.0), 60)
    ahead = np.minimum(np.arange(len(q))[:, None] + np.arange(K), len(q) - 1)
    said = q[ahead] ** (1 / (1 + STALE * np.arange(K)))
    return Tape(
        domains=("made up",),
        domain=np.zeros(requests, np.uint8),
        prompt_tokens=np.full(requests, 10, np.int32),
        output_tokens=length,
        max_tokens=length,
        temperature=temperature,
        match=match,
        confidence=np.rint(255 * said).astype(np.uint8),
        source="a known law",
    )


def test_a_known_law_of_confidence_place_and_temperature_is_recovered() -> None:
    learn = samples_of(tape_of_a_known_law(800, seed=1), policies=("random",))
    check = samples_of(tape_of_a_known_law(60, seed=2), policies=("steady",))
    predictor = fit(learn, Fit(hidden=8, batch=1024, epochs=20))
    truth = check.confidence ** (1 + STALE * np.arange(K)) * np.where(check.temperature > 0, 0.6, 1.0)[:, None]
    judged = check.judged
    wrong = np.abs(predictor.conditional(check.confidence, check.history) - truth)[judged].mean()
    table_wrong = np.abs(binned(learn)[bin_of(check.confidence)] - truth)[judged].mean()
    assert wrong < 0.03
    assert table_wrong > 3 * wrong


def test_without_units_it_is_logistic_regression_and_still_beats_the_table_where_temperature_matters() -> None:
    learn = samples_of(tape_of_a_known_law(120, 1))
    predictor = fit(learn, Fit(hidden=0, batch=512, epochs=10))
    assert not predictor.arrays["out"].any()
    judged = learn.judged
    request = np.repeat(learn.request, judged.sum(axis=1))
    table = binned(learn)[bin_of(learn.confidence)]
    chance = predictor.conditional(learn.confidence, learn.history)
    assert scores(chance[judged], learn.accepted[judged], request, reference=table[judged]).gain_interval[0] > 0


@pytest.mark.parametrize("feature", ["temperature", "position"])
def test_a_feature_that_is_left_out_changes_nothing(feature: str) -> None:
    learn = samples_of(tape_of_a_known_law(40, 1))
    predictor = fit(learn, Fit(hidden=4, epochs=3, without=(feature,)))
    chance = predictor.conditional(learn.confidence, learn.history)
    if feature == "temperature":
        other = learn.history.copy()
        at = HISTORY_FEATURES.index(feature)
        other[:, at] = 0.8 - other[:, at]
        np.testing.assert_allclose(predictor.conditional(learn.confidence, other), chance, atol=1e-6)
    else:
        for name in ("bias", "token_skip", "unit_bias"):
            array = predictor.arrays[name]
            np.testing.assert_allclose(array, np.broadcast_to(array[:1], array.shape))


def test_histories_are_those_of_an_engine_that_verifies_three() -> None:
    tape = Tape.iid(1.0, requests=1, output_tokens=(20, 20))
    samples = samples_of(tape, policies=("static-3",))
    columns = dict(zip(HISTORY_FEATURES, samples.history.T, strict=True))
    assert (samples.context - tape.prompt_tokens[0]).tolist() == [0, 4, 8, 12, 16]  # the last token is not cached yet
    assert samples.left.tolist() == [19, 15, 11, 7, 3]
    assert samples.run.tolist() == [7, 7, 7, 7, 3]
    assert samples.judged.sum(axis=1).tolist() == [7, 7, 7, 7, 3]  # the text's end is no rejection
    kept = (1 - PRIOR) * (1 - FAST) ** (3 * np.arange(5))
    np.testing.assert_allclose(columns["acceptance_fast"], 1 - kept, rtol=1e-5)
    np.testing.assert_allclose(columns["last_accepted"], [PRIOR, 1, 1, 1, 1], rtol=1e-6)


def test_judged_ends_with_the_first_rejection() -> None:
    samples = samples_of(Tape.iid(0.5, requests=20))
    rejected = samples.judged & ~samples.accepted
    assert (rejected.sum(axis=1) <= 1).all()
    stops = samples.run < np.minimum(K, samples.left)
    assert (rejected.sum(axis=1) == stops).all()


def flat(ms_of_a_row: float) -> StepCost:
    return StepCost(name="t", device="t", source="t", verify=Curve((1.0, 1001.0), (1.0, 1.0 + 1000 * ms_of_a_row)))


def test_free_rows_are_all_verified_and_dear_ones_only_by_who_knows() -> None:
    samples = samples_of(Tape.iid(0.5, requests=40))
    even = np.cumprod(np.full((len(samples), K), 0.5), axis=1).astype(np.float32)
    chances: dict[str, Floats] = {"even": even, "known": clairvoyant(samples)}
    assert (lengths_by(even[:8], 0, flat(0.0)) == K).all()
    assert (lengths_by(even[:8], 0, flat(10.0)) == 0).all()
    for ms, least in ((0.0, 1.0), (0.1, 1.1)):
        results = replay(samples, chances, flat(ms), 8)
        rate = {name: result[:, 0].sum() / result[:, 1].sum() for name, result in results.items()}
        assert rate["known"] >= least * rate["even"]
    assert rate["known"] / rate["even"] < 3


def test_the_shipped_predictor_beats_the_20_bins_on_text_it_never_saw() -> None:
    tape = load_tape("smollm2")
    learn = samples_of(tape.split("train").take(np.arange(0, 400, 4)), policies=("random",))
    check = samples_of(tape.split("eval").take(np.arange(0, 400, 4)), policies=("random",))
    judged = check.judged
    request = np.repeat(check.request, judged.sum(axis=1))
    table = binned(learn)[bin_of(check.confidence)]
    chance = load_predictor("smollm2").conditional(check.confidence, check.history)
    s = scores(chance[judged], check.accepted[judged], request, reference=table[judged])
    assert s.gain_interval[0] > 0
    assert s.calibration_error < 0.04


def test_the_shipped_predictor_knows_the_models_of_its_tape() -> None:
    tape, predictor = load_tape("smollm2"), load_predictor("smollm2")
    assert (predictor.target, predictor.draft) == (tape.target, tape.draft)


def test_the_command_writes_what_it_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance_value, "DRAWN", 64)
    monkeypatch.setattr(acceptance_value, "LEAST", 4)
    tape_of_a_known_law(24, 3).save(tmp_path / "t.tape")
    out = tmp_path / "p.json"
    assert acceptance.main(["--tape", str(tmp_path / "t.tape"), "--out", str(out), "--hidden", "4", "--ablate"]) == 0
    report = capsys.readouterr().out
    for word in ("raw confidence", "20 bins", "logistic", "network", "T = 0.8", "clairvoyant", f"written: {out}"):
        assert word in report
    assert "train/acceptance.py" in load_predictor(out).trained["command"]
    before = (tmp_path / "t.tape").read_bytes()
    assert acceptance.main(["--tape", str(tmp_path / "t.tape"), "--out", str(tmp_path / "t.tape")]) == 2
    assert "which is there and no predictor" in capsys.readouterr().err
    assert (tmp_path / "t.tape").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tape", "nothing"], "tape 'nothing' is unknown"),
        (["--profile", "nothing"], "profile 'nothing' is unknown"),
        (["--predictor", "nothing"], "predictor 'nothing' is unknown"),
        (["--out", "no/such/folder/p.json"], "--out is 'no/such/folder/p.json'"),
        (["--out", "p.json", "--predictor", "smollm2"], "give one of the two"),
        (["--seed", "-1"], "--seed is -1; allowed: 0 to 2147483647"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert acceptance.main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
