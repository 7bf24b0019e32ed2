"""The arithmetic of inflation: a small Llama's weights inside a large one that computes the same function.

Whatever reads a padded input is random, whatever writes a padded output is zero: the residual stream keeps the source's
h numbers in its first h places and exact zeros in the other H - h, through every layer.

    RMSNorm      its mean runs over H numbers, h of which are not zero: weight * sqrt(h/H), eps * h/H (in config.json)
    head_dim     d -> D = r*d: rotary pair i goes to pair r*i, which turns at the same frequency; the softmax scale
                 1/sqrt(D) is made up for in the query's rows, * sqrt(r); their other rows are zero
    other heads, other layers, other rows of the MLP: random, with zero columns in o_proj and down_proj

One decision: random numbers are seeded by their tensor's name, so a tensor does not depend on the ones made before it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from faser.models.checkpoint import refuse_missing, sizes, weight_files
from faser.models.pair import ModelError
from faser.models.shapes import EMBEDDING, NORM, OUTPUT, Llama, Plan

NOISE = 0.02
"""Standard deviation of the random weights, as Llamas are initialised."""

Shard = dict[str, Tensor]


class Weights:
    """The source's tensors, read one at a time. ModelError: a tensor missing, unknown or of another size."""

    def __init__(self, source: Llama) -> None:
        self._source = source
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Weights:
        self._check()
        try:
            for path in weight_files(self._source.directory):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, name: str) -> Tensor:
        """A tensor by its name without `.weight`, as it is stored."""
        tensor: Tensor = self._files[f"{name}.weight"].get_tensor(f"{name}.weight")
        return tensor

    def _check(self) -> None:
        source = self._source
        found = sizes(source.directory)
        expected = refuse_missing(source.directory, source.shape.weights(source.vocabulary, tied=source.tied), found)
        # Tied models may store the matrix twice, and old ones their rotary frequencies: both say nothing new.
        for name in sorted(found.keys() - expected - {f"{OUTPUT}.weight"}):
            if not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"{source.directory}: tensor {name} is not one of a plain Llama")


class Maker:
    """Makes the shards of a plan: the embedding, each layer, the output."""

    def __init__(self, mapping: Plan, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self.plan = mapping
        self._small, self._large = mapping.source.shape, mapping.shape
        self._weights, self._device, self._dtype = weights, device, dtype
        self._generator = torch.Generator(device)
        small, large = self._small.head_dim, self._large.head_dim
        pair = torch.arange(small // 2) * (large // small)  # Hugging Face's layout: pair i is dims i and i + D/2
        dims = torch.cat([pair, pair + large // 2])
        rest = torch.ones(large, dtype=torch.bool).index_fill_(0, dims, False).nonzero()[:, 0]
        to, of = zip(*mapping.keys, strict=True)
        self._dims, self._rest = dims[None].to(device), rest[None].to(device)
        self._queries = torch.tensor(mapping.queries, device=device)[:, None]
        self._keys, self._keys_of = torch.tensor(to, device=device)[:, None], torch.tensor(of, device=device)

    def shards(self) -> Iterator[Shard]:
        """All tensors, in host memory, a few at a time; names without `.weight`."""
        yield self._host({EMBEDDING: self._outer(EMBEDDING, torch.zeros)})
        layers = {to: i for i, to in enumerate(self.plan.layers)}
        for layer in range(self._large.layers):
            made = self._padding(f"model.layers.{layer}.")
            if layer in layers:
                self._place(f"model.layers.{layer}.", f"model.layers.{layers[layer]}.", made)
            yield self._host(made)
        output = EMBEDDING if self.plan.source.tied else OUTPUT
        norm = torch.ones(self._large.hidden, device=self._device, dtype=self._dtype)
        self._norm(norm, NORM)
        yield self._host({NORM: norm, OUTPUT: self._outer(output, self._noise(OUTPUT))})

    def _outer(self, name: str, fill: Callable[..., Tensor]) -> Tensor:
        """Embedding or output matrix [vocabulary, H]."""
        size = (self.plan.source.vocabulary, self._large.hidden)
        made = fill(size, device=self._device, dtype=self._dtype)
        made[:, : self._small.hidden] = self._read(name)
        return made

    def _padding(self, layer: str) -> Shard:
        """A layer of random weights that adds exact zeros to the residual stream."""
        made = {}
        for part, size in self._large.layer().items():
            fill = self._noise(layer + part) if len(size) == 2 else torch.ones
            fill = torch.zeros if part in ("self_attn.o_proj", "mlp.down_proj") else fill
            made[layer + part] = fill(size, device=self._device, dtype=self._dtype)
        return made

    def _place(self, to: str, of: str, made: Shard) -> None:
        """Put the source's layer `of` into `made`, a layer from `_padding`."""
        small, large = self._small, self._large
        h, f = small.hidden, small.intermediate
        for part in ("input_layernorm", "post_attention_layernorm"):
            self._norm(made[to + part], of + part)
        query = made[f"{to}self_attn.q_proj"].view(large.heads, large.head_dim, large.hidden)
        query[self._queries, self._rest] = 0  # so the keys' other dims may be random
        query[self._queries, self._dims, :h] = self._read(
            f"{of}self_attn.q_proj", math.sqrt(large.head_dim / small.head_dim)
        ).view(small.heads, small.head_dim, h)
        for part in ("self_attn.k_proj", "self_attn.v_proj"):
            heads = made[to + part].view(large.kv_heads, large.head_dim, large.hidden)
            heads[self._keys, self._dims, :h] = self._read(of + part).view(small.kv_heads, small.head_dim, h)[
                self._keys_of
            ]
        output = made[f"{to}self_attn.o_proj"].view(large.hidden, large.heads, large.head_dim)
        output[:h, self._queries, self._dims] = self._read(f"{of}self_attn.o_proj").view(h, small.heads, small.head_dim)
        for part in ("mlp.gate_proj", "mlp.up_proj"):
            made[to + part][:f, :h] = self._read(of + part)
        made[f"{to}mlp.down_proj"][:h, :f] = self._read(f"{of}mlp.down_proj")

    def _norm(self, made: Tensor, of: str) -> None:
        made[: self._small.hidden] = self._read(of, math.sqrt(self._small.hidden / self._large.hidden))

    def _read(self, name: str, scale: float = 1.0) -> Tensor:
        """A source's tensor times `scale`, rounded once."""
        return (self._weights.read(name).to(self._device, torch.float32) * scale).to(self._dtype)

    def _noise(self, name: str) -> Callable[..., Tensor]:
        def fill(size: tuple[int, ...], **kind: Any) -> Tensor:
            self._generator.manual_seed(zlib.crc32(name.encode()))
            return torch.empty(size, **kind).normal_(0, NOISE, generator=self._generator)

        return fill

    def _host(self, made: Shard) -> Shard:
        return {name: tensor.cpu() for name, tensor in made.items()}
