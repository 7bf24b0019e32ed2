"""Shapes: which there are, which can be, and how one is read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.models import ModelError, names, resolve
from faser.models.shapes import SHAPES, Llama, Shape, plan, shape_of

SMALL = Shape(name="small", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "num_attention_heads is 5; allowed: a multiple of num_key_value_heads, 2"),
        ({"heads": 6}, "hidden_size is 64; allowed: a multiple of num_attention_heads, 6"),
        ({"head_dim": 5}, "head_dim is 5; allowed: even"),
        ({"hidden": 0}, "hidden_size is 0; allowed: a whole number, at least 1"),
        ({"layers": 2.0}, "num_hidden_layers is 2.0; allowed: a whole number"),
    ],
)
def test_a_shape_that_no_llama_has_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        replace(SMALL, **change)


def test_named_shapes_have_the_sizes_of_their_models() -> None:
    sizes = {name: shape.parameters(32000) for name, shape in SHAPES.items()}
    assert sizes == {"llama2-13b": 13_015_864_320, "mistral-7b": 7_241_732_096, "tinyllama-1.1b": 1_100_048_384}


def test_a_shape_is_read_from_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "qwen" / "config.json"
    file.parent.mkdir()
    keys = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 300}
    file.write_text(json.dumps(keys))
    assert shape_of(str(file)) == Shape(
        name="qwen", hidden=128, layers=3, heads=4, kv_heads=4, head_dim=32, intermediate=300
    )
    with pytest.raises(ModelError, match=r"shape is 'llama9'; allowed: llama2-13b, mistral-7b.*or a config.json"):
        shape_of("llama9")


def test_the_named_pairs_can_be_inflated() -> None:
    small = {"vocab_size": names.VOCABULARY, "rms_norm_eps": 1e-5}
    target = Shape(name="t", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536)
    draft = Shape(name="d", hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=768)
    for shape, wanted in ((target, "llama2-13b"), (target, "mistral-7b"), (draft, "tinyllama-1.1b")):
        assert len(plan(Llama(Path(), small, shape), SHAPES[wanted]).queries) == shape.heads
    assert resolve("llama2-13b").tape == "smollm2"
