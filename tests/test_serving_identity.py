"""Greedy outputs are the target's, token by token, whatever the policy does.

The whole matrix: python -m faser.bench.identity
"""

import asyncio
from collections.abc import Iterator

import pytest

from faser.bench.identity import generate
from faser.bench.prompts import choose, load_prompts
from faser.bench.server import Server

pytestmark = pytest.mark.server

PROMPTS = [p.prompt for p in choose(load_prompts(), 20)]
TOKENS, CONCURRENCY = 48, 16


def outputs(server: Server) -> list[list[int]]:
    return asyncio.run(generate(server.url, PROMPTS, tokens=TOKENS, concurrency=CONCURRENCY))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def reference(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[list[int]]]]:
    """The type, and what a server without speculation answers."""
    with Server(["--policy", "none", "--dtype", request.param]) as server:
        yield request.param, outputs(server)


@pytest.mark.parametrize("policy", ["random:1", "checkpoints/ppo.pt"])
def test_greedy_outputs_are_token_identical_to_no_speculation(
    reference: tuple[str, list[list[int]]], policy: str
) -> None:
    dtype, want = reference
    with Server(["--policy", policy, "--dtype", dtype]) as server:
        have = outputs(server)
        counts = server.metrics("faser:")
    assert [len(tokens) for tokens in have] == [TOKENS] * len(PROMPTS)
    assert sum(w != h for w, h in zip(want, have, strict=True)) == 0
    if policy.startswith("random"):  # it did speculate, at every length
        assert all(count > 0 for count in counts.by("faser:verify_length_total", "length").values())
        assert counts.total("faser:accepted_tokens_total") > 100
