"""Flags of `faser serve` for its decision log: where it goes, how large it may grow, and whether it holds texts."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from faser.serving.settings import UsageError


def add(group: Any) -> None:
    """Declare them in an argument group."""
    group.add_argument(
        "--faser-log",
        default=None,
        metavar="FILE",
        help="Append a JSON line for every engine step and every request that ends to this file; with "
        "--data-parallel-size, each further engine's to FILE.dp1, FILE.dp2 and so on.",
    )
    group.add_argument(
        "--faser-log-max-mb", type=float, default=64.0, help="Size at which FILE becomes FILE.1, FILE.1 FILE.2 ..., MB."
    )
    group.add_argument("--faser-log-keep", type=int, default=4, help="How many of those to keep.")
    group.add_argument(
        "--faser-log-prompts",
        action="store_true",
        help="Log the tokens of prompts and outputs too, for `faser record --from-log`. This stores what users wrote: "
        "the files are made readable by their owner only. Default: no text is kept.",
    )


def settings(args: Namespace) -> dict[str, Any]:
    """What they say, as fields of `Settings`. Raises UsageError."""
    if args.faser_log is None:
        if args.faser_log_prompts:
            raise UsageError("--faser-log-prompts is of use with --faser-log only")
        return {}
    if not 0.01 <= args.faser_log_max_mb <= 1e6:
        raise UsageError(f"--faser-log-max-mb is {args.faser_log_max_mb:g}; allowed: 0.01 to 1000000")
    if not 0 <= args.faser_log_keep <= 1000:
        raise UsageError(f"--faser-log-keep is {args.faser_log_keep}; allowed: 0 to 1000")
    path = Path(args.faser_log)
    try:
        if path.exists() and not path.is_file():  # a device would be renamed, a pipe without a reader waited for
            raise UsageError(f"--faser-log is {args.faser_log!r}; allowed: a regular file, or a new one")
        with path.open("a"):
            pass
    except OSError as error:
        raise UsageError(f"--faser-log {args.faser_log!r} cannot be written: {error.strerror}") from None
    return {
        "log": str(path.resolve()),
        "log_max_mb": args.faser_log_max_mb,
        "log_keep": args.faser_log_keep,
        "log_prompts": args.faser_log_prompts,
    }
