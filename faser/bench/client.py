"""A client that replays prompts over streaming chat completions and times every request.

The decision here: a closed loop. `concurrency` workers each send a prompt as soon as their last one is answered, so the
load is known and the same for every policy, whatever its speed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np


class ReplayError(RuntimeError):
    """A request that failed; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answered request. Times in seconds from when it was sent.

    first_s, last_s: arrival of the first and of the last piece of text. end_s: of the end of the stream.
    tokens: of output, as the server counts them.
    """

    text: str
    prompt_tokens: int
    tokens: int
    first_s: float
    last_s: float
    end_s: float

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; NaN for an answer of one token."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else float("nan")


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between values; NaNs are left out; NaN of nothing."""
    known = [value for value in values if value == value]
    return float(np.percentile(known, q)) if known else float("nan")


def own_connections(url: str, timeout_s: float = 600.0) -> httpx.AsyncClient:
    """A client with a connection for each request: a server closes idle ones, perhaps just as one is used again."""
    return httpx.AsyncClient(
        base_url=url, timeout=timeout_s, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
    )


async def replay(
    url: str,
    prompts: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int,
    on_reply: Callable[[Reply], None] = lambda _: None,
) -> list[Reply]:
    """Greedy answers of the server at `url`, in the order of `prompts`, at most `concurrency` at once.

    on_reply: called as each is complete. Raises ReplayError at the first request that fails.
    """
    replies: list[Reply | None] = [None] * len(prompts)
    queue = iter(enumerate(prompts))

    async def worker(client: httpx.AsyncClient) -> None:
        for i, prompt in queue:
            reply = replies[i] = await ask(client, prompt, max_tokens=max_tokens)
            on_reply(reply)

    async with own_connections(url) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(worker(client))
        except* (httpx.HTTPError, ReplayError) as errors:
            error = errors.exceptions[0]
            raise ReplayError(f"{url}: {str(error) or type(error).__name__}") from None
    return [reply for reply in replies if reply is not None]


async def ask(client: httpx.AsyncClient, prompt: str, *, max_tokens: int) -> Reply:
    """One greedy chat completion, streamed. httpx.HTTPError, or ReplayError if the server refuses."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    first = last = 0.0
    sent = time.perf_counter()
    async for event in _events(client, body):
        usage = event.get("usage") or usage
        piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
        if piece:
            last = time.perf_counter() - sent
            first = first or last
            pieces.append(piece)
    end = time.perf_counter() - sent
    if not usage:
        raise ReplayError("the stream ended without its token counts")
    return Reply(
        text="".join(pieces),
        prompt_tokens=usage["prompt_tokens"],
        tokens=usage["completion_tokens"],
        first_s=first or end,
        last_s=last or end,
        end_s=end,
    )


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of a chat completion, without the closing [DONE]."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise ReplayError(f"status {response.status_code}: {' '.join(text.split())[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ReplayError(f"error in the stream: {event['error']}")
            yield event
