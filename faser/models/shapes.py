"""Shapes of Llamas, and whether one can be inflated into another: which head, layer and width goes where.

Numbers only: no weights are read and torch is not imported, so a mapping that cannot be made is refused at once.
`inflate` carries a plan out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faser.models.fingerprint import FUNCTION_OF, function
from faser.models.json_file import read_json
from faser.models.pair import ModelError, is_directory

INFLATED = "faser_inflated"
"""Key in the config.json of an inflated model: what of, into what, and by which recipe."""

RECIPE = "1"
"""Raise it when the same source and shape give other weights."""

EMBEDDING, NORM, OUTPUT = "model.embed_tokens", "model.norm", "lm_head"
"""Weights outside of the layers, by their names without `.weight`."""

_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
}
"""Fields of Shape as a config.json calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Widths of a Llama, all at least 1; vocabulary and longest context are not part of it: they stay the source's."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def __post_init__(self) -> None:
        for field, key in _KEYS.items():
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ModelError(f"{self.name}: {key} is {value!r}; allowed: a whole number, at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name}: num_attention_heads is {self.heads}; "
                f"allowed: a multiple of num_key_value_heads, {self.kv_heads}"
            )
        if self.hidden % self.heads:  # whatever head_dim is: transformers, and so vLLM, loads no other
            raise ModelError(
                f"{self.name}: hidden_size is {self.hidden}; allowed: a multiple of num_attention_heads, {self.heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"{self.name}: head_dim is {self.head_dim}; allowed: even numbers, it is rotated in pairs")

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str) -> Shape:
        """The widths in a config.json, whatever architecture it names. ModelError: one is missing or no number."""
        found = {field: config.get(key) for field, key in _KEYS.items()}
        for field in ("hidden", "layers", "heads", "intermediate"):
            if found[field] is None:
                raise ModelError(f"{name}: its configuration has no {_KEYS[field]}")
        if found["kv_heads"] is None:  # what older Llamas leave out
            found["kv_heads"] = found["heads"]
        hidden, heads = found["hidden"], found["heads"]
        if found["head_dim"] is None and type(hidden) is type(heads) is int and heads > 0:
            found["head_dim"] = hidden // heads
        return cls(name=name, **found)  # type: ignore[arg-type]  # __post_init__ checks that they are numbers

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Size of every weight of a layer, by its name without `.weight`."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    def weights(self, vocabulary: int, *, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name, without `.weight`, and size of every weight of the model. tied: its output matrix is its embedding."""
        yield EMBEDDING, (vocabulary, self.hidden)
        yield NORM, (self.hidden,)
        if not tied:
            yield OUTPUT, (vocabulary, self.hidden)
        for layer in range(self.layers):
            for part, size in self.layer().items():
                yield f"model.layers.{layer}.{part}", size

    def parameters(self, vocabulary: int) -> int:
        """How many numbers such a model has, its output matrix apart from its embedding."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 + 2 * q + 2 * k + 3 * self.intermediate)
        return self.layers * layer + self.hidden * (2 * vocabulary + 1)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="llama2-13b", hidden=5120, layers=40, heads=40, kv_heads=40, head_dim=128, intermediate=13824),
        Shape(name="mistral-7b", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336),
        Shape(name="tinyllama-1.1b", hidden=2048, layers=22, heads=32, kv_heads=4, head_dim=64, intermediate=5632),
    )
}
"""Shapes by name: two targets, and one for drafts."""


def shape_of(name_or_config: str) -> Shape:
    """One of SHAPES, or the widths in a config.json. ModelError: neither."""
    if name_or_config in SHAPES:
        return SHAPES[name_or_config]
    path = Path(name_or_config)
    if not os.path.isfile(path):  # noqa: PTH113  # Path's raises if a name is too long
        raise ModelError(f"shape is {name_or_config!r}; allowed: {', '.join(SHAPES)}, or a config.json")
    # A file called config.json is named after its folder, which says more.
    return Shape.of_config(read_json(path), path.absolute().parent.name if path.stem == "config" else path.stem)


@dataclass(frozen=True, slots=True)
class Llama:
    """A model directory that can be inflated: a plain Llama, without biases or scaled rotary positions."""

    directory: Path
    config: Mapping[str, Any]
    shape: Shape

    @classmethod
    def read(cls, directory: Path) -> Llama:
        """Of a Hugging Face directory; weights are not looked at. ModelError: not one, or not a plain Llama."""
        if not is_directory(directory):
            raise ModelError(f"model directory {str(directory)!r} does not exist")
        config = read_json(directory / "config.json")
        _refuse_unlike_llama(config, str(directory))
        shape = Shape.of_config(config, directory.absolute().name)
        for key, kind in (("vocab_size", int), ("rms_norm_eps", float)):
            value = config.get(key)
            if type(value) is not kind or not 0 < value < math.inf:
                raise ModelError(f"{directory}: {key} is {value!r}; allowed: a number above 0")
        return cls(directory, config, shape)

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def tied(self) -> bool:
        """Whether its output matrix is its embedding (transformers' default for a Llama is that it is not)."""
        return bool(self.config.get("tie_word_embeddings", False))


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each part of `source` goes in a model of `shape`.

    layers: of the source's layers. queries: of its query heads. keys: (to, from) of key/value heads; a source's may
    be copied to several.
    """

    source: Llama
    shape: Shape
    layers: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[tuple[int, int], ...]

    @property
    def parameters(self) -> int:
        return self.shape.parameters(self.source.vocabulary)

    def config(self, dtype: str) -> dict[str, Any]:
        """Contents of config.json: the source's, but for what changes. Reads the source's fingerprint."""
        source, widths = self.source, asdict(self.shape)
        gone = ("torch_dtype", "_name_or_path", INFLATED, FUNCTION_OF)
        return {
            **{key: value for key, value in source.config.items() if key not in gone},
            **{key: widths[field] for field, key in _KEYS.items()},
            "rms_norm_eps": source.config["rms_norm_eps"] * source.shape.hidden / self.shape.hidden,
            "tie_word_embeddings": False,
            "dtype": dtype,
            FUNCTION_OF: function(source.directory),
            INFLATED: {"source": source.shape.name, "shape": self.shape.name, "recipe": RECIPE},
        }


def plan(source: Llama, shape: Shape) -> Plan:
    """How `source` becomes a model of `shape`. ModelError: it cannot, and why.

    A key/value head of the source with g query heads takes ceil(g / G) heads of the destination, with G query heads
    each: copies of one key/value head serve its queries between them. That covers every mix of MHA, GQA and MQA.
    """
    small = source.shape
    for field in ("hidden", "layers", "intermediate"):
        if getattr(shape, field) < getattr(small, field):
            raise ModelError(
                f"{shape.name}: {_KEYS[field]} is {getattr(shape, field)}; "
                f"allowed: {getattr(small, field)}, as {small.name} has, or more"
            )
    if shape.head_dim % small.head_dim:
        raise ModelError(
            f"{shape.name}: head_dim is {shape.head_dim}; allowed: a multiple of {small.head_dim}, as {small.name} has"
        )
    group, room = small.heads // small.kv_heads, shape.heads // shape.kv_heads
    copies = -(-group // room)
    if copies * small.kv_heads > shape.kv_heads:
        raise ModelError(
            f"{shape.name}: num_key_value_heads is {shape.kv_heads}, with {room} query heads each; allowed: at least "
            f"{copies * small.kv_heads}, for {small.name}'s {small.kv_heads} with {group} each"
        )
    return Plan(
        source,
        shape,
        # A source layer never comes at a smaller share of the depth than it had: leaving early must not look cheap.
        layers=tuple(-(-(i + 1) * shape.layers // small.layers) - 1 for i in range(small.layers)),
        queries=tuple((q // group * copies + q % group // room) * room + q % group % room for q in range(small.heads)),
        keys=tuple((to, to // copies) for to in range(copies * small.kv_heads)),
    )


def _refuse_unlike_llama(config: Mapping[str, Any], where: str) -> None:
    """ModelError if anything is on that the arithmetic of `inflate` would get wrong."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"{where}: its rotary parameters are {rope!r}; allowed: a JSON object")
    for key, value, allowed in (
        ("model_type", config.get("model_type"), ("llama",)),
        ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
        ("attention_bias", config.get("attention_bias"), (False, None)),
        ("mlp_bias", config.get("mlp_bias"), (False, None)),
        ("quantization_config", config.get("quantization_config"), (None,)),
        ("rope_type", rope.get("rope_type", rope.get("type")), ("default", None)),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", config.get("partial_rotary_factor")), (1, None)),
    ):
        if value not in allowed:
            raise ModelError(f"{where}: {key} is {value!r}; only a Llama with {allowed[0]!r} can be inflated")
