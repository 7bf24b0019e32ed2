"""`StepwiseEngine`: a real engine whose every decision is taken here, outside of it.

One decision: the engine runs in a process of its own (`faser.serving.stepped`) and halts where its scheduler asks for a
decision. So `open` brings a step up to that point and `carry_out` takes it to its end, with no thread in between;
vLLM's threads, memory and CPU bindings stay out of this process, and `close` gives all of it back. This side needs no
vLLM.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any

import numpy as np

from faser.core import Decision, Ints, Observation
from faser.costs import StepCost
from faser.serving.settings import Settings

PATIENCE_S = 20.0
"""How long an engine may take to end before it is killed."""


class EngineError(RuntimeError):
    """The engine's process has ended, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An engine: target, draft: what vLLM takes as models; settings: as a server's; cost: what observations are made
    with; max_batch: requests at once; max_batched_tokens: rows of a step at most; dtype: as vLLM's.
    """

    target: str
    draft: str
    settings: Settings
    cost: StepCost
    max_batch: int
    max_batched_tokens: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request. prompt: token ids; max_tokens: to come, unless it ends by itself; temperature 0: greedy, else sampled
    with `seed`; arrival: s since the epoch.
    """

    name: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int
    arrival: float


@dataclass(frozen=True, slots=True)
class Seen:
    """An open step: what its policy sees, the requests that are its rows [N] (the engine's names), how many wait."""

    observation: Observation
    rows: list[str]
    waiting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A step that was carried out. verified, accepted: [N] by the rows of its `Seen`. batch: requests with rows in it.
    written: token ids by the name of `Asked`; finished: names of those that ended.
    """

    verified: Ints
    accepted: Ints
    prefill_tokens: int
    batch: int
    written: dict[str, list[int]]
    finished: list[str]


class StepwiseEngine:
    """Used from one thread. Whatever interrupts an exchange ends the engine, since it cannot be resumed."""

    def __init__(self, plan: Plan) -> None:
        """Start it, which takes half a minute. EngineError: it ended; its output says why."""
        self._rows: int | None = None  # of the step that is open
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "faser.serving.stepped", str(theirs.fileno())]
        # Output goes to stderr: stdout is the caller's. A session of its own: Ctrl-C is for the caller.
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        theirs.close()
        self._ask(plan)

    @property
    def alive(self) -> bool:
        """Whether it can be used."""
        return self._process.poll() is None and not self._connection.closed

    def open(self, requests: Sequence[Asked]) -> Seen:
        """Add `requests` and begin a step, which then waits for its decision. Something must run or wait."""
        seen: Seen = self._ask(list(requests))
        self._rows = len(seen.rows)
        return seen

    def carry_out(self, decision: Decision) -> Done:
        """End the step that is open; a checked decision (`faser.core.checked`)."""
        self._rows = None
        done: Done = self._ask(decision)
        return done

    def drop_all(self) -> int:
        """End what runs and waits, and forget what verdicts have said; returns how many requests are still tracked."""
        self._finish()
        tracked: int = self._ask("drop")
        return tracked

    def close(self) -> None:
        """End the engine and its process. Does nothing when called again."""
        if self.alive:
            try:
                self._finish()
                self._connection.send(None)
                self._process.wait(PATIENCE_S)
            except (EngineError, OSError, subprocess.TimeoutExpired):
                pass  # killed below
        self._kill()

    def _finish(self) -> None:
        if self._rows is not None:
            self.carry_out(Decision(np.zeros(self._rows, np.int64), 0))

    def _ask(self, message: Any) -> Any:
        """The answer to `message`."""
        try:
            self._connection.send(message)
            return self._connection.recv()
        except (EOFError, OSError):
            self._kill()
            status = self._process.returncode
            raise EngineError(f"the engine's process has ended (status {status}); its output says why") from None
        except BaseException:
            self._kill()
            raise

    def _kill(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
