"""The converted pair is exact, and it is the model it claims to be."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, TokenizersBackend

from faser.models import Pair
from faser.models.gguf_llama import rotary_halves
from faser.models.smollm2 import DRAFT_BYTES, TARGET_BYTES, find_source
from faser.models.weights import to_bfloat16, write_safetensors

PROMPTS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Write a Python function that adds two numbers.",
    "What is 12 plus 30?",
    "Give one tip for sleeping better.",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that meet at every layer crawl on a machine that is busy with something else."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(models: Pair) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(models: Pair) -> TokenizersBackend:
    return AutoTokenizer.from_pretrained(models.target)


@pytest.fixture(scope="module")
def answers(target: LlamaForCausalLM, tokenizer: TokenizersBackend) -> dict[str, torch.Tensor]:
    """Greedy answers [T] to PROMPTS, at most 40 tokens each."""
    found = {}
    for text in PROMPTS:
        ids = chat(tokenizer, text)[None]
        mask = torch.ones_like(ids)
        found[text] = target.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    return found


def test_target_weights_are_the_dequantised_ones(models: Pair) -> None:
    converted = load_file(Path(models.target) / "model.safetensors")
    stored = {t.name: t for t in GGUFReader(find_source()).tensors}
    assert len(converted) == len(stored) == 272

    def source(name: str) -> torch.Tensor:
        tensor = stored[name]
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).bfloat16()

    same = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.7.self_attn.v_proj.weight": "blk.7.attn_v.weight",
        "model.layers.7.self_attn.o_proj.weight": "blk.7.attn_output.weight",
        "model.layers.29.mlp.gate_proj.weight": "blk.29.ffn_gate.weight",
        "model.layers.29.mlp.up_proj.weight": "blk.29.ffn_up.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
    }
    for ours, theirs in same.items():
        assert torch.equal(converted[ours], source(theirs)), ours
    for part, heads in (("q", 9), ("k", 3)):
        ours = converted[f"model.layers.12.self_attn.{part}_proj.weight"].reshape(heads, 64, 576)
        theirs = source(f"blk.12.attn_{part}.weight").reshape(heads, 64, 576)
        for d in range(32):  # rotary pair d: rows d and d + 32 of a head here, rows 2d and 2d + 1 in the GGUF
            assert torch.equal(ours[:, d], theirs[:, 2 * d])
            assert torch.equal(ours[:, d + 32], theirs[:, 2 * d + 1])


def test_draft_weights_are_int8_times_scale(models: Pair) -> None:
    shipped = load_file(Path(__file__).parents[1] / "checkpoints/smollm2-draft-15m/model.int8.safetensors")
    expanded = load_file(Path(str(models.draft)) / "model.safetensors")
    assert set(expanded) == {name for name in shipped if not name.endswith(".scale")}
    for name, values in expanded.items():
        stored = shipped[name].float()
        exact = stored * shipped[f"{name}.scale"][:, None] if f"{name}.scale" in shipped else stored
        assert torch.equal(values, exact.bfloat16()), name


def test_announced_sizes_cover_the_directories(models: Pair) -> None:
    for directory, announced in ((models.target, TARGET_BYTES), (str(models.draft), DRAFT_BYTES)):
        size = sum(p.stat().st_size for p in Path(directory).iterdir())
        assert 0.95 * announced < size <= announced


def test_greedy_text_is_sensible_and_ends_its_turn(
    answers: dict[str, torch.Tensor], tokenizer: TokenizersBackend
) -> None:
    assert "Paris" in tokenizer.decode(answers[PROMPTS[0]])
    assert all(answers[text][-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") for text in PROMPTS[:2])


def test_the_draft_agrees_with_its_target(
    models: Pair, answers: dict[str, torch.Tensor], tokenizer: TokenizersBackend
) -> None:
    draft = AutoModelForCausalLM.from_pretrained(models.draft, dtype=torch.float32)
    hits = []
    for text, output in answers.items():
        prompt = chat(tokenizer, text)
        with torch.no_grad():
            logits = draft(torch.cat([prompt, output])[None]).logits[0]
        hits += (logits[len(prompt) - 1 : -1].argmax(-1) == output).tolist()
    print(f"draft agreement {np.mean(hits):.3f} of {len(hits)} tokens")
    assert len(hits) > 60
    assert np.mean(hits) > 0.4


def test_the_tokenizer_is_smollm2s(models: Pair, tokenizer: TokenizersBackend) -> None:
    text = "def f(x):\n    return x ** 2024  # naïve 日本 🙂\r\n\n\t- 3.14159"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer("<|im_start|>")["input_ids"] == [1]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.vocab_size) == ("<|im_end|>", 2, 49152)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n")
    for directory in (models.target, str(models.draft)):
        assert json.loads((Path(directory) / "generation_config.json").read_text())["eos_token_id"] == 2
    assert AutoTokenizer.from_pretrained(models.draft).get_vocab() == tokenizer.get_vocab()


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32) * np.float32(1e3)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, 3e38, 1e-40], np.float32)
    for array in (values, ties):
        theirs = torch.from_numpy(array).bfloat16().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(to_bfloat16(array), theirs)


def test_rotary_rows_change_places_within_their_head() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # 2 heads of 4 rows: pairs (0,1), (2,3) | (4,5), (6,7)
    assert rotary_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_out_of_order_or_missing_is_not_written_quietly(tmp_path: Path) -> None:
    one = np.ones((2, 3), np.float32)
    shapes = {"a": (2, 3), "b": (2, 3)}
    for tensors in ([("b", one), ("a", one)], [("a", one.T), ("b", one)], [("a", one)]):
        with pytest.raises(ValueError, match=r"announced|shorter"):
            write_safetensors(tmp_path / "w", shapes, tensors, lambda _: None)


def chat(tokenizer: TokenizersBackend, text: str) -> torch.Tensor:
    """[T] int64 ids of one user turn, ready for the answer."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return rendered["input_ids"][0]
