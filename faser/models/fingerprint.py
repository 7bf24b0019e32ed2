"""A short name for the weights in a directory, so that tapes, profiles and models can say whom they belong to.

One decision: the shapes and the first bytes of every tensor are hashed, not all of it. A 13B's 26 GB would take
minutes; two models that agree in the first 4 KiB of each tensor do not exist by accident.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from faser.models.json_file import read_json
from faser.models.pair import ModelError

FUNCTION_OF = "faser_function_of"
"""Key in a config.json: the fingerprint of the model whose function this one computes (an inflated model)."""
HEAD_BYTES = 4096


def fingerprint(directory: Path) -> str:
    """16 hexadecimal digits over names, dtypes, shapes and first bytes of all tensors of a model directory.

    ModelError: no safetensors there, or a file that is not one.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} holds no .safetensors file")
    tensors = sorted(entry for file in files for entry in _heads(file))
    sha = hashlib.sha256()
    for name, kind, head in tensors:
        sha.update(f"{name} {kind}\n".encode() + head)
    return sha.hexdigest()[:16]


def function(directory: Path) -> str:
    """Fingerprint of the model whose outputs this directory's are: its own, or of what it was inflated from.

    ModelError: not a model directory.
    """
    return str(read_json(directory / "config.json").get(FUNCTION_OF) or fingerprint(directory))


def _heads(path: Path) -> list[tuple[str, str, bytes]]:
    """Name, dtype with shape, and first bytes of each tensor of a file."""
    found = []
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                file.seek(8 + size + start)
                head = file.read(min(end - start, HEAD_BYTES))
                found.append((name, f"{entry['dtype']} {entry['shape']}", head))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        OverflowError,
        MemoryError,
        RecursionError,
        struct.error,
    ) as error:
        raise ModelError(f"{path} is not a safetensors file: {error}") from None
    return found
