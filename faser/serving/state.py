"""What of a server's live operation outlives a restart: `--faser-state FILE`."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser.ab.split import Split
from faser.policies.policy_file import write_atomically

VERSION = 1


class StateError(ValueError):
    """A state file that is not one; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """policy: in force since the last swap, as it was named; None before any. benched: by an operator. split: the A/B
    test that runs, or that was stopped and of which the arm `kept` is in force, but for a later swap.
    """

    policy: str | None = None
    benched: bool = False
    split: Split | None = None
    kept: str | None = None

    def __post_init__(self) -> None:
        if self.kept is not None and (self.split is None or self.kept not in self.split.names):
            raise ValueError(f"kept is {self.kept!r}, which is no arm")


def save(path: Path, state: State) -> None:
    """Put `state` at `path`: whoever reads sees it whole, or the one before. OSError: it cannot be written."""
    data: dict[str, Any] = {"version": VERSION, "policy": state.policy, "benched": state.benched}
    if state.split is not None:
        data |= {"split": state.split.to_json(), "kept": state.kept}
    write_atomically(path, (json.dumps(data) + "\n").encode())


def load(path: Path) -> State | None:
    """The state at `path`; None if there is no file yet. StateError: not a state file, or unreadable."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise StateError(f"{path} is no state file: not JSON; remove it to start with --policy") from None
    with suppress(ValueError):
        match data:
            case {"version": 1, "policy": str() | None as policy, "benched": bool(benched), **more}:
                match more:
                    case {"split": dict(split), "kept": str() | None as kept} if len(more) == 2:
                        return State(policy=policy, benched=benched, split=Split.from_json(split), kept=kept)
                    case {} if not more:
                        return State(policy=policy, benched=benched)
    raise StateError(f"{path} is no state file of version {VERSION}; remove it to start with --policy")
