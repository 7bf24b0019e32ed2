"""`faser bench WHAT`: the benchmarks that users run. The others are modules: python -m faser.bench.NAME."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = {
    "sim": "faser.bench.sim",
    "engine": "faser.bench.engine",
    "clock": "faser.bench.clock",
    "decide": "faser.bench.decide",
}
"""Name to the module whose `main(argv) -> int` it is."""


def main(argv: list[str]) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    if not argv or argv[0] not in BENCHMARKS:
        asked = f"{argv[0]!r} is unknown" if argv and argv[0] not in ("-h", "--help") else "which one?"
        print(f"faser bench: {asked}; known: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return int(import_module(BENCHMARKS[argv[0]]).main(argv[1:]))
