"""JSON objects in files: a model's configuration, an index, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from faser.models.pair import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. ModelError: no file, unreadable, or something else in it."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds {type(data).__name__}; allowed: a JSON object")
    return data


def write_json(path: Path, value: object) -> None:
    """`value` as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n")
