"""What of a server's live operation outlives a restart: `--faser-state FILE`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from faser.policies.policy_file import write_atomically

VERSION = 1


class StateError(ValueError):
    """A state file that is not one; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """policy: in force since the last swap, as it was named; None before any. benched: by an operator."""

    policy: str | None = None
    benched: bool = False


def save(path: Path, state: State) -> None:
    """Put `state` at `path`: whoever reads sees it whole, or the one before. OSError: it cannot be written."""
    write_atomically(path, (json.dumps({"version": VERSION, **asdict(state)}) + "\n").encode())


def load(path: Path) -> State | None:
    """The state at `path`; None if there is no file yet. StateError: not a state file, or unreadable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise StateError(f"{path} is no state file: not JSON; remove it to start with --policy") from None
    match data:
        case {"version": 1, "policy": str() | None as policy, "benched": bool(benched)} if len(data) == 3:
            return State(policy=policy, benched=benched)
    raise StateError(f"{path} is no state file of version {VERSION}; remove it to start with --policy")
