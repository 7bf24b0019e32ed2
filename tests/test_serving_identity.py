"""Greedy outputs are the target's, token by token, whatever the policy does.

The whole matrix: python -m faser.bench.identity
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faser.bench.identity import generate
from faser.bench.prompts import choose, load_prompts
from faser.bench.server import Server
from faser.checkpoints import SHIPPED_POLICY
from faser.policy_command import ask
from faser.serving.settings import ADMIN_KEY
from faser.tapes import load_tape

pytestmark = pytest.mark.server

PROMPTS = [p.prompt for p in choose(load_prompts(), 20)]
TOKENS, CONCURRENCY = 48, 16
KEY = "an-admin-key-of-a-test"


def outputs(server: Server) -> list[list[int]]:
    return asyncio.run(generate(server.url, PROMPTS, tokens=TOKENS, concurrency=CONCURRENCY))


def first_token_acceptance(steps: list[dict[str, Any]]) -> float:
    """Of all drafts of which any token was verified, the share whose first one was accepted."""
    judged = [a > 0 for step in steps for v, a in zip(step["verified"], step["accepted"], strict=True) if v]
    assert len(judged) > 100
    return sum(judged) / len(judged)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_outputs_are_token_identical_to_no_speculation(
    plain: Callable[[str], Server], dtype: str, tmp_path: Path
) -> None:
    log, want = tmp_path / "steps.jsonl", outputs(plain(dtype))
    flags = ["--faser-log", str(log), "--faser-deadline-ms", "1000"]  # decided in time on a busy machine too
    flags += ["--no-enable-prefix-caching"]  # the same prompts twice are the same work
    with Server(["--policy", "random:1", "--dtype", dtype, *flags], env={ADMIN_KEY: KEY}) as server:
        random = outputs(server)
        counts = server.metrics("faser:")
        ask(server.url, KEY, "POST", "policy", {"policy": SHIPPED_POLICY.name})
        shipped = outputs(server)
    for have in (random, shipped):
        assert [len(tokens) for tokens in have] == [TOKENS] * len(PROMPTS)
        assert sum(w != h for w, h in zip(want, have, strict=True)) == 0
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "step"]
    assert {step["policy"] for step in steps} == {"random:1", SHIPPED_POLICY.name}
    # It did speculate, at every length.
    assert all(count > 0 for count in counts.by("faser:verify_length_total", "length").values())
    assert counts.total("faser:accepted_tokens_total") > 100
    # Depths of 0 between others must not starve the draft's KV cache: it is as good as on its tape.
    at_random = [step for step in steps if step["policy"] == "random:1"]
    assert first_token_acceptance(at_random) == pytest.approx(load_tape("smollm2").match.mean(), abs=0.1)
