"""The step log: one JSON line for each engine step, for those who ask for it (`--faser-log FILE`).

Fields: t (s since the epoch, step's start), ms, running, waiting, prefill (prompt tokens computed), context
(tokens, summed over requests), depth, verified and accepted (per request-step, [N]). Enough to see what a policy
did and to fit step costs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FLUSH_EVERY = 100


class StepLog:
    """Appends to `path`, flushed every FLUSH_EVERY steps and at `close`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._unflushed = 0

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields, separators=(",", ":")) + "\n")
        self._unflushed += 1
        if self._unflushed >= FLUSH_EVERY:
            self._file.flush()
            self._unflushed = 0

    def close(self) -> None:
        self._file.close()
