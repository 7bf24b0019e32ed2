"""A tape says exactly what was recorded, and refuses to be anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.tapes import Tape, TapeError, known_tapes, load_tape


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


def test_a_saved_tape_loads_as_it_was(tmp_path: Path) -> None:
    tape = small([1, 0, 1, 1, 1, 0, 1], [3, 4])
    tape.save(tmp_path / "t.npz")
    loaded = load_tape(tmp_path / "t.npz")
    assert (loaded.domains, loaded.source) == (tape.domains, tape.source)
    for name in ("domain", "prompt_tokens", "output_tokens", "max_tokens", "match", "confidence"):
        ours, theirs = getattr(tape, name), getattr(loaded, name)
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def _rewrite(path: Path, **changes: Any) -> None:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays.update(changes)
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": np.array(2)}, "format version is 2; this code reads 1"),
        ({"version": None}, "format version is None"),
        ({"confidence": np.zeros((7, MAX_DEPTH), np.uint8)}, "sha256 does not fit"),
        ({"match": None}, "holds arrays"),
        ({"extra": np.zeros(1)}, "holds arrays"),
        ({"confidence": np.zeros((7, MAX_DEPTH))}, "confidence is of type float64"),
        ({"sha256": np.array("0")}, "sha256 does not fit"),
    ],
)
def test_an_altered_file_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = tmp_path / "t.npz"
    small([1, 0, 1, 1, 1, 0, 1], [3, 4]).save(path)
    _rewrite(path, **changes)
    with pytest.raises(TapeError) as error:
        Tape.load(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_truncated_and_pickled_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    small([1, 0, 1], [3]).save(path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TapeError, match=r"cannot be read|sha256"):
            Tape.load(path)
    np.savez(path, version=np.array([{"a": 1}], dtype=object))
    with pytest.raises(TapeError, match="cannot be read"):
        Tape.load(path)


def test_wrong_shapes_and_lengths_are_named() -> None:
    with pytest.raises(TapeError, match=r"match has shape \(3,\); \(4,\) expected"):
        small([1, 0, 1], [4])
    with pytest.raises(TapeError, match="at least 1"):
        small([1], [1, 0])
    with pytest.raises(TapeError, match="max_tokens must not be less"):
        small([1] * 60, [60])


def test_the_halves_share_no_request_and_hold_all_domains() -> None:
    tape = Tape.iid(0.5, requests=41)
    tape = Tape(("x", "y"), np.arange(41, dtype=np.uint8) % 2, *_rest(tape))
    train, held_out = tape.split("train"), tape.split("eval")
    assert len(train) + len(held_out) == 41
    assert set(train.domain) == set(held_out.domain) == {0, 1}
    whole = {_print(tape, i) for i in range(41)}
    ours, theirs = ({_print(t, i) for i in range(len(t))} for t in (train, held_out))
    assert not ours & theirs
    assert ours | theirs == whole
    with pytest.raises(TapeError, match="part is 'test'; allowed: all, train, eval"):
        tape.split("test")


def _rest(tape: Tape) -> tuple[Any, ...]:
    return (tape.prompt_tokens, tape.output_tokens, tape.max_tokens, tape.match, tape.confidence, tape.source)


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


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TapeError, match=r"tape 'nope' is unknown; known: .*smollm2"):
        load_tape("nope")


@pytest.mark.parametrize("name", ["smollm2"])
def test_shipped_tapes_are_whole_and_of_some_variety(name: str) -> None:
    assert name in known_tapes()
    tape = load_tape(name)
    assert len(tape) >= 100
    assert len(tape.acceptance()) == len(tape.domains) >= 5
    for part in ("train", "eval"):
        assert len(tape.split(part).acceptance()) == len(tape.domains)
    # Confidence must tell something, or no policy could learn from it.
    sure, unsure = tape.probability[:, 0] > 0.8, tape.probability[:, 0] < 0.3
    assert tape.match[sure].mean() > tape.match[unsure].mean() + 0.3
