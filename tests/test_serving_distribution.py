"""Sampled outputs have the target's distribution: a permutation chi-square on 3,000 samples, which catches a cheat."""

import asyncio
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from faser.bench.client import own_connections
from faser.bench.server import Server

pytestmark = pytest.mark.server

SAMPLES, PER_REQUEST, TOKENS = 3000, 60, 3
BODY = {"prompt": "My favourite animal is", "temperature": 1.0, "max_tokens": TOKENS, "n": PER_REQUEST}
SPECULATING = ["--policy", "random:2", "--faser-deadline-ms", "1000"]  # decided in time on a busy machine too
SEEDS = itertools.count(1)
"""One for each server, none's being 0: with the same one, two would draw the same numbers, and be too much alike."""
RARE = 50
"""Outcomes seen fewer times in both samples together are one outcome."""


async def sample(url: str) -> list[tuple[int, ...]]:
    """SAMPLES continuations of TOKENS tokens."""
    async with own_connections(url) as client:
        ask = {**BODY, "ignore_eos": True, "return_token_ids": True}
        replies = []
        for _ in range(SAMPLES // PER_REQUEST):
            replies.append(await client.post("/v1/completions", json=ask))
    drawn = [tuple(choice["token_ids"]) for reply in replies for choice in reply.raise_for_status().json()["choices"]]
    assert len(drawn) == SAMPLES
    return drawn


def p_value(a: Sequence[tuple[int, ...]], b: Sequence[tuple[int, ...]], permutations: int = 5000) -> float:
    """Of two samples having one distribution, by the chi-square statistic's own permutation distribution."""
    pooled = Counter(a) + Counter(b)
    names = {outcome: i for i, (outcome, n) in enumerate(sorted(pooled.items())) if n >= RARE}
    codes = np.unique([names.get(outcome, -1) for outcome in [*a, *b]], return_inverse=True)[1]
    expected = np.bincount(codes) * len(a) / len(codes)

    def statistic(of_a: np.ndarray) -> float:
        return float(((np.bincount(of_a, minlength=len(expected)) - expected) ** 2 / expected).sum())

    rng = np.random.default_rng(0)
    seen = statistic(codes[: len(a)])
    shuffled = [statistic(rng.permutation(codes)[: len(a)]) for _ in range(permutations)]
    return (1 + sum(s >= seen for s in shuffled)) / (1 + permutations)


def samples_of(arguments: list[str], **kwargs: object) -> list[tuple[int, ...]]:
    with Server([*arguments, "--seed", str(next(SEEDS))], **kwargs) as server:  # type: ignore[arg-type]  # passed on as they are
        return asyncio.run(sample(server.url))


@pytest.fixture(scope="module")
def target(plain: Callable[[str], Server]) -> list[tuple[int, ...]]:
    return asyncio.run(sample(plain("bfloat16").url))


def test_random_lengths_do_not_change_the_distribution(target: list[tuple[int, ...]]) -> None:
    assert p_value(target, samples_of(SPECULATING)) > 0.001


def test_a_rule_that_leans_to_the_draft_is_caught(target: list[tuple[int, ...]]) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = (sys.executable, str(here / "biased_server.py"), "serve")
    biased = samples_of(SPECULATING, command=command, env={"PYTHONPATH": path})
    assert p_value(target, biased) < 0.001
