"""Flags of `faser serve` for an A/B test, and which test runs when a state file knows of one.

One decision: a test that runs goes on after a restart, and only as it was, since a report adds up what came before and
after. One that was stopped stays stopped; another, told by its arms, shares or windows, begins.
"""

from __future__ import annotations

import secrets
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.ab.split import UNITS, Arm, Split, SplitError, parse
from faser.policies import names_file
from faser.serving.settings import Settings, UsageError
from faser.serving.state import State, StateError, load, save


def add(group: Any) -> None:
    """Declare them in an argument group."""
    group.add_argument(
        "--split",
        default=None,
        metavar="ARM=SHARE,...",
        help="An A/B test of several --policy ARM=POLICY, as a=0.5,b=0.5. Default: equal shares.",
    )
    group.add_argument(
        "--split-by",
        default=None,
        help="window: the whole engine uses one arm for a slice of time, in random order, since requests that share a "
        "batch slow each other; request: each client its own arm (header X-Faser-Key, else every request anew), "
        "and arms share batches. Default: window.",
    )
    group.add_argument("--split-window-s", type=float, default=None, help="Slice of time of one arm, s. Default: 60.")
    group.add_argument(
        "--split-washout-s", type=float, default=None, help="Beginning of it that is not counted, s. Default: 5."
    )


def chosen(args: Namespace, kept: State) -> tuple[Split | None, str | None]:
    """The test that runs, and else the policy, as far as they are told. kept: of the last server. Raises UsageError."""
    asked, before, policy = _asked(args), kept.split, (args.policy or [None])[0]
    if before is None:
        return (asked, None) if asked else (None, kept.policy or policy)
    known = asked is not None and asked.same_test(before)
    if kept.kept is None:
        if not known:
            raise UsageError(
                f"--faser-state: the A/B test of {before} runs in it; give the same flags, or remove the file to end it"
            )
        print(f"faser serve: the A/B test of {before} goes on", file=sys.stderr)
        return before, None
    if asked is not None and not known:
        return asked, None
    if kept.policy is None:
        print(
            f"faser serve: the A/B test was stopped; its arm {kept.kept} goes on; "
            "to run the same test again, remove the --faser-state file",
            file=sys.stderr,
        )
    return None, kept.policy or next(arm.policy for arm in before.arms if arm.name == kept.kept)


def begin(settings: Settings) -> None:
    """Have the state file remember a test that begins, and forget what came before. Raises UsageError."""
    if settings.split is None or settings.admin is None or settings.admin.state is None:
        return
    path = Path(settings.admin.state)
    try:
        if (before := load(path)) is None or before.split != settings.split:
            save(path, State(split=settings.split))
    except (OSError, StateError) as error:
        raise UsageError(f"--faser-state {str(path)!r} cannot be written: {error}") from None


def _asked(args: Namespace) -> Split | None:
    options = {"unit": args.split_by, "window_s": args.split_window_s, "washout_s": args.split_washout_s}
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("unit", UNITS[0]) not in UNITS:
        raise UsageError(f"--split-by is {args.split_by!r}; allowed: {', '.join(UNITS)}")
    try:
        split = parse(args.policy or [], args.split, salt=secrets.token_hex(8), start=round(time.time(), 3), **given)
    except SplitError as error:
        raise UsageError(str(error)) from None
    if split is None:
        if given:
            raise UsageError("--split-by, --split-window-s and --split-washout-s are of use with several --policy only")
        return None
    return replace(split, arms=tuple(Arm(arm.name, _absolute(arm.policy)) for arm in split.arms))


def _absolute(policy: str) -> str:
    """A file by its whole path: a restart may come from another folder."""
    return str(Path(policy).resolve()) if names_file(policy) else policy
