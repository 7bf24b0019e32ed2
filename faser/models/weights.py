"""bfloat16 safetensors from float32 arrays, one tensor in memory at a time.

numpy has no bfloat16 and the safetensors package wants all tensors at once, or torch; the format is a JSON header and
raw bytes, so it is written here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BYTES = 2
"""Size of one bfloat16."""


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 of finite float32 `values` (any shape), ties to even, as torch rounds."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[np.float32]]],
    advance: Callable[[int], None],
) -> None:
    """Write `tensors`, which must come in the order of `shapes`, to `path`; `advance` is told the bytes written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers asks for this mark
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + BYTES * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned, for readers that map the file
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for (expected, shape), (name, values) in zip(shapes.items(), tensors, strict=True):
            if (name, values.shape) != (expected, shape):
                raise ValueError(f"tensor {name} {values.shape} comes where {expected} {shape} was announced")
            advance(file.write(to_bfloat16(values).astype("<u2", copy=False).tobytes()))
