"""`Tape`: recorded requests, flat over all their output positions, and its file format.

A file is one versioned .npz of plain arrays (never a pickle) with a sha256 over them, checked on loading.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, Floats, Ints

VERSION = 1
TAPES = Path(__file__).parent
PARTS = ("all", "train", "eval")
_ARRAYS = {
    "domains": "U",
    "domain": "u1",
    "prompt_tokens": "i4",
    "output_tokens": "i4",
    "max_tokens": "i4",
    "match": "u1",
    "confidence": "u1",
    "source": "U",
}
"""Arrays of a file and their dtypes; `match` is bit-packed there."""


class TapeError(ValueError):
    """A tape that cannot be used, in one line."""


@dataclass(frozen=True)
class Tape:
    """R recorded requests with T output positions in all, request after request.

    domains: names; domain: [R] uint8, index into them.
    prompt_tokens, output_tokens: [R] int32, lengths; outputs that ended by themselves include the end token.
    max_tokens: [R] int32, the limit that the request ran under (what a server knows of its output length).
    match: [T] bool, the draft's greedy token after the true text before position t is the target's token t.
    confidence: [T, K] uint8, 255 x the largest softmax probability at the j-th token of the draft's own greedy
        continuation from position t. Up to the first mismatch that continuation is the target's text.
    source: how it was made, for people.
    """

    domains: tuple[str, ...]
    domain: NDArray[np.uint8]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    match: NDArray[np.bool_]
    confidence: NDArray[np.uint8]
    source: str

    def __post_init__(self) -> None:
        requests, positions = len(self.output_tokens), int(self.output_tokens.sum())
        for name in ("domain", "prompt_tokens", "max_tokens"):
            _expect(name, getattr(self, name).shape, (requests,))
        _expect("match", self.match.shape, (positions,))
        _expect("confidence", self.confidence.shape, (positions, MAX_DEPTH))
        if not requests:
            raise TapeError("a tape needs at least 1 request")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise TapeError("prompt_tokens and output_tokens must be at least 1")
        if (self.max_tokens < self.output_tokens).any():
            raise TapeError("max_tokens must not be less than output_tokens")
        if self.domain.max() >= len(self.domains):
            raise TapeError(f"domain holds {self.domain.max()}; allowed: 0 to {len(self.domains) - 1}")

    def __len__(self) -> int:
        return len(self.output_tokens)

    @cached_property
    def offsets(self) -> Ints:
        """[R + 1] first position of each request, and T."""
        return np.concatenate(([0], np.cumsum(self.output_tokens, dtype=np.int64)))

    @cached_property
    def run_lengths(self) -> Ints:
        """[T] matches in a row from each position on, within its request: the most that can be accepted there."""
        at = np.arange(len(self.match))
        stop = np.where(self.match, len(self.match), at)
        stop = np.minimum.accumulate(stop[::-1])[::-1]
        ends = np.repeat(self.offsets[1:], self.output_tokens)
        return np.asarray(np.minimum(stop, ends) - at, np.int64)

    @cached_property
    def probability(self) -> Floats:
        """[T, K] float32, `confidence` as a number in [0, 1]."""
        return self.confidence.astype(np.float32) / np.float32(255.0)

    def acceptance(self) -> dict[str, float]:
        """Share of positions where the draft's token is right, by domain."""
        domain = np.repeat(self.domain, self.output_tokens)
        return {
            name: float(self.match[domain == i].mean()) for i, name in enumerate(self.domains) if (domain == i).any()
        }

    def take(self, requests: Ints) -> Tape:
        """The tape of `requests` [M], indices, in that order."""
        at = np.concatenate([np.arange(self.offsets[r], self.offsets[r + 1]) for r in requests])
        return Tape(
            self.domains,
            self.domain[requests],
            self.prompt_tokens[requests],
            self.output_tokens[requests],
            self.max_tokens[requests],
            self.match[at],
            self.confidence[at],
            self.source,
        )

    def split(self, part: str) -> Tape:
        """`train` or `eval`: every second request of each domain, so that evaluation sees others; or `all`."""
        if part not in PARTS:
            raise TapeError(f"part is {part!r}; allowed: {', '.join(PARTS)}")
        if part == "all":
            return self
        within = np.zeros(len(self), np.int64)
        for i in range(len(self.domains)):
            mine = self.domain == i
            within[mine] = np.arange(mine.sum())
        chosen = np.flatnonzero(within % 2 == PARTS.index(part) - 1)
        if not len(chosen):
            raise TapeError(f"part {part!r} of this tape of {len(self)} requests is empty")
        return self.take(chosen)

    @classmethod
    def iid(
        cls,
        rate: float,
        *,
        requests: int = 256,
        prompt_tokens: tuple[int, int] = (32, 256),
        output_tokens: tuple[int, int] = (32, 256),
        spread: float = 2.0,
        seed: int = 0,
    ) -> Tape:
        """A made-up tape: every token matches with probability `rate`, whatever came before.

        Lengths are uniform over their (lowest, highest). Confidences are calibrated: drawn from Beta(rate x spread,
        (1 - rate) x spread), and a token matches with exactly the probability that its confidence says.
        """
        if not 0.0 <= rate <= 1.0:
            raise TapeError(f"rate is {rate}; allowed: 0 to 1")
        rng = np.random.default_rng(seed)
        prompts = rng.integers(prompt_tokens[0], prompt_tokens[1] + 1, requests).astype(np.int32)
        outputs = rng.integers(output_tokens[0], output_tokens[1] + 1, requests).astype(np.int32)
        total = int(outputs.sum())
        a, b = max(rate * spread, 1e-6), max((1.0 - rate) * spread, 1e-6)
        chance = rng.beta(a, b, total)
        chance = np.full(total, rate) if rate in (0.0, 1.0) else chance
        match = rng.random(total) < chance
        tape = cls(
            domains=("iid",),
            domain=np.zeros(requests, np.uint8),
            prompt_tokens=prompts,
            output_tokens=outputs,
            max_tokens=np.full(requests, output_tokens[1], np.int32),
            match=match,
            confidence=np.zeros((total, MAX_DEPTH), np.uint8),
            source=f"made up: matches i.i.d. with probability {rate:g}, seed {seed}",
        )
        # Past its first mismatch the draft goes on by itself: those confidences say nothing of the target's text.
        ahead = np.arange(total)[:, None] + np.arange(MAX_DEPTH)
        alive = (np.arange(MAX_DEPTH) <= tape.run_lengths[:, None]) & (ahead < total)
        stray = np.full(ahead.shape, rate) if rate in (0.0, 1.0) else rng.beta(a, b, ahead.shape)
        tape.confidence[:] = np.rint(255 * np.where(alive, chance[np.minimum(ahead, total - 1)], stray))
        return tape

    def save(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        arrays = {
            "domains": np.array(self.domains),
            "domain": self.domain,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "max_tokens": self.max_tokens,
            "match": np.packbits(self.match),
            "confidence": self.confidence,
            "source": np.array(self.source),
        }
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            stamp = {"version": np.array(VERSION), "sha256": np.array(_digest(arrays))}
            np.savez_compressed(file, allow_pickle=False, **stamp, **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Tape:
        """Read and check a file. TapeError says in one line what is wrong with it."""
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, TypeError, AttributeError) as error:
            raise TapeError(f"tape {path} cannot be read: {error}") from None
        try:
            return cls._from_arrays(arrays)
        except TapeError as error:
            raise TapeError(f"tape {path}: {error}") from None

    @classmethod
    def _from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> Tape:
        version, digest = arrays.pop("version", None), arrays.pop("sha256", None)
        if version is None or version.shape or version != VERSION:
            raise TapeError(f"format version is {version}; this code reads {VERSION}")
        if set(arrays) != set(_ARRAYS):
            raise TapeError(f"holds arrays {sorted(arrays)}; expected {sorted(_ARRAYS)}")
        for name, kind in _ARRAYS.items():
            dtype = arrays[name].dtype
            if dtype.kind != "U" if kind == "U" else dtype != np.dtype(kind):
                raise TapeError(f"{name} is of type {dtype}; expected {kind}")
        if digest is None or str(digest) != _digest(arrays):
            raise TapeError("sha256 does not fit its contents: the file is damaged or was edited")
        positions = int(arrays["output_tokens"].astype(np.int64).sum())
        bits = arrays.pop("match")
        _expect("match (packed)", bits.shape, (-(-positions // 8),))
        match = np.unpackbits(bits.astype(np.uint8), count=positions).astype(np.bool_)
        domains = tuple(str(d) for d in np.atleast_1d(arrays.pop("domains")))
        return cls(domains=domains, match=match, source=str(arrays.pop("source")), **arrays)


def _expect(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise TapeError(f"{name} has shape {shape}; {expected} expected")


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def known_tapes() -> list[str]:
    """Names that `load_tape` takes."""
    return sorted(p.stem for p in TAPES.glob("*.npz"))


def load_tape(name: str | Path) -> Tape:
    """The shipped tape `name`, or the one in a file of that path. TapeError: unknown, or unusable."""
    path = TAPES / f"{name}.npz"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise TapeError(f"tape {str(name)!r} is unknown; known: {', '.join(known_tapes())}, or a file")
    return Tape.load(path)
