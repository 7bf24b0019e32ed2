"""Flags of `faser serve` for live operation: who may swap policies, from where, and what a restart remembers."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.checkpoints import SHIPPED_POLICY
from faser.policies import PolicyError, names_file
from faser.serving import policy_dir
from faser.serving.settings import ADMIN_KEY, AdminSettings, UsageError
from faser.serving.state import State, StateError, load

SHORTEST_KEY = 16


def add(group: Any) -> None:
    """Declare them in an argument group."""
    group.add_argument(
        "--faser-admin-key",
        default=None,
        help=f"Key of the admin routes under /faser/, which `faser policy` asks; better in {ADMIN_KEY}, where no list "
        "of processes shows it. Without one there are no such routes.",
    )
    group.add_argument(
        "--policy-dir", default=None, help="Folder of the policy files that may be swapped in. Default: this release's."
    )
    group.add_argument(
        "--faser-admin-remote",
        action="store_true",
        help="Let other machines ask the admin routes too, not only this one.",
    )
    group.add_argument(
        "--faser-state", default=None, help="File that keeps a swap over a restart, where it goes before --policy."
    )


def admin(args: Namespace) -> AdminSettings | None:
    """What they say; None without a key. The key moves to the environment: vLLM logs arguments. Raises UsageError."""
    key = args.faser_admin_key if args.faser_admin_key is not None else os.environ.get(ADMIN_KEY)
    args.faser_admin_key = None
    if key is None:
        given = {"--policy-dir": args.policy_dir, "--faser-state": args.faser_state}
        given["--faser-admin-remote"] = args.faser_admin_remote
        for flag, value in given.items():
            if value:
                raise UsageError(f"{flag} is of use with --faser-admin-key or {ADMIN_KEY} only")
        return None
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"--faser-admin-key has {len(key)} characters; allowed: {SHORTEST_KEY} or more, ASCII without blanks"
        )
    folder = Path(args.policy_dir) if args.policy_dir else Path(SHIPPED_POLICY).parent
    if not folder.is_dir():
        raise UsageError(f"--policy-dir {args.policy_dir!r} is no folder")
    state = None
    if args.faser_state is not None:
        state = Path(args.faser_state).absolute()
        if not state.parent.is_dir() or not os.access(state.parent, os.W_OK):
            raise UsageError(f"--faser-state {args.faser_state!r} cannot be written: no such folder, or not ours")
    os.environ[ADMIN_KEY] = key
    return AdminSettings(
        policy_dir=str(folder.resolve()), state=str(state) if state else None, remote=args.faser_admin_remote
    )


def kept(admin: AdminSettings | None) -> State:
    """What the last server with this state file left, its policy as `make_policy` takes it. Raises UsageError."""
    if admin is None or admin.state is None:
        return State()
    try:
        state = load(Path(admin.state))
        if state is None or state.policy is None:
            return state or State()
        policy = state.policy
        if names_file(policy):
            policy_dir.read(Path(admin.policy_dir), policy)
            policy = str(Path(admin.policy_dir) / policy)
    except (StateError, PolicyError) as error:
        raise UsageError(f"--faser-state: {error}") from None
    print(
        f"faser serve: {state.policy} was swapped in before the restart and goes on, whatever --policy says; "
        "to forget it, remove the --faser-state file",
        file=sys.stderr,
    )
    return replace(state, policy=policy)
