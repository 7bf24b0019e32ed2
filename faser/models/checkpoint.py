"""Whether the weights of a model directory are all there, by the headers of its files.

No weight is read and torch is not imported, so a model of many gigabytes is checked at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from faser.models.json_file import read_json
from faser.models.pair import ModelError
from faser.models.shapes import Shape

PLAIN = ("llama", "mistral")
"""Values of model_type of which the weights are known by name."""


def check_weights(directory: Path) -> None:
    """ModelError, in one line, if weights of a Hugging Face directory are missing, cut short or of another size.

    Of a Llama or Mistral all are known; of another model, those that its index names.
    """
    config = read_json(directory / "config.json")
    found = sizes(directory)
    if config.get("model_type") not in PLAIN or config.get("quantization_config") is not None:
        return
    vocabulary = config.get("vocab_size")
    if type(vocabulary) is not int:
        raise ModelError(f"{directory}: vocab_size is {vocabulary!r}; allowed: a whole number")
    tied = bool(config.get("tie_word_embeddings", False))
    refuse_missing(directory, Shape.of_config(config, str(directory)).weights(vocabulary, tied=tied), found)


def refuse_missing(
    directory: Path, expected: Iterable[tuple[str, tuple[int, ...]]], found: Mapping[str, tuple[int, ...]]
) -> set[str]:
    """Names of the `expected` weights, with `.weight`. ModelError: one is not `found`, or of another size."""
    names = set()
    for part, size in expected:
        name = f"{part}.weight"
        if name not in found:
            raise ModelError(f"{directory}: tensor {name} is missing")
        if found[name] != size:
            raise ModelError(f"{directory}: tensor {name} is {found[name]}; config.json says {size}")
        names.add(name)
    return names


def sizes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Size of every tensor, by name. ModelError: a file is missing, cut short or none, or lacks what the index says."""
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dict
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(f"{directory}: its weights cannot be read: {path.name}: {error}") from None
    for name in _index(directory):
        if name not in found:
            raise ModelError(f"{directory}: tensor {name} is missing")
    return found


def weight_files(directory: Path) -> list[Path]:
    """The files with the weights, in order; they need not exist. ModelError: the index is none."""
    index = _index(directory)
    if index:
        return [directory / name for name in sorted(set(index.values()))]
    plain = directory / "model.safetensors"
    return [plain] if plain.exists() else sorted(directory.glob("*.safetensors")) or [plain]


def _index(directory: Path) -> dict[str, str]:
    """Tensor to file, as the index says; empty if there is none."""
    path = directory / "model.safetensors.index.json"
    if not path.exists():
        return {}
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(Path(str(file)).name == file for file in index.values()):
        raise ModelError(f"{path} is not an index of safetensors files")
    return index
