"""Are the outputs token-identical? Every policy against `none`, greedy, through the real server.

    python -m faser.bench.identity                       the whole matrix (about an hour on two cores)
    python -m faser.bench.identity --policies random:1 --dtypes float32 --concurrency 16 --prompts 16 --tokens 64

In bfloat16 compare at one concurrency only: one-row kernels are other kernels, and vLLM without speculation already
differs from itself between concurrency 1 and 16.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import httpx

from faser.bench.client import own_connections
from faser.bench.prompts import choose, load_prompts
from faser.bench.server import Server

POLICIES = (
    "static:1",
    "static:2",
    "static:3",
    "static:4",
    "static:5",
    "static:6",
    "static:7",
    "random:1",
    "checkpoints/ppo.pt",
)
RUNS = (("float32", 1), ("float32", 16), ("bfloat16", 16))
"""(dtype, concurrency) at which outputs must be identical."""


async def _tokens(client: httpx.AsyncClient, gate: asyncio.Semaphore, prompt: str, tokens: int) -> list[int]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with gate:
        response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return list(response.json()["choices"][0]["token_ids"])


async def generate(url: str, prompts: Sequence[str], *, tokens: int, concurrency: int) -> list[list[int]]:
    """Greedy token ids, `tokens` for each of `prompts`, with at most `concurrency` requests at once."""
    gate = asyncio.Semaphore(concurrency)
    async with own_connections(url) as client:
        return await asyncio.gather(*(_tokens(client, gate, p, tokens) for p in prompts))


def outputs(
    policy: str, dtype: str, concurrencies: Sequence[int], prompts: Sequence[str], tokens: int
) -> list[list[list[int]]]:
    """One server's greedy outputs at each concurrency."""
    with Server(["--policy", policy, "--dtype", dtype]) as server:
        return [asyncio.run(generate(server.url, prompts, tokens=tokens, concurrency=c)) for c in concurrencies]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = [p.prompt for p in choose(load_prompts(), args.prompts)]
    different = 0
    for dtype in args.dtypes:
        concurrencies = [c for d, c in RUNS if d == dtype and c in args.concurrency]
        if not concurrencies:
            continue
        reference = outputs("none", dtype, concurrencies, prompts, args.tokens)
        for policy in args.policies:
            got = outputs(policy, dtype, concurrencies, prompts, args.tokens)
            for c, want, have in zip(concurrencies, reference, got, strict=True):
                wrong = sum(w != h for w, h in zip(want, have, strict=True))
                different += wrong
                print(f"{dtype} concurrency {c:2d} {policy}: {wrong} of {len(prompts)} differ", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
