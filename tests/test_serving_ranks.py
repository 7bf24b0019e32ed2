"""An engine of two ranks: they agree on lengths, and a swap reaches both."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from faser.bench.client import own_connections
from faser.bench.server import Server
from faser.policy_command import ask

pytestmark = pytest.mark.server

HERE = Path(__file__).parent
KEY = "an-admin-key-of-a-test"


def swap(server: Server, policy: str) -> None:
    (engine,) = ask(server.url, KEY, "POST", "policy", {"policy": policy})["engines"]
    assert engine["policy"] == policy


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `draft`: SmolLM2 has 9 heads, which two ranks cannot share; these have 4."""
    folder, words = tmp_path_factory.mktemp("even"), 512
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
        with torch.no_grad():  # the draft is the target, a little off: it is right now and then
            for weight in model.parameters():
                weight += 0.1 * weight.std() * torch.randn_like(weight)
    return folder


def tokens(server: Server) -> list[list[int]]:
    """Greedy answers to prompts of tokens, all at once."""

    async def every() -> list[list[int]]:
        async with own_connections(server.url) as client:

            async def one(n: int) -> list[int]:
                body = {"prompt": [5 + n, 9, 11 * n], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
                answer = await client.post("/v1/completions", json={**body, "return_token_ids": True})
                return list(answer.raise_for_status().json()["choices"][0]["token_ids"])

            return await asyncio.gather(*map(one, range(12)))

    return asyncio.run(every())


def test_two_ranks_of_an_engine_are_told_the_same_lengths_and_write_what_they_would_without(
    even: Path, tmp_path: Path
) -> None:
    """Ranks that disagreed on a length would hang in a collective, or write another text."""
    small = ["--tensor-parallel-size", "2", "--enforce-eager", "--kv-cache-memory-bytes", "100000000"]
    log, model = tmp_path / "log.jsonl", [str(even / "target"), "--spec-model", str(even / "draft"), *small]
    flags = ["--policy", "random:1", "--dtype", "float32", "--faser-deadline-ms", "1000", "--faser-log", str(log)]
    cores = "|".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])  # else vLLM wants a NUMA node a rank
    env = {"FASER_ADMIN_KEY": KEY, "RANKS": str(tmp_path), "PYTHONPATH": str(HERE), "VLLM_CPU_OMP_THREADS_BIND": cores}
    command = (sys.executable, str(HERE / "ranked_server.py"), "serve")
    with Server([*model, *flags], env=env, command=command) as server:
        swap(server, "none")  # in force before anything is drafted
        want = tokens(server)
        for policy in ("random:1", "static:3"):
            swap(server, policy)
            assert tokens(server) == want
    first, second = ((tmp_path / f"{rank}.jsonl").read_text().splitlines() for rank in (0, 1))
    assert first == second
    told = [length for line in first for length in json.loads(line)[0].values()]
    assert {*range(1, 8)} <= {*told}
    lines = map(json.loads, log.read_text().splitlines())
    logged = [line for line in lines if line["kind"] == "step" and line["running"]]
    assert sum(told) == sum(sum(step["verified"]) for step in logged)
    accepted = sum(sum(step["accepted"]) for step in logged)
    assert 0 < accepted < sum(told)
