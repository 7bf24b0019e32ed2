"""Named numpy arrays in one safetensors file with a checksum, mapped into memory rather than read.

The format is an 8-byte length, a JSON header and raw bytes. It is written and mapped here with numpy alone: a tape is
used by training, which needs no safetensors package. Wider elements come first, so that every array lies aligned.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {"F32": "<f4", "I32": "<i4", "U32": "<u4", "U16": "<u2", "U8": "|u1"}
"""Element types of safetensors that are used here, and numpy's names of them."""

_NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
_MAX_HEADER = 1 << 20


class MappedError(ValueError):
    """A file that is not one of ours, or not whole; one line without the file's name."""


def to_bytes(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """The whole file: `arrays`, `metadata`, and in the latter `sha256`, over everything else in the file."""
    ordered = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    entries: dict[str, Any] = {}
    data = bytearray()
    for name in ordered:
        array = arrays[name]
        start = len(data)
        data += np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (start, len(data))}
    stamped = {**metadata, "sha256": _digest(entries, metadata, np.frombuffer(data, np.uint8))}
    header = json.dumps({"__metadata__": stamped, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def write_whole(path: Path, content: bytes) -> None:
    """Put `content` at `path`, complete or not at all, whatever interrupts it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:  # Ctrl-C too
        partial.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """OSError: `write_whole` could not put anything at `path`."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    probe.touch()
    probe.unlink()


def open_mapped(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays, read-only and mapped, and metadata of a file, checked against its sha256.

    MappedError: truncated, altered, or no such file at all. OSError: it cannot be opened.
    """
    if path.stat().st_size < 8:
        raise MappedError("is cut short")
    raw = np.memmap(path, np.uint8, mode="r")
    entries, metadata, data = _parse(raw)
    stamp = metadata.pop("sha256", None)
    if stamp != _digest(entries, metadata, data):
        raise MappedError("sha256 does not fit its contents: the file is damaged or was edited")
    arrays = {}
    for name, entry in entries.items():
        start, end = entry["data_offsets"]
        arrays[name] = np.asarray(data[start:end]).view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def _parse(raw: NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, str], NDArray[np.uint8]]:
    """Entries, metadata and data of a file; whatever could make mapping fail is refused here."""
    (size,) = struct.unpack("<Q", raw[:8].tobytes())
    if size > _MAX_HEADER:
        raise MappedError("is no safetensors file")
    if len(raw) < 8 + size:
        raise MappedError("is cut short")
    try:
        entries = json.loads(raw[8 : 8 + size].tobytes())
        metadata = dict(entries.pop("__metadata__", {}))
        end = 0
        for entry in entries.values():
            start, stop = entry["data_offsets"]
            wanted = int(np.prod(entry["shape"], dtype=np.int64)) * np.dtype(DTYPES[entry["dtype"]]).itemsize
            if start != end or stop - start != wanted or min(entry["shape"], default=0) < 0:
                raise ValueError("arrays overlap or leave gaps")
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MappedError(f"is no tape of ours: {error}") from None
    data = raw[8 + size :]
    if len(data) != end:
        raise MappedError("is cut short" if len(data) < end else "has something after its end")
    return entries, metadata, data


def _digest(entries: Mapping[str, Any], metadata: Mapping[str, str], data: NDArray[np.uint8]) -> str:
    sha = hashlib.sha256(json.dumps([entries, metadata], sort_keys=True).encode())
    sha.update(data.data)
    return sha.hexdigest()
