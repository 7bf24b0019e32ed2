"""The shipped draft: a small Llama kept as int8 rows with one scale each (14 MB), expanded to bfloat16.

Every matrix `W` is stored as int8 `W` and float32 `W.scale`: W = int8 * scale[:, None]. Vectors are float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from faser.models.weights import write_safetensors

WEIGHTS = "model.int8.safetensors"
SETTINGS = ("config.json", "generation_config.json")


class Int8Draft:
    """The draft in `directory`, its int8 arrays in memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._arrays = load_file(directory / WEIGHTS)
        self.shapes = {n: a.shape for n, a in self._arrays.items() if not n.endswith(".scale")}
        """Name to shape of every tensor, in the order of `tensors`."""

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor, float32."""
        for name in self.shapes:
            values = self._arrays[name].astype(np.float32)
            scale = self._arrays.get(f"{name}.scale")
            yield name, values if scale is None else values * scale[:, None]

    def write(self, directory: Path, advance: Callable[[int], None]) -> None:
        """Weights and configuration; the tokenizer is the target's. `advance` is told the bytes of weights written."""
        for name in SETTINGS:
            shutil.copyfile(self._directory / name, directory / name)
        write_safetensors(directory / "model.safetensors", self.shapes, self.tensors(), advance)
