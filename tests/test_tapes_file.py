"""A tape's file: it comes back as it was, is mapped rather than read, and anything else is refused in one line."""

from __future__ import annotations

import lzma
import struct
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.models import default_cache
from faser.tapes import Tape, TapeError, known_tapes, load_tape
from faser.tapes.mapped import open_mapped, to_bytes


def small() -> Tape:
    return Tape(
        domains=("a", "ü"),
        domain=np.array([0, 1], np.uint8),
        prompt_tokens=np.array([5, 2], np.int32),
        output_tokens=np.array([3, 4], np.int32),
        max_tokens=np.array([8, 4], np.int32),
        temperature=np.array([0.0, 0.8], np.float32),
        match=np.array([1, 0, 1, 1, 1, 0, 1], np.bool_),
        confidence=np.arange(7 * MAX_DEPTH, dtype=np.uint8).reshape(7, MAX_DEPTH),
        rank=np.arange(21, dtype=np.uint8).reshape(7, 3),
        tokens=np.arange(14, dtype=np.uint16),
        layers=(2, 3, 4),
        vocabulary=70_000,
        target="abc",
        draft="def",
        source="by hand",
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    return default_cache()


def assert_equal(ours: Tape, theirs: Tape) -> None:
    for each in fields(Tape):
        a, b = getattr(ours, each.name), getattr(theirs, each.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape), each.name
        assert np.array_equal(a, b), each.name


@pytest.mark.parametrize("name", ["t.tape", "t.tape.xz"])
@pytest.mark.parametrize("tape", [small(), Tape.iid(0.5, requests=5)], ids=["full", "without texts and ranks"])
def test_a_saved_tape_loads_as_it_was(name: str, tape: Tape, tmp_path: Path, cache: Path) -> None:
    tape.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert_equal(load_tape(tmp_path / name), tape)
    assert cache.exists() == (name == "t.tape.xz")


def test_a_plain_tape_is_mapped_where_it_lies(tmp_path: Path, cache: Path) -> None:
    small().save(tmp_path / "t.tape")
    loaded = load_tape(tmp_path / "t.tape")
    assert isinstance(loaded.confidence.base, np.ndarray)
    assert not loaded.confidence.flags.writeable
    assert all(getattr(loaded, name).flags.aligned for name in ("temperature", "max_tokens", "tokens"))
    assert str(tmp_path / "t.tape") in Path("/proc/self/maps").read_text()
    assert not cache.exists()


def test_others_read_it_as_safetensors(tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    small().save(tmp_path / "t.tape")
    theirs, (ours, _) = numpy_reader.load_file(tmp_path / "t.tape"), open_mapped(tmp_path / "t.tape")
    assert theirs.keys() == ours.keys()
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name])


def rewritten(**changes: Any) -> Callable[[Path], None]:
    """Make the file anew, its checksum too, with other arrays or metadata; None: without."""

    def rewrite(path: Path) -> None:
        arrays, metadata = open_mapped(path)
        parts: dict[str, Any] = {**arrays, **metadata, **changes}
        parts = {name: part for name, part in parts.items() if part is not None}
        path.write_bytes(
            to_bytes(
                {name: part for name, part in parts.items() if not isinstance(part, str)},
                {name: part for name, part in parts.items() if isinstance(part, str)},
            )
        )

    return rewrite


def replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new, 1))

    return edit


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (rewritten(version="1"), "is 'faser-tape', format version 1; this code reads 'faser-tape', 2"),
        (rewritten(version=None), "format version None"),
        (rewritten(format="other"), "is 'other'"),
        (rewritten(rank=None), "holds"),
        (rewritten(extra=np.zeros(1, np.uint8)), "holds"),
        (rewritten(source=None), "holds"),
        (rewritten(confidence=np.zeros((7, MAX_DEPTH), np.float32)), "confidence is of type float32; expected u1"),
        (rewritten(match=np.zeros(9, np.uint8)), "match (packed) has shape (9,)"),
        (rewritten(max_tokens=np.array([1, 1], np.int32)), "max_tokens must not be less"),
        (rewritten(output_tokens=np.array([-3, 10], np.int32)), "at least 1"),
        (rewritten(domains="7"), "domains"),
        (rewritten(layers="["), "layers"),
        (rewritten(vocabulary="many"), "vocabulary"),
        (rewritten(vocabulary="9" * 5000), "vocabulary is '999"),
        (rewritten(layers="[" * 9000), "layers is '[["),
        (rewritten(layers="[0, 1, 2]"), "layers holds 0; allowed: 1 or more"),
        (rewritten(temperature=np.array([0, np.inf], np.float32)), "temperature holds inf"),
        (replaced(b"by hand", b"by foot"), "sha256 does not fit"),
        (replaced(b'"draft":"def"', b'"draft":"dem"'), "sha256 does not fit"),
        (flipped, "sha256 does not fit"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), "after its end"),
        (lambda path: path.write_bytes(b"PK" * 99), "is no safetensors file"),
        (lambda path: path.write_bytes(b"\x07" + b"\0" * 7 + b'["a"]  '), "is no tape of ours"),
        (lambda path: path.write_bytes(struct.pack("<Q", 90_000) + b"[" * 90_000), "is no tape of ours"),
    ],
)
def test_an_altered_file_is_refused_in_one_line(change: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.tape"
    small().save(path)
    change(path)
    with pytest.raises(TapeError) as error:
        load_tape(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["t.tape", "t.tape.xz"])
@pytest.mark.usefixtures("cache")
def test_a_file_that_is_cut_short_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    small().save(path)
    whole = path.read_bytes()
    for size in (0, 7, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(TapeError, match=r"is cut short|cannot be read") as error:
            load_tape(path)
        assert "\n" not in str(error.value)


def test_a_compressed_tape_is_expanded_once_and_again_when_the_expansion_is_damaged(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.tape.xz"
    small().save(path)
    load_tape(path)
    (expanded,) = (cache / "tapes").iterdir()
    with monkeypatch.context() as patch:
        patch.delattr(lzma, "decompress")
        load_tape(path)
    whole = expanded.read_bytes()
    expanded.write_bytes(whole[:-1])
    assert_equal(load_tape(path), small())
    assert expanded.read_bytes() == whole
    assert [p.name for p in (cache / "tapes").iterdir()] == [expanded.name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path) -> None:
    small().save(tmp_path / "t.tape.xz")
    cache.write_text("in the way")
    with pytest.raises(TapeError, match="FASER_CACHE names another directory"):
        load_tape(tmp_path / "t.tape.xz")


def test_an_interrupted_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.tape"
    path.write_text("older")

    def interrupted(self: Path, content: bytes) -> int:
        self.write_text(content.hex()[:99])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small().save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.tape"]
    assert path.read_text() == "older"


def test_another_ending_is_no_tape(tmp_path: Path) -> None:
    with pytest.raises(TapeError, match=r"'t.npz' is no name of a tape; allowed: NAME.tape or NAME.tape.xz"):
        small().save(tmp_path / "t.npz")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(TapeError, match=r"tape 'nope' is unknown; known: .*smollm2"):
        load_tape("nope")


@pytest.mark.parametrize("name", known_tapes())
def test_shipped_tapes_are_whole_and_of_some_variety(name: str) -> None:
    tape = load_tape(name)
    assert len(tape) >= 100
    assert len(tape.acceptance()) == len(tape.domains) >= 5
    for part in ("train", "eval"):
        assert len(tape.split(part).acceptance()) == len(tape.domains)
    # Confidence must tell something, or no policy could learn from it.
    sure, unsure = tape.probability[:, 0] > 0.8, tape.probability[:, 0] < 0.3
    assert tape.match[sure].mean() > tape.match[unsure].mean() + 0.3
