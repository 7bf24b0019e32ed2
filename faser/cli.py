"""The `faser` command. Each subcommand is imported when it is asked for, so that `faser --help` is instant."""

from __future__ import annotations

import sys
from importlib.metadata import version

USAGE = """\
usage: faser COMMAND ...

  serve [MODEL] [--policy P] [any vLLM flag]   an OpenAI-compatible server that learns how far to speculate
                                               (faser serve --help=faser shows FASER's own flags)
  --version                                    print the version

Training: python train/ppo.py --help
"""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status (2: the user's mistake, said in one line)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:
        from faser.serving.serve import main as serve

        return serve(argv[1:])
    if argv[:1] == ["--version"]:
        print(version("faser-serve"))
        return 0
    if argv[:1] in ([], ["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    print(f"faser: command {argv[0]!r} is unknown; known: serve", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
