"""A Llama in a GGUF file as a Hugging Face directory: names, the rotary layout, the tokenizer, the configuration.

Nothing is kept quantised: the 4-bit blocks are expanded to the values they stand for, then rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from faser.models.json_file import write_json
from faser.models.weights import write_safetensors

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""GGUF's token type for special tokens."""


class GgufLlama:
    """One GGUF file of architecture `llama`, open for reading (memory-mapped)."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self.shapes = {hf_name(t.name): tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}
        """Name to shape of every tensor, in the order of `tensors`."""

    def field(self, key: str) -> Any:
        """A metadata value, as Python numbers, strings and lists."""
        return self._reader.fields[key].contents()

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Each tensor under its Hugging Face name, float32."""
        heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            part = tensor.name.split(".")[-2]
            yield hf_name(tensor.name), rotary_halves(values, heads[part]) if part in heads else values

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        heads, width = self.field("llama.attention.head_count"), self.field("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.field("llama.vocab_size"),
            "hidden_size": width,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "head_dim": width // heads,
            "hidden_act": "silu",
            "rms_norm_eps": float(str(np.float32(self.field("llama.attention.layer_norm_rms_epsilon")))),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.field("llama.rope.freq_base")},
            "max_position_embeddings": self.field("llama.context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": False,
            "mlp_bias": False,
            **self.special_ids(),
        }

    def special_ids(self) -> dict[str, int]:
        """Ids of the begin, end and padding tokens; for a chat model `eos` ends a turn."""
        keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {f"{k}_token_id": int(self.field(f"tokenizer.ggml.{v}_token_id")) for k, v in keys.items()}

    def write_tokenizer(self, directory: Path) -> None:
        """tokenizer.json, tokenizer_config.json and chat_template.jinja.

        Byte-level BPE with every digit on its own: llama.cpp calls that pre-tokenizer `smollm`; no other is known here.
        """
        kind = (self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not one that is known: ('gpt2', 'smollm')")
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        bpe = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
        tokenizer = Tokenizer(bpe)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.field("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        tokenizer.save(str(directory / "tokenizer.json"))
        ids = self.special_ids()
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as is; GPT2's drops the digits rule
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[int(self.field("tokenizer.ggml.unknown_token_id"))],
            "model_max_length": self.field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
        }
        write_json(directory / "tokenizer_config.json", settings)
        (directory / "chat_template.jinja").write_text(self.field("tokenizer.chat_template"))

    def write(self, directory: Path, advance: Callable[[int], None]) -> None:
        """The whole model; `advance` is told the bytes of weights written."""
        self.write_tokenizer(directory)
        write_json(directory / "config.json", self.config())
        write_json(directory / "generation_config.json", self.special_ids())
        write_safetensors(directory / "model.safetensors", self.shapes, self.tensors(), advance)


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`. KeyError: not a tensor of a Llama."""
    match name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{_INNER[part]}.{kind}"
        case [part, kind]:
            return f"{_OUTER[part]}.{kind}"
    raise KeyError(name)


def rotary_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads * head_dim, H] of a query or key projection from llama.cpp's order to Hugging Face's.

    A rotary pair is two neighbouring rows of a head there, and rows d and d + head_dim / 2 here.
    """
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
