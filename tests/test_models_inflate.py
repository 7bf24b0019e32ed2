"""An inflated model has its source's function and says what it is; what cannot be is refused, nothing is half-made."""

import gc
import json
import math
import re
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from faser.models import ModelError, inflate, padding
from faser.models.cache import fault, sha256
from faser.models.fingerprint import FUNCTION_OF, fingerprint, function
from faser.models.shapes import Llama, Shape, plan

SMALL = Shape(name="small", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=96)
LARGER: dict[str, dict[str, int]] = {
    "same shape": {},
    "hidden": {"hidden": 100},
    "intermediate": {"intermediate": 160},
    "layers": {"layers": 5},
    "one kv head a query": {"heads": 4, "kv_heads": 4},
    "more heads, one kv head a query": {"hidden": 70, "heads": 7, "kv_heads": 7},
    "larger groups": {"hidden": 72, "heads": 12, "kv_heads": 3},
    "more groups of the same size": {"hidden": 72, "heads": 6, "kv_heads": 3},
    "head_dim, doubled": {"head_dim": 32},
    "head_dim, three times": {"head_dim": 48},
    "everything": {
        "hidden": 150, "layers": 3, "heads": 6, "kv_heads": 6, "head_dim": 64, "intermediate": 200,
    },
    "everything, grouped": {
        "hidden": 128, "layers": 4, "heads": 16, "kv_heads": 4, "head_dim": 32, "intermediate": 128,
    },
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_source(directory: Path, **changes: Any) -> Path:
    """A random Llama of shape SMALL but for `changes` (as config.json calls them), with weights that matter."""
    torch.manual_seed(3)
    config: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "tie_word_embeddings": False, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(LlamaConfig(**config | changes))  # type: ignore[no-untyped-call]  # theirs
    for name, weight in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that was put in the wrong place
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("models") / "small")


def made(source: Path, shape: Shape, out: Path, dtype: torch.dtype = torch.float32) -> Path:
    return inflate.inflate(source, shape, out, dtype=dtype, progress=False)


def logits(directory: Path) -> torch.Tensor:
    """[3, 40, 50] float32 of fixed random texts, long enough for the rotations to matter."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    texts = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        found: torch.Tensor = model(texts).logits
    return found


def assert_same_function(source: Path, inflated: Path) -> None:
    """Same logits up to float32 rounding: they are about 10 in size, and wrong mappings move them by as much."""
    expected = logits(source)
    assert expected.std() > 1
    torch.testing.assert_close(logits(inflated), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("change", LARGER.values(), ids=LARGER)
def test_a_larger_shape_computes_the_same_function(source: Path, tmp_path: Path, change: dict[str, int]) -> None:
    assert_same_function(source, made(source, replace(SMALL, name="large", **change), tmp_path / "large"))


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ({"num_key_value_heads": 4}, {"hidden": 66, "heads": 6, "kv_heads": 6}),
        ({"num_key_value_heads": 4}, {"heads": 16, "kv_heads": 4}),
        ({"num_key_value_heads": 1}, {"hidden": 66, "heads": 6, "kv_heads": 2}),
        ({"num_key_value_heads": 1}, {"heads": 4, "kv_heads": 4}),
        (
            {"num_attention_heads": 6, "hidden_size": 96},
            {"hidden": 96, "heads": 8, "kv_heads": 4},
        ),  # 3 in two groups of 2
    ],
)
def test_any_grouping_of_queries_fits_another(tmp_path: Path, small: dict[str, int], large: dict[str, int]) -> None:
    source = make_source(tmp_path / "small", **small)
    assert_same_function(source, made(source, replace(SMALL, name="large", **large), tmp_path / "large"))


def test_a_tied_source_gets_an_output_matrix_of_its_own(tmp_path: Path) -> None:
    source = make_source(tmp_path / "small", tie_word_embeddings=True)
    large = made(source, replace(SMALL, hidden=80), tmp_path / "large")
    assert json.loads((large / "config.json").read_text())["tie_word_embeddings"] is False
    assert_same_function(source, large)


def test_a_source_in_several_files_is_read(source: Path, tmp_path: Path) -> None:
    split = tmp_path / "split"
    model = LlamaForCausalLM.from_pretrained(source)
    model.save_pretrained(split, max_shard_size="50KB")
    assert len(list(split.glob("*.safetensors"))) > 2
    large = made(split, replace(SMALL, hidden=80), tmp_path / "large")
    assert_same_function(source, large)
    assert function(large) == fingerprint(split)


def test_an_inflated_model_can_be_inflated_again(source: Path, tmp_path: Path) -> None:
    once = made(source, replace(SMALL, name="once", hidden=80), tmp_path / "once")
    twice = made(once, replace(SMALL, name="twice", hidden=96, layers=3), tmp_path / "twice")
    assert_same_function(source, twice)
    assert function(twice) == function(once) == fingerprint(source)


def test_padding_is_random_and_the_residual_stream_stays_clean(source: Path, tmp_path: Path) -> None:
    large = made(source, replace(SMALL, name="large", hidden=128, layers=3, intermediate=200), tmp_path / "large")
    weights = {name: tensor for path in large.glob("*.safetensors") for name, tensor in load_file(path).items()}
    writes = ("embed_tokens", "o_proj", "down_proj")
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            padded = tensor[:, 64:] if "embed" in name else tensor[64:] if name.split(".")[-2] in writes else tensor
            if any(word in name for word in writes):
                assert not padded.any(), name
            else:
                assert 0.015 < padded[:, 64:].std() < 0.025, name
    idle = [n for n in range(3) if not weights[f"model.layers.{n}.mlp.down_proj.weight"].any()]
    assert len(idle) == 1


def test_layers_keep_at_least_their_share_of_the_depth(source: Path) -> None:
    for count in range(2, 12):
        layers = plan(Llama.read(source), replace(SMALL, layers=count)).layers
        assert layers[-1] == count - 1
        assert all((to + 1) / count >= (of + 1) / 2 for of, to in enumerate(layers))
        assert len(set(layers)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 60}, "hidden_size is 60; allowed: 64, as small has, or more"),
        ({"layers": 1}, "num_hidden_layers is 1; allowed: 2"),
        ({"intermediate": 95}, "intermediate_size is 95; allowed: 96"),
        ({"head_dim": 24}, "head_dim is 24; allowed: a multiple of 16"),
        ({"head_dim": 8}, "head_dim is 8; allowed: a multiple of 16"),
        (
            {"hidden": 66, "heads": 3, "kv_heads": 3},
            "num_key_value_heads is 3, with 1 query heads each; allowed: at least 4, for",
        ),
        ({"heads": 8, "kv_heads": 1}, "num_key_value_heads is 1, with 8 query heads each; allowed: at least 2, for"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(
    source: Path, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ModelError, match=f"^large: {re.escape(message)}"):
        made(source, replace(SMALL, name="large", **change), tmp_path / "large")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; only a Llama with 'llama' can be inflated"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": 3}, "rotary parameters are 3"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; allowed: a number above 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": 51}, r"model.embed_tokens.weight is \(50, 64\); config.json says \(51, 64\)"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight is not one of a plain Llama"),
    ],
)
def test_a_source_that_is_no_plain_llama_is_refused(
    source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    config = json.loads((source / "config.json").read_text()) | change
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as error:
        made(other, replace(SMALL, layers=4), tmp_path / "large")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "large").exists()


def test_a_source_with_a_bias_that_its_configuration_hides_is_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "other")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(weights, tmp_path / "other" / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor model.layers.0.self_attn.q_proj.bias is not one of a plain Llama"):
        made(tmp_path / "other", replace(SMALL, hidden=80), tmp_path / "large")


def test_missing_and_broken_sources_are_one_clear_line(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^model directory '/no/such' does not exist$"):
        made(Path("/no/such"), SMALL, tmp_path / "large")
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read as JSON"):
        made(other, SMALL, tmp_path / "large")
    shutil.copyfile(source / "config.json", other / "config.json")
    with (other / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match=r"model.safetensors"):
        made(other, SMALL, tmp_path / "large")
    (other / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no .safetensors file"):
        made(other, SMALL, tmp_path / "large")


def test_at_most_a_layer_and_a_shard_are_held(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever a shard has been made, all those alive are counted: that one, and the one that is being written."""
    shape = replace(SMALL, name="large", layers=9)
    layer = sum(4 * math.prod(size) for size in shape.layer().values())
    shards: list[list[weakref.ref[torch.Tensor]]] = []
    held = []
    honest = padding.Maker._host

    def watch(maker: padding.Maker, tensors: padding.Shard) -> padding.Shard:
        shards.append([weakref.ref(tensor) for tensor in tensors.values()])
        gc.collect()
        held.append(sum(tensor.nbytes for shard in shards for ref in shard if (tensor := ref()) is not None))
        return honest(maker, tensors)

    monkeypatch.setattr(padding.Maker, "_host", watch)
    large = made(source, shape, tmp_path / "large")
    sizes = [path.stat().st_size for path in large.glob("*.safetensors")]
    assert len(sizes) == len(shards) == 9 + 2
    assert layer <= max(sizes) <= layer + 10_000
    assert layer <= max(held) <= 2 * layer


def test_the_same_source_and_shape_give_the_same_files(source: Path, tmp_path: Path) -> None:
    shape = replace(SMALL, name="large", hidden=80)
    first, second = (made(source, shape, tmp_path / name, torch.bfloat16) for name in ("a", "b"))
    for path in first.iterdir():
        assert sha256(path) == sha256(second / path.name), path.name


def test_what_is_there_whole_is_left_alone_and_what_is_broken_is_made_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = replace(SMALL, name="large", hidden=80)
    large = made(source, shape, tmp_path / "large")
    shard = large / "model-00002-of-00004.safetensors"
    before = shard.stat().st_ino
    made(source, shape, tmp_path / "large")
    assert shard.stat().st_ino == before
    honest = sha256(shard)
    shard.write_bytes(b"")
    made(source, shape, tmp_path / "large")
    assert sha256(shard) == honest
    assert f"{shard.name} is altered; building it again" in capsys.readouterr().err


def test_a_directory_with_anything_else_in_it_is_never_replaced(source: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    made(source, replace(SMALL, hidden=80), mine)  # an empty one may be used
    for shape in (replace(SMALL, hidden=96), replace(SMALL, name="other", hidden=80)):
        with pytest.raises(ModelError, match=r"mine exists and is not this model"):
            made(source, shape, mine)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("letters", "letters/a", "link", "."):
        with pytest.raises(ModelError, match=r"exists and is not this model"):
            made(source, replace(SMALL, hidden=80), tmp_path / name)
    assert (tmp_path / "letters" / "a").read_text() == "dear"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interruption_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        if "00003" in path.name:
            raise error
        save_file(tensors, path, metadata)

    monkeypatch.setattr(inflate, "save_file", stop)
    with pytest.raises((KeyboardInterrupt, ModelError)):
        made(source, SMALL, tmp_path / "models" / "large")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".faser-lock-large"]


def test_too_little_disk_is_found_before_writing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 12345, 12345))
    with pytest.raises(ModelError, match=r"not enough disk space .* bytes needed, 12,345 free"):
        made(source, SMALL, tmp_path / "models" / "large")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".faser-lock-large"]


def test_a_device_that_is_not_there_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (("cuda", "torch finds no CUDA GPU"), ("tpu", "allowed: cpu, cuda")):
        with pytest.raises(ModelError, match=f"device is '{device}'.*{message}"):
            inflate.inflate(source, SMALL, tmp_path / "large", device=device, progress=False)


def test_configuration_and_card_say_what_it_is(source: Path, tmp_path: Path) -> None:
    shape = replace(SMALL, name="giant-9b", hidden=128, kv_heads=4)
    large = made(source, shape, tmp_path / "large", torch.bfloat16)
    config = json.loads((large / "config.json").read_text())
    assert config[FUNCTION_OF] == fingerprint(source) == function(large) != fingerprint(large)
    assert config["rms_norm_eps"] == 1e-2 / 2
    assert (config["dtype"], config["vocab_size"], config["max_position_embeddings"]) == ("bfloat16", 50, 64)
    assert Shape.of_config(config, "giant-9b") == shape
    text = (large / "README.md").read_text()
    assert "**This is not giant-9b.**" in text
    assert "`small`" in text
    assert "| hidden size | 64 | 128 |" in text
    for name in ("tokenizer.json", "generation_config.json"):
        assert (large / name).read_bytes() == (source / name).read_bytes()
    assert fault(large, verify=True) is None
    assert len({path.stat().st_mode for path in large.iterdir()}) == 1  # who may read one, may read all


def test_the_index_lists_every_tensor_once(source: Path, tmp_path: Path) -> None:
    large = made(source, replace(SMALL, name="large", layers=3), tmp_path / "large", torch.bfloat16)
    index = json.loads((large / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    for path in large.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    assert index["weight_map"] == found
    parameters = plan(Llama.read(source), replace(SMALL, layers=3)).parameters
    assert index["metadata"]["total_size"] == 2 * parameters
    model = LlamaForCausalLM.from_pretrained(large)
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == parameters
