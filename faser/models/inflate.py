"""A small Llama made into a directory with a large one's shape and the small one's function (`padding` says how).

One decision: a shard is a layer, made while the one before it is written. So at most two layers are held, whatever
the model's size, and the directory is there whole or not at all (`cache`).
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from faser.models.json_file import write_json
from faser.models.padding import Maker, Shard, Weights
from faser.models.pair import ModelError
from faser.models.place import Advance, place
from faser.models.shapes import Llama, Plan, Shape, plan

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of the source that go along, where it has them."""

DEVICES = ("cpu", "cuda")
SPARE_BYTES = 32_000_000
"""For all that is not weights: a tokenizer, headers."""


def inflate(
    source: Path,
    shape: Shape,
    out: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
) -> Path:
    """Make `out`, a Hugging Face directory of `shape` with the function of `source`; absent or whole, never half.

    Does nothing if it is there already. device: where the weights are made; the random ones differ between devices,
    the function does not. Returns `out`, absolute.
    ModelError: a mapping that cannot be made, an `out` that holds something else, no disk space, no such device.
    """
    if device not in DEVICES:
        raise ModelError(f"device is {device!r}; allowed: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is 'cuda', but torch finds no CUDA GPU here; allowed: cpu")
    mapping = plan(Llama.read(source), shape)
    config = mapping.config(str(dtype).removeprefix("torch."))

    def write(directory: Path, advance: Advance) -> None:
        with Weights(mapping.source) as weights:
            _write(directory, Maker(mapping, weights, torch.device(device), dtype), config, advance)

    size = mapping.parameters * dtype.itemsize + SPARE_BYTES
    return place(out, config, size, write, title=f"{shape.name}: write, then hash", progress=progress)


def _write(directory: Path, maker: Maker, config: dict[str, Any], advance: Advance) -> None:
    """Everything of the model but the manifest."""
    source = maker.plan.source
    for name in COPIED:
        if (source.directory / name).is_file():
            shutil.copyfile(source.directory / name, directory / name)
    write_json(directory / "config.json", config)
    (directory / "README.md").write_text(card(maker.plan, config))
    try:
        _write_shards(directory, maker, advance)
    except SafetensorError as error:
        raise ModelError(f"cannot write to {directory.parent}: {error}") from None
    except torch.OutOfMemoryError:
        raise ModelError("the GPU has too little free memory for one layer; use --device cpu") from None


def _write_shards(directory: Path, maker: Maker, advance: Advance) -> None:
    """Shards and their index; each is written while the next one is made."""
    count, total = maker.plan.shape.layers + 2, 0
    files: dict[str, str] = {}
    writing: Future[None] | None = None
    with ThreadPoolExecutor(1) as pool:
        for number, made in enumerate(maker.shards(), 1):
            if writing is not None:
                writing.result()
            shard = {f"{name}.weight": tensor for name, tensor in made.items()}
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            writing = pool.submit(_save, shard, directory / file)
            size = sum(tensor.nbytes for tensor in shard.values())
            files |= dict.fromkeys(shard, file)
            total += size
            advance(size)
            del made, shard  # the writer holds it: the next one is made beside one layer, not two
        if writing is not None:
            writing.result()
    write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})


def _save(shard: Shard, path: Path) -> None:
    save_file(shard, path, {"format": "pt"})
    path.chmod(path.with_name("config.json").stat().st_mode)  # safetensors lets nobody but their owner read its files


def card(mapping: Plan, config: dict[str, Any]) -> str:
    """README.md of an inflated model: what it is, and what it is not."""
    small, large = mapping.source.shape, mapping.shape
    rows = "\n".join(
        f"| {what} | {getattr(small, field)} | {getattr(large, field)} |"
        for what, field in (
            ("hidden size", "hidden"),
            ("layers", "layers"),
            ("query heads", "heads"),
            ("key/value heads", "kv_heads"),
            ("head size", "head_dim"),
            ("MLP size", "intermediate"),
        )
    )
    return f"""\
# {small.name} at the cost of {large.name}

**This is not {large.name}.** It is a Llama with the layers and widths of {large.name} that computes the function of
`{small.name}`: real text, and real acceptance of a draft's tokens, of {small.name}; time, memory and traffic of a model
of {large.name}'s shape ({mapping.parameters / 1e9:.1f} billion parameters, {config["dtype"]}). It is made for measuring
servers. Its answers say nothing about the quality of {large.name}.

| | {small.name} | this model |
|---|---|---|
{rows}
| vocabulary | {mapping.source.vocabulary} | {mapping.source.vocabulary} |

The source's weights are padded with random ones where padded inputs are read, and with zeros where padded outputs are
written. In exact arithmetic the two give the same logits; in {config["dtype"]} they differ by rounding, so that now and
then the likeliest token differs. Which weights are the source's: `faser/models/inflate.py` of FASER. The licence is the
source's.
"""
