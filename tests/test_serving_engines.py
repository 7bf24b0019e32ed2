"""Several engines, and an engine of several ranks: a swap reaches all, counts add up, and ranks agree on lengths."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from faser.bench.client import own_connections, replay
from faser.bench.server import Server

pytestmark = pytest.mark.server

HERE = Path(__file__).parent
KEY = "an-admin-key-of-a-test"
PROMPTS = [f"Write a short story about the number {i}." for i in range(12)]
TOKENS = 24


def texts(server: Server) -> list[str]:
    replies = asyncio.run(replay(server.url, PROMPTS, concurrency=len(PROMPTS), max_tokens=TOKENS))
    return [reply.text for reply in replies]


def admin(server: Server, method: str, **kwargs: Any) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{server.url}/faser/policy"
    answer = httpx.request(method, url, headers=headers, timeout=60, trust_env=False, **kwargs)
    return list(answer.raise_for_status().json()["engines"])


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Of one engine of one rank, without speculation."""
    with Server(["--policy", "none", "--dtype", "float32"]) as server:
        return texts(server)


def flags(log: Path) -> list[str]:
    return ["--policy", "random:1", "--dtype", "float32", "--faser-deadline-ms", "1000", "--faser-log", str(log)]


def steps(log: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step" and line["running"]]


def test_two_engines_swap_together_and_their_counts_and_logs_add_up(expected: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with Server([*flags(log), "--data-parallel-size", "2"], env={"FASER_ADMIN_KEY": KEY}) as server:
        assert texts(server) == expected
        assert [engine["policy"] for engine in admin(server, "GET")] == ["random:1", "random:1"]
        swapped = admin(server, "POST", json={"policy": "static:3"})
        assert [engine["policy"] for engine in swapped] == ["static:3", "static:3"]
        assert texts(server) == expected
        told = admin(server, "GET")
        counts = server.metrics("faser:")
    assert all(engine["decisions"] > 0 for engine in told)
    assert counts.total("faser:decisions_total") == sum(engine["decisions"] for engine in told)
    assert counts.total("faser:policy_swaps_total") == 2
    logged = [steps(file) for file in (log, tmp_path / "log.jsonl.dp1")]
    assert counts.total("faser:verified_tokens_total") == sum(sum(s["verified"]) for part in logged for s in part)
    for part in logged:
        assert {step["policy"] for step in part} == {"random:1", "static:3"}
    one, other = ({name for step in part for name in step["request"]} for part in logged)
    assert not one & other
    assert len(one | other) == 2 * len(PROMPTS)


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
    cores = "|".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])  # else vLLM wants a NUMA node a rank
    env = {"FASER_ADMIN_KEY": KEY, "RANKS": str(tmp_path), "PYTHONPATH": str(HERE), "VLLM_CPU_OMP_THREADS_BIND": cores}
    with Server([*model, "--policy", "none", "--dtype", "float32"], env=env) as server:
        want = tokens(server)
    command = (sys.executable, str(HERE / "ranked_server.py"), "serve")
    with Server([*model, *flags(log)], env=env, command=command) as server:
        assert tokens(server) == want
        (engine,) = admin(server, "POST", json={"policy": "static:3"})
        assert engine["policy"] == "static:3"
        assert tokens(server) == want
    first, second = ((tmp_path / f"{rank}.jsonl").read_text().splitlines() for rank in (0, 1))
    assert first == second
    told = [length for line in first for length in json.loads(line)[0].values()]
    assert {*range(1, 8)} <= {*told}
    logged = steps(log)
    assert sum(told) == sum(sum(step["verified"]) for step in logged)
    accepted = sum(sum(step["accepted"]) for step in logged)
    assert 0 < accepted < sum(told)
