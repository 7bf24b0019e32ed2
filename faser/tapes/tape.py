"""`Tape`: recorded requests, flat over all their output positions.

One decision: what a request's acceptance depends on is one row per output position, so that a simulator indexes arrays
and never walks texts. The file is a safetensors file (`faser.tapes.mapped`), its arrays mapped where they lie.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH, Floats, Ints
from faser.tapes.mapped import MappedError, open_mapped, to_bytes, write_whole

FORMAT, VERSION = "faser-tape", "2"
PLAIN, PACKED = ".tape", ".tape.xz"
"""Endings of a tape that is mapped where it lies, and of a compressed one."""

PARTS = ("all", "train", "eval")
_ARRAYS = {
    "domain": "u1",
    "prompt_tokens": "i4",
    "output_tokens": "i4",
    "max_tokens": "i4",
    "temperature": "f4",
    "match": "u1",
    "confidence": "u1",
    "rank": "u1",
    "tokens": "u2 u4",
}
"""Arrays of a file and the dtypes that they may have; `match` is bit-packed there."""

_TEXTS = ("source", "target", "draft")
_METADATA = {"format", "version", "domains", "layers", "vocabulary", *_TEXTS}
MAX_DIGITS = 10
E = TypeVar("E")


class TapeError(ValueError):
    """A tape that cannot be used or made, in one line."""


@dataclass(frozen=True, kw_only=True)
class Tape:
    """R recorded requests with T output positions in all, request after request.

    domains: names; domain: [R] uint8, index into them.
    prompt_tokens, output_tokens: [R] int32, lengths; outputs that ended by themselves include the end token.
    max_tokens: [R] int32, the limit that the request ran under (what a server knows of its output length).
    temperature: [R] float32, of the target; 0, or left out: greedy. Drafting is greedy at any temperature.
    match: [T] bool, the draft's greedy token after the true text before position t is the target's token t.
    confidence: [T, K] uint8, 255 x the largest softmax probability at the j-th token of the draft's own greedy
        continuation from position t. Up to the first mismatch that continuation is the target's text.
    rank: [T, L] uint8, an early exit's view of the draft's first token at position t: how many tokens the target's
        layer `layers[l]` holds more likely (its hidden state through the final norm and the output head), at most 255.
        [T, L] is enough for drafts of any length: up to its first mismatch, a draft's token j at position t IS the
        first token at t + j; what comes after that mismatch is rejected whatever its rank.
    tokens: [sum(prompt + output)] uint16, or uint32 for a large vocabulary: each request's prompt, then its output.
    layers: [L] how many of the target's layers have run. vocabulary: its size.
    target, draft: fingerprints of the weights (`faser.models.fingerprint`), the target's of its function.
    source: how it was made, for people.
    Where nothing was recorded, `tokens` is empty, L is 0, `vocabulary` is 0 and fingerprints are "".
    """

    domains: tuple[str, ...]
    domain: NDArray[np.uint8]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    match: NDArray[np.bool_]
    confidence: NDArray[np.uint8]
    source: str
    temperature: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    rank: NDArray[np.uint8] = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    tokens: NDArray[np.unsignedinteger[Any]] = field(default_factory=lambda: np.zeros(0, np.uint16))
    layers: tuple[int, ...] = ()
    vocabulary: int = 0
    target: str = ""
    draft: str = ""

    def __post_init__(self) -> None:
        requests, positions = len(self.output_tokens), int(self.output_tokens.sum())
        if not requests:
            raise TapeError("a tape needs at least 1 request")
        if not self.temperature.size:
            object.__setattr__(self, "temperature", np.zeros(requests, np.float32))
        if not self.rank.size and not self.layers:
            object.__setattr__(self, "rank", np.zeros((positions, 0), np.uint8))
        for name in ("domain", "prompt_tokens", "max_tokens", "temperature"):
            _expect(name, getattr(self, name).shape, (requests,))
        _expect("match", self.match.shape, (positions,))
        _expect("confidence", self.confidence.shape, (positions, MAX_DEPTH))
        _expect("rank", self.rank.shape, (positions, len(self.layers)))
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise TapeError("prompt_tokens and output_tokens must be at least 1")
        if (self.max_tokens < self.output_tokens).any():
            raise TapeError("max_tokens must not be less than output_tokens")
        if self.domain.max() >= len(self.domains):
            raise TapeError(f"domain holds {self.domain.max()}; allowed: 0 to {len(self.domains) - 1}")
        odd = self.temperature[~(np.isfinite(self.temperature) & (self.temperature >= 0))]
        if odd.size:
            raise TapeError(f"temperature holds {odd[0]}; allowed: 0 or more")
        if min(self.layers, default=1) < 1:
            raise TapeError(f"layers holds {min(self.layers)}; allowed: 1 or more")
        if self.tokens.size:
            _expect("tokens", self.tokens.shape, (positions + int(self.prompt_tokens.sum()),))
            if self.tokens.max() >= self.vocabulary:
                raise TapeError(f"tokens holds {self.tokens.max()}; allowed: less than {self.vocabulary} (vocabulary)")

    def __len__(self) -> int:
        return len(self.output_tokens)

    @cached_property
    def offsets(self) -> Ints:
        """[R + 1] first position of each request, and T."""
        return np.concatenate(([0], np.cumsum(self.output_tokens, dtype=np.int64)))

    @cached_property
    def ends(self) -> Ints:
        """[T] where the request of each position ends."""
        return np.repeat(self.offsets[1:], self.output_tokens)

    @cached_property
    def steps_left(self) -> Ints:
        """[K + 1, T] steps to the request's end from each position, at each fixed draft length K."""
        depth = np.arange(MAX_DEPTH + 1)[:, None]
        steps = np.ones((MAX_DEPTH + 1, len(self.match)), np.int64)
        for back in range(2, int(self.output_tokens.max()) + 1):  # from the end on, all requests at once
            end = self.offsets[1:][self.output_tokens >= back]
            at = end - back
            after = at + 1 + np.minimum(self.run_lengths[at], depth)
            steps[:, at] += np.where(after < end, steps[depth, np.minimum(after, end - 1)], 0)
        return steps

    @cached_property
    def run_lengths(self) -> Ints:
        """[T] matches in a row from each position on, within its request: the most that can be accepted there."""
        return self.runs(self.match)

    def runs(self, right: NDArray[np.bool_]) -> Ints:
        """[T] how many of `right` [T] in a row are true from each position on, within its request."""
        at = np.arange(len(right))
        stop = np.where(right, len(right), at)
        stop = np.minimum.accumulate(stop[::-1])[::-1]
        return np.asarray(np.minimum(stop, self.ends) - at, np.int64)

    @cached_property
    def probability(self) -> Floats:
        """[T, K] float32, `confidence` as a number in [0, 1]."""
        return self.confidence.astype(np.float32) / np.float32(255.0)

    def text(self, request: int) -> tuple[list[int], list[int]]:
        """Token ids of a request's prompt and of its output. TapeError: this tape recorded none."""
        if not self.tokens.size:
            raise TapeError("this tape holds no tokens: it was recorded without them")
        middle = int(self._texts[request] + self.prompt_tokens[request])
        start, end = self._texts[request : request + 2].tolist()
        return self.tokens[start:middle].tolist(), self.tokens[middle:end].tolist()

    @cached_property
    def _texts(self) -> Ints:
        """[R + 1] where each request's text starts in `tokens`, and their end."""
        return np.concatenate(([0], np.cumsum(self.prompt_tokens.astype(np.int64) + self.output_tokens)))

    def acceptance(self) -> dict[str, float]:
        """Share of positions where the draft's token is right, by domain."""
        domain = np.repeat(self.domain, self.output_tokens)
        return {
            name: float(self.match[domain == i].mean()) for i, name in enumerate(self.domains) if (domain == i).any()
        }

    def take(self, requests: Ints) -> Tape:
        """The tape of `requests` [M], indices, in that order."""
        at = _spans(self.offsets, requests)
        return Tape(
            domains=self.domains,
            domain=self.domain[requests],
            prompt_tokens=self.prompt_tokens[requests],
            output_tokens=self.output_tokens[requests],
            max_tokens=self.max_tokens[requests],
            temperature=self.temperature[requests],
            match=self.match[at],
            confidence=self.confidence[at],
            rank=self.rank[at],
            tokens=self.tokens[_spans(self._texts, requests)] if self.tokens.size else self.tokens,
            layers=self.layers,
            vocabulary=self.vocabulary,
            target=self.target,
            draft=self.draft,
            source=self.source,
        )

    def split(self, part: str) -> Tape:
        """`train` or `eval`: the first or the second half of the requests of each domain and temperature; or `all`.

        Evaluation sees other prompts: a recorder that writes each prompt at several temperatures does so in one order.
        And other documents, where prompts about one are neighbours.
        """
        if part not in PARTS:
            raise TapeError(f"part is {part!r}; allowed: {', '.join(PARTS)}")
        if part == "all":
            return self
        second = np.zeros(len(self), np.bool_)
        for kind in {*zip(self.domain.tolist(), self.temperature.tolist(), strict=True)}:
            mine = np.flatnonzero((self.domain == kind[0]) & (self.temperature == np.float32(kind[1])))
            second[mine[(len(mine) + 1) // 2 :]] = True
        chosen = np.flatnonzero(second == (part == "eval"))
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
        """Write the file, complete or not at all; compressed if it ends in .xz. TapeError: another name."""
        if not path.name.endswith((PLAIN, PACKED)):
            raise TapeError(f"{path.name!r} is no name of a tape; allowed: NAME{PLAIN} or NAME{PACKED}")
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "domains": json.dumps(self.domains),
            "layers": json.dumps(self.layers),
            "vocabulary": str(self.vocabulary),
            **{name: getattr(self, name) for name in _TEXTS},
        }
        content = to_bytes({**arrays, "match": np.packbits(self.match)}, metadata)
        write_whole(path, lzma.compress(content, preset=9) if path.suffix == ".xz" else content)

    @classmethod
    def load(cls, path: Path) -> Tape:
        """Map and check a plain file. TapeError says in one line what is wrong with it."""
        try:
            return cls._from_file(*open_mapped(path))
        except OSError as error:
            raise TapeError(f"tape {path} cannot be read: {error.strerror}") from None
        except (TapeError, MappedError) as error:
            raise TapeError(f"tape {path} {error}") from None

    @classmethod
    def _from_file(cls, arrays: dict[str, Any], metadata: dict[str, str]) -> Tape:
        kind, version = metadata.get("format"), metadata.get("version")
        if (kind, version) != (FORMAT, VERSION):
            raise TapeError(f"is {kind!r}, format version {version}; this code reads {FORMAT!r}, {VERSION}")
        if set(arrays) != set(_ARRAYS) or set(metadata) != _METADATA:
            found, expected = sorted({*arrays, *metadata}), sorted({*_ARRAYS, *_METADATA})
            raise TapeError(f"holds {', '.join(found)}; expected {', '.join(expected)}")
        for name, value in metadata.items():
            if not isinstance(value, str):
                raise TapeError(f"{name} is {value!r}; a text expected")
        for name, kinds in _ARRAYS.items():
            dtype = arrays[name].dtype
            if dtype not in [np.dtype(k) for k in kinds.split()]:
                raise TapeError(f"{name} is of type {dtype}; expected {kinds}")
        positions = int(arrays["output_tokens"].astype(np.int64).sum())
        bits = arrays.pop("match")
        _expect("match (packed)", bits.shape, (-(-positions // 8),))
        return cls(
            match=np.unpackbits(bits, count=positions).astype(np.bool_),
            domains=_list_of(str, "domains", metadata),
            layers=_list_of(int, "layers", metadata),
            vocabulary=_whole("vocabulary", metadata),
            source=metadata["source"],
            target=metadata["target"],
            draft=metadata["draft"],
            **arrays,
        )


def _list_of(kind: type[E], name: str, metadata: dict[str, str]) -> tuple[E, ...]:
    """Metadata are texts; this one is a JSON list."""
    try:
        values = json.loads(metadata[name])
        if type(values) is list and all(type(value) is kind for value in values):
            return tuple(values)
    except (ValueError, RecursionError):
        pass
    raise TapeError(f"{name} is {metadata[name][:80]!r}; a JSON list of {kind.__name__} expected")


def _whole(name: str, metadata: dict[str, str]) -> int:
    if not metadata[name].isdecimal() or len(metadata[name]) > MAX_DIGITS:
        raise TapeError(f"{name} is {metadata[name][:80]!r}; a whole number expected")
    return int(metadata[name])


def _spans(offsets: Ints, requests: Ints) -> Ints:
    """Indices of all that belongs to `requests`, one after the other."""
    return np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in requests])


def _expect(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise TapeError(f"{name} has shape {shape}; {expected} expected")
