"""The decision log: a JSON line for each engine step and each request that ends (`--faser-log FILE`), by `kind`:

step: t (s since the epoch, step's start), ms, policy (in force), decided or why it was not (fallback), running,
waiting, prefill (prompt tokens computed), context (tokens, summed over requests), depth; and per request-step, [N]:
verified, accepted, drafted (at its end), written (tokens of its output; what is accepted past its end is none),
request (vLLM's own id), generated (its output tokens before the step).
request: t (its end), arrival, ttft and seconds (s from arrival), prompt and tokens (how many), drafted, verified,
accepted, status, excluded (from what is learned of all); with `--faser-log-prompts`, unless it is excluded, also
prompt_ids, output_ids, temperature and max_tokens. In an A/B test both have their arm and window, and a line `split`
tells what is tested; each further file begins with it, for a test is often longer than what is kept. Enough to see
what a policy did, to fit step costs, to hold a server against a tape, position by position, and to make a tape
(`faser record --from-log`).

One decision: a thread of its own writes the lines, each with one call. So the engine never waits for a disk, and is not
hurt by one that is full or gone: what cannot be written is lost, counted, and warned of now and then. An engine is
often killed rather than closed, and its last steps matter most: nothing is held back to be written with more.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from faser.serving.settings import Settings

logger = logging.getLogger("faser")

WAITING = 1000
"""Lines that may wait for the disk."""
QUIET_S = 60.0
"""Time between two warnings."""
BLOCK = 1 << 16
MEGABYTE = 10**6


def open_log(settings: Settings, engine: int) -> StepLog | None:
    """The log that `settings` ask for, of one of several engines: FILE, then FILE.dp1, FILE.dp2 and so on."""
    if settings.log is None:
        return None
    path = Path(f"{settings.log}.dp{engine}" if engine else settings.log)
    return StepLog(path, max_mb=settings.log_max_mb, keep=settings.log_keep, private=settings.log_prompts)


class StepLog:
    """Appends lines to `path`."""

    def __init__(self, path: Path, *, max_mb: float | None = None, keep: int = 0, private: bool = False) -> None:
        """max_mb, keep: see `RotatedFile`; None: it grows without end. private: only its owner may read it."""
        most = None if max_mb is None else round(max_mb * MEGABYTE)
        self._file = RotatedFile(path, most, keep, 0o600 if private else None)
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._refused = self._failed = 0  # each counted by one thread
        self._quiet_until = 0.0
        self._thread = threading.Thread(target=self._run, name="faser-log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Lines that were not written."""
        return self._refused + self._failed

    def write(self, **fields: Any) -> None:
        """One line, of JSON types that nobody changes later. Returns at once and never raises."""
        if self._lines.qsize() < WAITING:
            self._lines.put(fields)
        else:
            self._refused += 1

    def close(self) -> None:
        """Write what waits, unless the disk hangs."""
        self._lines.put(None)
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while (fields := self._lines.get()) is not None:
            try:
                line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
                if fields.get("kind") == "split":
                    self._file.head = line
                self._file.append(line)
            except (OSError, TypeError, ValueError) as error:
                self._failed += 1
                self._warn(error)
        self._file.close()

    def _warn(self, error: Exception) -> None:
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + QUIET_S
            logger.warning("the log loses lines, %d so far: %s; serving goes on", self.lost, error)


class RotatedFile:
    """FILE, and FILE.1 (the newest) to FILE.`keep`; none grows over `max_bytes`, but for a single line that is longer
    (with `head`).

    mode: of the files; None: as the system has it. head: a line that each new file begins with. For one thread.
    """

    def __init__(self, path: Path, max_bytes: int | None, keep: int, mode: int | None = None) -> None:
        self._path, self._max, self._keep, self._mode = path, max_bytes, keep, mode
        self.head = b""
        self._fd: int | None = None
        self._size = 0

    def append(self, line: bytes) -> None:
        """Add `line`, whole or not at all. OSError: not at all."""
        fd = self._open()
        if self._max is not None and self._size and self._size + len(line) > self._max:
            self.close()
            self._rotate()
            fd = self._open()
        if not self._size and line != self.head:
            line = self.head + line
        if (written := os.write(fd, line)) < len(line):  # the disk was full in mid-line
            os.ftruncate(fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self._size += written

    def close(self) -> None:
        """Harmless if it is closed."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        """The file that has the name now: somebody may have moved or removed the one that had it."""
        if self._fd is not None and not self._has_name(self._fd):
            self.close()
        if self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode or 0o666)
            try:
                if self._mode is not None:
                    os.fchmod(fd, self._mode)
                self._size = _mend(fd)
            except OSError:  # not ours to make private, perhaps: then nothing is written to it
                os.close(fd)
                raise
            self._fd = fd
        return self._fd

    def _has_name(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        """Every file one number up; the last one is overwritten. Each move is atomic."""
        names = [self._path, *(Path(f"{self._path}.{n}") for n in range(1, self._keep + 1))]
        for old, new in reversed([*pairwise(names)]):
            with suppress(FileNotFoundError):
                old.replace(new)
        if not self._keep:
            self._path.unlink()


def _mend(fd: int) -> int:
    """End a last line that a crash left unfinished: half a line of ours goes. The file's size after that."""
    size = end = os.fstat(fd).st_size
    while end:
        start = max(end - BLOCK, 0)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end == size:
        return size
    if os.pread(fd, 2, end) == b'{"':
        os.ftruncate(fd, end)
        return end
    return size + os.write(fd, b"\n")  # not ours to remove
