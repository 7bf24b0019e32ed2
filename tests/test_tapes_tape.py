"""A tape says exactly what was recorded, and cannot be put together wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.tapes import Tape, TapeError


def small(match: list[int], outputs: list[int]) -> Tape:
    total = len(match)
    return Tape(
        domains=("a", "b"),
        domain=np.arange(len(outputs), dtype=np.uint8) % 2,
        prompt_tokens=np.full(len(outputs), 5, np.int32),
        output_tokens=np.array(outputs, np.int32),
        max_tokens=np.full(len(outputs), 50, np.int32),
        match=np.array(match, np.bool_),
        confidence=np.arange(total * MAX_DEPTH, dtype=np.uint8).reshape(total, MAX_DEPTH),
        source="by hand",
    )


def test_a_run_counts_matches_up_to_the_first_mismatch_or_the_end_of_its_request() -> None:
    tape = small([1, 1, 0, 1, 1, 1, 1, 0, 0, 1], [5, 2, 3])
    assert tape.run_lengths.tolist() == [2, 1, 0, 2, 1, 2, 1, 0, 0, 1]


def test_wrong_shapes_and_lengths_are_named() -> None:
    with pytest.raises(TapeError, match=r"match has shape \(3,\); \(4,\) expected"):
        small([1, 0, 1], [4])
    with pytest.raises(TapeError, match="at least 1"):
        small([1], [1, 0])
    with pytest.raises(TapeError, match="max_tokens must not be less"):
        small([1] * 60, [60])
    with pytest.raises(TapeError, match="temperature holds nan"):
        replace(small([1], [1]), temperature=np.array([np.nan], np.float32))
    with pytest.raises(TapeError, match=r"rank has shape \(1, 2\); \(1, 1\) expected"):
        replace(small([1], [1]), rank=np.zeros((1, 2), np.uint8), layers=(3,))
    with pytest.raises(TapeError, match=r"tokens has shape \(5,\); \(6,\) expected"):
        replace(small([1], [1]), tokens=np.zeros(5, np.uint16), vocabulary=9)
    with pytest.raises(TapeError, match=r"tokens holds 9; allowed: less than 9"):
        replace(small([1], [1]), tokens=np.full(6, 9, np.uint16), vocabulary=9)


def test_a_part_keeps_all_that_belongs_to_its_requests() -> None:
    tape = replace(
        small([1, 0, 1, 1, 1, 0, 1], [3, 2, 2]),
        tokens=np.arange(22, dtype=np.uint16),
        rank=np.arange(14, dtype=np.uint8).reshape(7, 2),
        layers=(1, 2),
        vocabulary=30,
        temperature=np.array([0.0, 0.5, 0.0], np.float32),
    )
    part = tape.take(np.array([2, 0]))
    assert part.text(0) == ([15, 16, 17, 18, 19], [20, 21])
    assert part.text(1) == ([0, 1, 2, 3, 4], [5, 6, 7])
    assert part.rank.tolist() == [[10, 11], [12, 13], [0, 1], [2, 3], [4, 5]]
    assert part.temperature.tolist() == [0.0, 0.0]
    assert part.match.tolist() == [0, 1, 1, 0, 1]
    with pytest.raises(TapeError, match="holds no tokens"):
        small([1], [1]).text(0)


def test_the_halves_have_each_prompt_on_one_side_at_all_its_temperatures() -> None:
    tape = Tape.iid(0.5, requests=18)  # nine prompts, an odd number, at two temperatures
    prompt = np.tile(np.arange(9), 2).astype(np.int32) + 1
    tape = replace(tape, prompt_tokens=prompt, temperature=np.repeat([0.0, 0.8], 9).astype(np.float32))
    train, held_out = tape.split("train"), tape.split("eval")
    assert not {*train.prompt_tokens.tolist()} & {*held_out.prompt_tokens.tolist()}
    assert {*train.temperature.tolist()} == {*held_out.temperature.tolist()}


def test_the_halves_share_no_request_and_hold_all_domains() -> None:
    tape = Tape.iid(0.5, requests=41)
    tape = replace(tape, domains=("x", "y"), domain=np.arange(41, dtype=np.uint8) % 2)
    train, held_out = tape.split("train"), tape.split("eval")
    assert len(train) + len(held_out) == 41
    assert set(train.domain) == set(held_out.domain) == {0, 1}
    whole = {_print(tape, i) for i in range(41)}
    ours, theirs = ({_print(t, i) for i in range(len(t))} for t in (train, held_out))
    assert not ours & theirs
    assert ours | theirs == whole
    with pytest.raises(TapeError, match="part is 'test'; allowed: all, train, eval"):
        tape.split("test")


def _print(tape: Tape, i: int) -> bytes:
    return tape.confidence[tape.offsets[i] : tape.offsets[i + 1]].tobytes()


def test_an_iid_tape_has_the_asked_rate_and_calibrated_confidences() -> None:
    tape = Tape.iid(0.7, requests=400, seed=3)
    assert tape.match.mean() == pytest.approx(0.7, abs=0.01)
    after_match = tape.match[1:][tape.match[:-1]]
    assert after_match.mean() == pytest.approx(0.7, abs=0.01)  # independent of the token before
    for low in (0.1, 0.4, 0.7):
        near = np.abs(tape.probability[:, 0] - low) < 0.05
        assert tape.match[near].mean() == pytest.approx(low, abs=0.04)
    # The j-th confidence of a continuation is that of the position itself, as long as all before it match.
    t = np.flatnonzero(tape.run_lengths >= 3)[:100]
    assert np.array_equal(
        tape.confidence[t, 3][tape.run_lengths[t] > 3], tape.confidence[t + 3, 0][tape.run_lengths[t] > 3]
    )
    with pytest.raises(TapeError, match=r"rate is 1\.5"):
        Tape.iid(1.5)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_an_iid_tape_can_be_hopeless_or_perfect(rate: float) -> None:
    tape = Tape.iid(rate, requests=5)
    assert tape.match.mean() == rate
    assert (tape.confidence == 255 * rate).all()
