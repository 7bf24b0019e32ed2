"""One measured phase: a server under a fixed load, its replies, and what its counters gained meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from faser.bench.client import Reply, own_connections, replay
from faser.bench.metrics import Metrics

SAMPLE_S = 0.5
"""Between two readings of the counters, seconds; one costs the server's front end about 20 ms of CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A load: `prompts` of at most `max_tokens` tokens each, `concurrency` at a time."""

    name: str
    concurrency: int
    prompts: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Steps:
    """What `faser:` counters say of some engine steps. Per request-step: one request in one step.

    steps: in which a request decoded. lengths: request-steps by drafted tokens verified. accepted: tokens. drafted:
    depth -> steps.
    """

    steps: float
    lengths: dict[int, float]
    accepted: float
    depths: dict[int, float]

    @classmethod
    def of(cls, gained: Metrics) -> Steps:
        """From the difference of two readings."""
        lengths, depths = (
            {int(k): v for k, v in gained.by(f"faser:{name}_total", label).items()}
            for name, label in (("verify_length", "length"), ("draft_depth", "depth"))
        )
        accepted = gained.total("faser:accepted_tokens_total")
        return cls(gained.total("faser:steps_total"), lengths, accepted, depths)

    @property
    def running(self) -> float:
        """Mean requests that decode in a step."""
        return _share(sum(self.lengths.values()), self.steps)

    @property
    def chosen_length(self) -> float:
        """Mean drafted tokens verified per request-step, those with none included."""
        return _share(sum(k * n for k, n in self.lengths.items()), sum(self.lengths.values()))

    @property
    def accepted_length(self) -> float:
        """Mean tokens emitted per request-step: the target's own and the accepted ones."""
        return 1.0 + _share(self.accepted, sum(self.lengths.values()))

    @property
    def draft_depth(self) -> float:
        """Mean tokens drafted for each request at a step's end."""
        return _share(sum(k * n for k, n in self.depths.items()), sum(self.depths.values()))


@dataclass(frozen=True, slots=True)
class Sample:
    """The steps since the sample before, which ended `at_s` seconds into the phase."""

    at_s: float
    steps: Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of one phase with one policy."""

    policy: str
    phase: Phase
    round: int
    seconds: float
    replies: list[Reply]
    steps: Steps
    fallbacks: float
    samples: list[Sample]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all replies per second of the phase."""
        return sum(reply.tokens for reply in self.replies) / self.seconds


async def measure(
    url: str,
    phase: Phase,
    *,
    policy: str,
    round: int,
    on_reply: Callable[[Reply], None] = lambda _: None,
) -> Run:
    """Put `phase` on the server at `url`. Raises ReplayError or httpx.HTTPError."""
    async with own_connections(url, timeout_s=60.0) as client:
        before = await read(client)
        readings: list[tuple[float, Metrics]] = [(0.0, before)]
        start = time.perf_counter()
        sampler = asyncio.create_task(_sample(client, start, readings))
        try:
            replies = await replay(
                url, phase.prompts, concurrency=phase.concurrency, max_tokens=phase.max_tokens, on_reply=on_reply
            )
            seconds = time.perf_counter() - start
        finally:
            sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampler
        after = await read(client)
    readings.append((seconds, after))
    gained = after - before
    return Run(
        policy=policy,
        phase=phase,
        round=round,
        seconds=seconds,
        replies=replies,
        steps=Steps.of(gained),
        fallbacks=gained.total("faser:fallbacks_total"),
        samples=list(samples(readings)),
    )


async def read(client: httpx.AsyncClient) -> Metrics:
    """FASER's counters now."""
    return Metrics.parse((await client.get("/metrics")).raise_for_status().text, "faser:")


def samples(readings: Sequence[tuple[float, Metrics]]) -> Iterator[Sample]:
    """What each reading gained on the one before; those without a step are left out."""
    for (_, earlier), (at_s, later) in itertools.pairwise(readings):
        steps = Steps.of(later - earlier)
        if steps.steps:
            yield Sample(at_s, steps)


async def _sample(client: httpx.AsyncClient, start: float, readings: list[tuple[float, Metrics]]) -> None:
    """Append a reading every SAMPLE_S until cancelled."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        readings.append((time.perf_counter() - start, await read(client)))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
