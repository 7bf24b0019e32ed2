"""Does an inflated model compute its source's function, served by the real engine in bfloat16?

    python -m faser.bench.inflated --source DIR --inflated DIR --draft DIR

Both are served with `static:4`, and write the same prompts, greedily. Then each reads the texts that the source wrote:
its most probable token at every position is compared, and so is the mean number of drafted tokens accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from faser.bench.arguments import between, stoppable
from faser.bench.client import own_connections
from faser.bench.identity import generate
from faser.bench.prompts import choose, load_prompts
from faser.bench.server import Server, ServerError

LENGTH = 4
AT_ONCE, READ_AT_ONCE = 16, 64
READ = 16
"""Outputs, of which every position is read."""
AGREEMENT, TOLERANCE = 0.98, 0.03
"""Least share of equal most probable tokens, and largest relative difference in accepted lengths."""


@dataclass(frozen=True, slots=True)
class Seen:
    """written: token ids of each output. best: most probable token at each position of each text read.
    accepted: mean over request-steps that verified LENGTH tokens."""

    written: list[list[int]]
    best: list[list[int]]
    accepted: float


async def read(url: str, model: str, texts: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
    """The most probable token at each output position of (prompt, output) token ids.

    Each is asked for with a request of its own. vLLM 0.32's log-probabilities of a prompt would be one request a text,
    but on a GPU with a draft they are wrong (its pull request 53520): the draft overwrites what they are made of.
    """
    gate = asyncio.Semaphore(READ_AT_ONCE)

    async def one(client: httpx.AsyncClient, ids: list[int]) -> int:
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        async with gate:
            response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
        return int(response.raise_for_status().json()["choices"][0]["token_ids"][0])

    async with own_connections(url) as client:
        asked = (one(client, prompt + output[:at]) for prompt, output in texts for at in range(len(output)))
        best = iter(await asyncio.gather(*asked))
    return [[next(best) for _ in output] for _, output in texts]


async def prompt_ids(url: str, model: str, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of `prompts` in the model's chat format."""
    async with own_connections(url) as client:
        found = []
        for prompt in prompts:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
            response = await client.post("/tokenize", json=body)
            found.append(list(response.raise_for_status().json()["tokens"]))
        return found


def look(target: Path, draft: Path, prompts: Sequence[str], tokens: int, reference: Seen | None) -> Seen:
    """Serve `target`; it reads the texts of `reference`, or its own."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "steps.jsonl"
        models = [str(target.resolve()), "--spec-model", str(draft.resolve())]  # a bare name may be a known model's
        command = [*models, "--policy", f"static:{LENGTH}", "--faser-log", str(log), "--dtype", "bfloat16"]
        with Server([*command, "--served-model-name", "model"], wait_s=600) as server:
            written = asyncio.run(generate(server.url, prompts, tokens=tokens, concurrency=AT_ONCE))
            lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
            steps = [line for line in lines if line["kind"] == "step"]
            asked = asyncio.run(prompt_ids(server.url, "model", prompts[:READ]))
            texts = list(zip(asked, (reference.written if reference else written)[:READ], strict=True))
            best = asyncio.run(read(server.url, "model", texts))
    verdicts = [pair for step in steps for pair in zip(step["verified"], step["accepted"], strict=True)]
    return Seen(written, best, float(np.mean([accepted for verified, accepted in verdicts if verified == LENGTH])))


def main() -> int:
    """Exit status: 0 the same function, 1 not, 2 a server did not start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="directory of the model that was inflated")
    parser.add_argument("--inflated", type=Path, required=True, help="directory of the inflated model")
    parser.add_argument("--draft", type=Path, required=True, help="directory of a draft of both")
    parser.add_argument("--prompts", type=between(1, len(load_prompts())), default=120)
    parser.add_argument("--tokens", type=between(1, 1024), default=128, help="of each output")
    args = parser.parse_args()
    return stoppable("inflated", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    prompts = [p.prompt for p in choose(load_prompts(), args.prompts)]
    try:
        source = look(args.source, args.draft, prompts, args.tokens, None)
        inflated = look(args.inflated, args.draft, prompts, args.tokens, source)
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pairs = [p for ours, theirs in zip(source.best, inflated.best, strict=True) for p in zip(ours, theirs, strict=True)]
    agreement = sum(ours == theirs for ours, theirs in pairs) / len(pairs)
    same = sum(ours == theirs for ours, theirs in zip(source.written, inflated.written, strict=True))
    change = inflated.accepted / source.accepted - 1
    print(f"most probable tokens equal: {agreement:.2%} of {len(pairs)} (at least {AGREEMENT:.0%} wanted)")
    print(
        f"accepted of {LENGTH}: {source.accepted:.3f} by the source, {inflated.accepted:.3f} by the inflated model, "
        f"{change:+.1%} (at most {TOLERANCE:.0%} wanted)"
    )
    print(f"outputs equal to the last token: {same} of {len(prompts)}")
    return 0 if agreement >= AGREEMENT and abs(change) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
