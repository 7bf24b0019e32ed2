"""Recorded traces of real services: readers of three public formats, and a tape's requests in their place.

One decision: a recording says when requests came and how long they were, a tape what they were. So a replay keeps the
recording's times, and takes for each request one of the tape's that is about as long.

    | format   | by its first line                                     | times                                    |
    |----------|-------------------------------------------------------|------------------------------------------|
    | Azure    | columns TIMESTAMP, ContextTokens, GeneratedTokens     | date and time, UTC where it says no zone |
    | BurstGPT | columns Timestamp, Request tokens, Response tokens    | s                                        |
    | Mooncake | an object with timestamp, input_length, output_length | ms                                       |

Other columns are ignored. A request that wrote nothing failed (BurstGPT says so of its own) and is left out; a prompt
of 0 tokens counts as 1.

    day = read_recorded(Path("trace.csv")).periods()["test"].rescaled(rate)
    trace = day.window(rng, 384).trace(period("test", tape).tape, rng)
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from faser.core import Ints
from faser.envs.arrivals import Times
from faser.envs.periods import PERIODS
from faser.envs.trace import Trace
from faser.tapes import Tape

NEAREST = 4
"""Requests of a tape of which one stands for a recorded one."""


@dataclass(frozen=True)
class Recorded:
    """arrival: [n] s, from 0, sorted. prompt_tokens, output_tokens: [n], 1 or more."""

    arrival: Times
    prompt_tokens: Ints
    output_tokens: Ints

    def __post_init__(self) -> None:
        shapes = self.arrival.shape, self.prompt_tokens.shape, self.output_tokens.shape
        if len(self.arrival) == 0 or len({*shapes}) > 1:
            raise ValueError(f"arrival, prompt_tokens and output_tokens are {shapes}; allowed: alike, not empty")
        if self.arrival[0] != 0.0 or (np.diff(self.arrival) < 0).any():
            raise ValueError("arrival must start at 0 and not decrease")
        if min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise ValueError("prompt_tokens and output_tokens must be at least 1")

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def rate(self) -> float:
        """Requests per s. ValueError: all came at once."""
        if self.arrival[-1] <= 0.0:
            raise ValueError(f"a recording of {len(self)} requests in 0 s has no rate")
        return float((len(self) - 1) / self.arrival[-1])

    def rescaled(self, rate: float) -> Recorded:
        """The same at `rate` requests per s: time runs faster or slower. ValueError: no such rate, or none before."""
        if not 0.0 < rate < np.inf:
            raise ValueError(f"rate is {rate}; allowed: over 0 and finite")
        return Recorded(self.arrival * (self.rate / rate), self.prompt_tokens, self.output_tokens)

    def periods(self, *, train: float = 0.6, validation: float = 0.2) -> dict[str, Recorded]:
        """Three stretches of time, one after the other, by name; `test` has what the two shares leave.

        ValueError: not shares, or a stretch without a request.
        """
        if not (train > 0.0 and validation > 0.0 and train + validation < 1.0):
            raise ValueError(f"train and validation are {train} and {validation}; allowed: over 0, under 1 together")
        ends = self.arrival[-1] * np.array([train, train + validation])
        edges = [0, *np.searchsorted(self.arrival, ends).tolist(), len(self)]
        for name, first, end in zip(PERIODS, edges, edges[1:], strict=False):
            if first == end:
                raise ValueError(f"period {name!r} holds none of the {len(self)} requests")
        return {name: self._part(slice(*edges[i : i + 2])) for i, name in enumerate(PERIODS)}

    def window(self, rng: np.random.Generator, n: int) -> Recorded:
        """`n` requests in a row, from a random one on. ValueError: there are not as many."""
        if not 1 <= n <= len(self):
            raise ValueError(f"n is {n}; allowed: 1 to {len(self)}, the requests of the recording")
        first = int(rng.integers(len(self) - n + 1))
        return self._part(slice(first, first + n))

    def trace(self, tape: Tape, rng: np.random.Generator, *, nearest: int = NEAREST) -> Trace:
        """The recording's times, and for each request one at random of the tape's `nearest` in length.

        Nearest by the distance between (log prompt tokens, log output tokens), once cut to what the tape has. So
        lengths follow the recording as far as the tape has such requests, what is longer than all becomes one of the
        longest, and domains follow lengths. With Azure's conversations of 2023 and the shipped tape: outputs of 194
        tokens on average for 211, each off by 9 % (mean of |log|); prompts of 733 for 1155, off by 33 %, since a third
        are longer than the tape's longest; 60 % of the requests become summarisation and 37 % questions on a text.
        """
        if not 1 <= nearest <= len(tape):
            raise ValueError(f"nearest is {nearest}; allowed: 1 to {len(tape)}, the requests of the tape")
        there = np.log(np.stack([tape.prompt_tokens, tape.output_tokens], axis=1).astype(np.float64))
        asked = np.log(np.stack([self.prompt_tokens, self.output_tokens], axis=1).astype(np.float64))
        asked = asked.clip(there.min(axis=0), there.max(axis=0))  # else a prompt that is too long outweighs the output
        row = np.empty(len(self), np.int64)
        for start in range(0, len(self), 1024):  # at once, distances would take gigabytes
            some = asked[start : start + 1024]
            distance = (some[:, :1] - there[:, 0]) ** 2 + (some[:, 1:] - there[:, 1]) ** 2
            close = np.argpartition(distance, nearest - 1, axis=1)[:, :nearest]
            row[start : start + 1024] = close[np.arange(len(some)), rng.integers(nearest, size=len(some))]
        return Trace(self.arrival, row)

    def _part(self, which: slice) -> Recorded:
        arrival = self.arrival[which]
        return Recorded(arrival - arrival[0], self.prompt_tokens[which], self.output_tokens[which])


def read_recorded(path: Path) -> Recorded:
    """The recording in a file, in one of the formats above.

    ValueError, in one line: the file cannot be read or holds no request, or which line and column is wrong.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = sorted(_requests(file), key=lambda request: request[0])
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} is not a text in UTF-8") from None
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{str(path)!r}, {error}") from None
    if not found:
        raise ValueError(f"{str(path)!r} holds no request")
    times, prompts, outputs = zip(*found, strict=True)
    arrival = np.array(times, np.float64)
    return Recorded(arrival - arrival[0], np.array(prompts, np.int64), np.array(outputs, np.int64))


def _date(value: Any) -> float:
    moment = datetime.fromisoformat(value)  # past 6 digits of a second it ignores them; Azure writes 7
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _number(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not np.isfinite(number):
        raise ValueError
    return number


def _tokens(value: Any) -> int:
    number = _number(value)
    if number < 0 or not number.is_integer():
        raise ValueError
    return int(number)


TOKENS = (_tokens, "a whole number from 0 on")
Column = tuple[str, Callable[[Any], float], str]
"""Its name, what reads a value, and what values are allowed."""


@dataclass(frozen=True, slots=True)
class Format:
    """unit: s of a unit of time. columns: time, prompt and output tokens."""

    unit: float
    columns: tuple[Column, Column, Column]

    @property
    def names(self) -> str:
        return ", ".join(name for name, *_ in self.columns)


AZURE = Format(1.0, (("TIMESTAMP", _date, "a date and time"), ("ContextTokens", *TOKENS), ("GeneratedTokens", *TOKENS)))
BURSTGPT = Format(1.0, (("Timestamp", _number, "seconds"), ("Request tokens", *TOKENS), ("Response tokens", *TOKENS)))
MOONCAKE = Format(1e-3, (("timestamp", _number, "milliseconds"), ("input_length", *TOKENS), ("output_length", *TOKENS)))
TABLES = (AZURE, BURSTGPT)


def _requests(file: TextIO) -> Iterator[tuple[float, int, int]]:
    """Time in s, prompt and output tokens of each request. ValueError says in which line something is wrong."""
    first = next((line for line in file if line.strip()), "")
    file.seek(0)
    layout, rows = (MOONCAKE, _objects(file)) if first.lstrip().startswith("{") else _table(file)
    for number, row in rows:
        time, prompt, output = (_value(row, column, number) for column in layout.columns)
        if output:
            yield time * layout.unit, max(int(prompt), 1), int(output)


def _value(row: Mapping[str, Any], column: Column, line: int) -> float:
    name, read, allowed = column
    value = row.get(name)
    if value is None:
        raise ValueError(f"line {line}: {name} is missing; allowed: {allowed}")
    try:
        return read(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"line {line}: {name} is {value!r}; allowed: {allowed}") from None


def _objects(file: TextIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and content of each line of a JSONL file."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: is {line.strip()[:40]!r}; allowed: an object of {MOONCAKE.names}")
            yield number, row


def _table(file: TextIO) -> tuple[Format, Iterator[tuple[int, dict[str, Any]]]]:
    """The format of a CSV file by its columns, and line number and content of each of its lines."""
    table = csv.reader(file, strict=True)
    names = [name.strip() for name in next((row for row in table if row), [])]
    for layout in TABLES:
        if {name for name, *_ in layout.columns} <= {*names}:
            return layout, ((table.line_num, dict(zip(names, row, strict=False))) for row in table if row)
    allowed = "; or ".join(layout.names for layout in TABLES)
    columns = ", ".join(names)[:80]
    raise ValueError(
        f"line {table.line_num}: columns are {columns!r}; allowed: {allowed}; or objects of {MOONCAKE.names}"
    )
