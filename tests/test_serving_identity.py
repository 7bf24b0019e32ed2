"""Greedy outputs are the target's, token by token, whatever the policy does.

The whole matrix: python -m faser.bench.identity
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from faser.bench.identity import generate
from faser.bench.prompts import choose, load_prompts
from faser.bench.server import Server
from faser.tapes import load_tape

pytestmark = pytest.mark.server

PROMPTS = [p.prompt for p in choose(load_prompts(), 20)]
TOKENS, CONCURRENCY = 48, 16


def outputs(server: Server) -> list[list[int]]:
    return asyncio.run(generate(server.url, PROMPTS, tokens=TOKENS, concurrency=CONCURRENCY))


def first_token_acceptance(log: Path) -> float:
    """Of all drafts of which any token was verified, the share whose first one was accepted."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    judged = [a > 0 for step in steps for v, a in zip(step["verified"], step["accepted"], strict=True) if v]
    assert len(judged) > 100
    return sum(judged) / len(judged)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reference(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[list[int]]]]:
    """The type, and what a server without speculation answers."""
    with Server(["--policy", "none", "--dtype", request.param]) as server:
        yield request.param, outputs(server)


@pytest.mark.parametrize("policy", ["random:1", "checkpoints/ppo.pt"])
def test_greedy_outputs_are_token_identical_to_no_speculation(
    reference: tuple[str, list[list[int]]], policy: str, tmp_path: Path
) -> None:
    dtype, want = reference
    log = tmp_path / "steps.jsonl"
    flags = ["--faser-log", str(log), "--faser-deadline-ms", "1000"]  # decided in time on a busy machine too
    with Server(["--policy", policy, "--dtype", dtype, *flags]) as server:
        have = outputs(server)
        counts = server.metrics("faser:")
    assert [len(tokens) for tokens in have] == [TOKENS] * len(PROMPTS)
    assert sum(w != h for w, h in zip(want, have, strict=True)) == 0
    if policy.startswith("random"):  # it did speculate, at every length
        assert all(count > 0 for count in counts.by("faser:verify_length_total", "length").values())
        assert counts.total("faser:accepted_tokens_total") > 100
        # Depths of 0 between others must not starve the draft's KV cache: it is as good as on its tape.
        assert first_token_acceptance(log) == pytest.approx(load_tape("smollm2").match.mean(), abs=0.1)
