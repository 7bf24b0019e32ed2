"""The `faser` command. Each subcommand is imported when it is asked for, so that `faser --help` is instant."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version

USAGE = """\
usage: faser COMMAND ...

  serve [MODEL] [--policy P] [any vLLM flag]   an OpenAI-compatible server that learns how far to speculate
                                               (faser serve --help=faser shows FASER's own flags)
  policy list|show|swap|bench|unbench          another policy in a running server, between two steps
  ab show|stop|report                          a running A/B test of policies, and what it has shown
  models list                                  the models that have a name, and which of them are built
  models prepare NAME                          build one; llama2-13b and mistral-7b: real text at their cost
  record --target DIR --draft DIR ...          record what a draft has accepted, for training (a tape)
  profile --target MODEL --out FILE ...        measure what steps cost on this machine (a profile)
  bench sim --pair NAME ...                    policies against each other in the simulator, with intervals
  bench engine --target MODEL ...              step times of vLLM as it is and of FASER, at fixed lengths
  grafana                                      print a Grafana dashboard of a server's /metrics, as JSON
  doctor                                       check versions, GPU, models, tapes and profiles
  --version                                    print the version

Each command has --help. Training: python train/ppo.py --help
"""

COMMANDS = {
    "serve": "faser.serving.serve",
    "policy": "faser.policy_command",
    "ab": "faser.ab_command",
    "models": "faser.models.command",
    "record": "faser.tapes.recorder",
    "profile": "faser.serving.profile",
    "bench": "faser.bench.command",
    "grafana": "faser.live.grafana",
    "doctor": "faser.doctor",
}
"""Command to the module whose `main(argv) -> int` it is."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status (2: the user's mistake, said in one line)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in ([], ["--help"], ["-h"]):
        print(USAGE, end="")
        return 0
    if argv[0] == "--version":
        print(version("faser-serve"))
        return 0
    if argv[0] in COMMANDS:
        return int(import_module(COMMANDS[argv[0]]).main(argv[1:]))
    print(f"faser: command {argv[0]!r} is unknown; known: {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
