"""The step log: one JSON line for each engine step, for those who ask for it (`--faser-log FILE`).

Fields: t (s since the epoch, step's start), ms, policy (in force), running, waiting, prefill (prompt tokens computed),
context (tokens, summed over requests), depth; and per request-step, [N]: verified, accepted, request (vLLM's own id),
generated (its output tokens before the step). Enough to see what a policy did, to fit step costs, and to hold a server
against a tape, position by position.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class StepLog:
    """Appends to `path`, line by line: an engine is often killed rather than closed, and its last steps matter most."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()
