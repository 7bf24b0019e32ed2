"""The folder from which policy files may be swapped into a running server.

One decision: a file is named by its bare name, and read once into memory. So no path can lead out of the folder, and
what was checked is what takes over, on every engine, even if the file changes meanwhile.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from faser.policies import PolicyError
from faser.policies.policy_file import MAX_BYTES, PolicyFileError, parse

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.pt")


def read(folder: Path, name: str) -> bytes:
    """The bytes of the policy file `name` in `folder`, unchecked but for their number. PolicyError: no such file."""
    if not NAME.fullmatch(name):
        raise PolicyError(f"policy {name[:100]!r} is not allowed; allowed: a file's name in the policy folder, NAME.pt")
    path = folder / name
    if not path.is_file() or path.resolve().parent != folder.resolve():  # a link may lead out of the folder
        raise PolicyError(f"policy {name!r}: no such file in --policy-dir; those there: faser policy list")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"policy {name!r}: {error.strerror}") from None


def listed(folder: Path) -> list[dict[str, Any]]:
    """Each policy file in `folder`: its name, and the models that it was trained on or why it would be refused."""
    found = []
    for name in sorted(path.name for path in folder.glob("*.pt")):
        try:
            training = parse(read(folder, name), name).training
        except (PolicyError, PolicyFileError) as error:
            found.append({"name": name, "refused": str(error)})
        else:
            found.append({"name": name, "models": training.get("models", [])})
    return found
