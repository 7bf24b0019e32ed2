"""The shipped draft: a small Llama kept as int8 rows with one scale each (15 MB), expanded to bfloat16.

Every matrix `W` is stored as int8 `W` and float32 `W.scale`: W = int8 * scale[:, None]. Vectors are float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

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


def write_int8(directory: Path, weights: Mapping[str, NDArray[np.float32]]) -> None:
    """Write WEIGHTS into `directory` from the float32 tensors of a Llama with tied embeddings."""
    arrays: dict[str, NDArray[np.int8] | NDArray[np.float32]] = {}
    for name, values in weights.items():
        if values.ndim == 1:
            arrays[name] = values
            continue
        scale = np.maximum(np.abs(values).max(1), 1e-12) / np.float32(127.0)
        arrays[name] = np.rint(values / scale[:, None]).astype(np.int8)
        arrays[f"{name}.scale"] = scale.astype(np.float32)
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, directory / WEIGHTS)
