"""A real server accepts, at every position of recorded texts, exactly what their tape says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from faser.bench.client import own_connections
from faser.bench.server import Server
from faser.core import MAX_DEPTH
from faser.policy_command import ask
from faser.serving.settings import ADMIN_KEY
from faser.tapes import Tape, load_tape

KEY = "an-admin-key-of-a-test"
TAPE, REQUESTS, CONCURRENCY = "smollm2", 50, 16
LONGEST = 200
"""Only requests limited to so many tokens: two cores write some hundred a second."""


def chosen(tape: Tape) -> list[int]:
    """Greedy requests of the tape, of every domain: drafting is greedy as well, so nothing is left to chance."""
    greedy = np.flatnonzero((tape.temperature == 0) & (tape.max_tokens <= LONGEST))
    rows = np.random.default_rng(0).permutation(greedy)[:REQUESTS]
    assert len(rows) == REQUESTS
    assert {*tape.domain[rows].tolist()} == {*range(len(tape.domains))}
    return [int(row) for row in rows]


async def outputs(url: str, tape: Tape, rows: Sequence[int]) -> list[list[int]]:
    """The server's answers to the prompts of `rows`, as token ids; each request's id is its row."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(client: httpx.AsyncClient, row: int) -> list[int]:
        body = {
            "prompt": tape.text(row)[0],
            "max_tokens": int(tape.max_tokens[row]),
            "temperature": 0,
            "return_token_ids": True,
            "request_id": f"row-{row}",
        }
        async with gate:
            response = await client.post("/v1/completions", json=body)
        return list(response.raise_for_status().json()["choices"][0]["token_ids"])

    async with own_connections(url) as client:
        return await asyncio.gather(*(one(client, row) for row in rows))


def compared(steps: Sequence[dict[str, Any]], tape: Tape) -> tuple[list[str], dict[int, list[int]]]:
    """Where a step log and the tape differ, one line each; and the numbers of tokens verified, for each row.

    What a server accepts past a request's end is cut off, there as here. A row's steps must follow one another without
    a gap, up to its end.
    """
    faults: list[str] = []
    verified: dict[int, list[int]] = {}
    reached: dict[int, int] = {}
    for step in steps:
        per_request = (step[name] for name in ("request", "generated", "verified", "accepted"))
        for name, at, length, accepted in zip(*per_request, strict=True):
            row = int(name.partition("row-")[2].partition("-")[0])
            left = int(tape.output_tokens[row]) - at
            expected = min(int(tape.run_lengths[tape.offsets[row] + at]), length) if left > 0 else -1
            if min(accepted, left) != expected:
                faults.append(f"row {row}, token {at}: {accepted} of {length} accepted; {expected} on the tape")
            if at != reached.get(row, 1):  # the first token comes with the prompt
                faults.append(f"row {row}, token {at}: {reached.get(row, 1)} expected to be next")
            reached[row] = at + min(accepted + 1, left)
            verified.setdefault(row, []).append(length)
    faults += [
        f"row {row} ends at token {at}; at {tape.output_tokens[row]} on the tape"
        for row, at in reached.items()
        if at != tape.output_tokens[row]
    ]
    return faults, verified


@pytest.mark.server
def test_accepted_counts_of_a_real_server_are_those_of_the_tape(tmp_path: Path) -> None:
    """`random` has every length beside every other; `probe` goes without drafting for long, then drafts again."""
    tape = load_tape(TAPE)
    rows, log = chosen(tape), tmp_path / "steps.jsonl"
    policies = ("random:1", "probe:12:0")
    flags = ["--dtype", "float32", "--faser-log", str(log), "--faser-deadline-ms", "1000"]
    with Server(["--policy", policies[0], *flags], env={ADMIN_KEY: KEY}) as server:
        for policy in policies:
            ask(server.url, KEY, "POST", "policy", {"policy": policy})
            assert asyncio.run(outputs(server.url, tape, rows)) == [tape.text(row)[1] for row in rows]
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "step"]
    for policy in policies:
        faults, verified = compared([step for step in steps if step["policy"] == policy], tape)
        assert not faults, "\n".join([policy, *faults[:20]])
        assert {*verified} == {row for row in rows if tape.output_tokens[row] > 1}
        assert {*range(MAX_DEPTH + 1)} == {length for lengths in verified.values() for length in lengths}


def test_one_flipped_bit_of_the_tape_is_found() -> None:
    rng = np.random.default_rng(0)
    tape = Tape.iid(0.6, requests=6, seed=2)
    steps = []
    for row in range(len(tape)):  # what a server would log that accepts what the tape says
        at, total = 1, int(tape.output_tokens[row])
        while at < total:
            length = int(rng.integers(0, MAX_DEPTH + 1))
            accepted = min(int(tape.run_lengths[tape.offsets[row] + at]), length)
            past = length if at + accepted == total else accepted  # past the end it may accept more
            steps.append(
                {"request": [f"cmpl-row-{row}-0-ab12"], "generated": [at], "verified": [length], "accepted": [past]}
            )
            at = min(at + accepted + 1, total)
    assert compared(steps, tape)[0] == []
    judged = {  # positions whose draft was verified; others say nothing about a bit
        int(tape.offsets[row]) + at + j
        for step in steps
        for row, at, length in [(int(step["request"][0].split("-")[2]), step["generated"][0], step["verified"][0])]
        for j in range(min(length, int(tape.run_lengths[tape.offsets[row] + at]) + 1))
        if at + j < tape.output_tokens[row]
    }
    assert len(judged) > 300
    for bit in judged:
        match = tape.match.copy()
        match[bit] = not match[bit]
        assert compared(steps, replace(tape, match=match))[0]
    assert compared(steps[:-1], tape)[0]  # a step that is missing
    assert compared([steps[0], *steps], tape)[0]
