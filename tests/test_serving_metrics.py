"""Two engines and two API processes: every process answers with the sums of all, and a swap reaches both engines."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.bench.client import replay
from faser.bench.metrics import Metrics
from faser.bench.server import Server

pytestmark = pytest.mark.server

KEY = "an-admin-key-of-a-test"
TOKENS = 24


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics") / "log.jsonl"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    flags = ["--policy", "static:3", "--data-parallel-size", "2", "--api-server-count", "2", "--dtype", "float32"]
    flags += ["--faser-deadline-ms", "1000", "--faser-log", str(log)]
    with Server(flags, env={"FASER_ADMIN_KEY": KEY}) as running:
        yield running


def scrapes(server: Server, count: int = 12) -> list[Metrics]:
    """Each over a connection of its own, so that both API processes answer some."""
    return [Metrics.parse(httpx.get(f"{server.url}/metrics", trust_env=False).text) for _ in range(count)]


def ask(server: Server, requests: int) -> list[dict[str, Any]]:
    body = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "max_tokens": TOKENS}
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client:
        return [client.post("/v1/completions", json={**body, "ignore_eos": True}).json() for _ in range(requests)]


def engines(server: Server, method: str, route: str, **kwargs: Any) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.request(
        method, f"{server.url}/faser/{route}", headers=headers, timeout=60, trust_env=False, **kwargs
    )
    told: list[dict[str, Any]] = answer.raise_for_status().json()["engines"]
    return told


def test_every_process_answers_with_the_sums_of_both_engines(server: Server) -> None:
    usage = [answer["usage"]["completion_tokens"] for answer in ask(server, 8)]
    assert usage == [TOKENS] * 8
    told = engines(server, "GET", "live")
    assert len(told) == 2
    assert all(engine["decisions"] > 0 for engine in told)
    seen = scrapes(server)
    for counts in seen:
        assert counts.total("faser:decisions_total") == sum(engine["decisions"] for engine in told)
        by_length = counts.by("faser:verify_length_total", "length")
        assert sum(int(k) * n for k, n in by_length.items()) == counts.total("faser:verified_tokens_total")
        emitted = sum(by_length.values()) + counts.total("faser:accepted_tokens_total")
        assert (
            8 * (TOKENS - 1) <= emitted <= 8 * (TOKENS + 2)
        )  # the first token is the prefill's; the last may overshoot
        assert counts.total("faser:tracked_requests") == 0
        assert counts.by("faser:policy_info", "policy") == {"static:3": 1}
        assert counts.total("vllm:generation_tokens_total") == 8 * TOKENS
    ours = {key: value for key, value in seen[0].samples.items() if key[0].startswith("faser:")}
    assert all({k: v for k, v in counts.samples.items() if k[0].startswith("faser:")} == ours for counts in seen)


def test_requests_with_state_add_up_over_engines(server: Server) -> None:
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as one,
        client.stream("POST", "/v1/completions", json=body) as other,
    ):
        lines = one.iter_lines(), other.iter_lines()  # a stream ends with the last iterator over it
        for each in lines:
            next(each)
        for _ in range(100):  # a first token may be out before its request is accounted for
            if scrapes(server, 1)[0].total("faser:tracked_requests") == 2:
                break
            time.sleep(0.1)
        assert {counts.total("faser:tracked_requests") for counts in scrapes(server, 4)} == {2.0}


def test_a_swap_is_told_once_and_the_policy_before_it_is_no_longer_in_force(server: Server) -> None:
    told = engines(server, "POST", "policy", json={"policy": "static:1"})
    assert [engine["policy"] for engine in told] == ["static:1", "static:1"]
    for counts in scrapes(server):
        assert counts.by("faser:policy_info", "policy") == {"static:3": 0, "static:1": 1}
        assert counts.total("faser:policy_swaps_total") == 2  # one an engine


def test_the_live_page_shows_both(server: Server) -> None:
    ask(server, 2)
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.get(f"{server.url}/faser/live", headers=headers, trust_env=False).json()
    rows = sum(sum(second["lengths"]) for second in answer["seconds"])
    assert rows == scrapes(server, 1)[0].total("faser:verify_length_total")
    assert httpx.get(f"{server.url}/faser/", trust_env=False).status_code == 200


def texts(server: Server) -> list[str]:
    prompts = [f"Write a short story about the number {i}." for i in range(12)]
    return [reply.text for reply in asyncio.run(replay(server.url, prompts, concurrency=12, max_tokens=TOKENS))]


def test_two_engines_swap_together_and_their_counts_and_logs_add_up(
    server: Server, plain: Callable[[str], Server], log: Path
) -> None:
    expected = texts(plain("float32"))
    for policy in ("random:1", "static:2"):
        swapped = engines(server, "POST", "policy", json={"policy": policy})
        assert [engine["policy"] for engine in swapped] == [policy, policy]
        assert texts(server) == expected
    told, counts = engines(server, "GET", "policy"), scrapes(server, 1)[0]
    assert all(engine["decisions"] > 0 for engine in told)
    assert counts.total("faser:decisions_total") == sum(engine["decisions"] for engine in told)
    logged = [map(json.loads, file.read_text().splitlines()) for file in (log, Path(f"{log}.dp1"))]
    steps = [[line for line in lines if line["kind"] == "step" and line["running"]] for lines in logged]
    assert counts.total("faser:verified_tokens_total") == sum(sum(step["verified"]) for part in steps for step in part)
    one, other = ([step for step in part if step["policy"] in ("random:1", "static:2")] for part in steps)
    assert {step["policy"] for step in one} == {step["policy"] for step in other} == {"random:1", "static:2"}
    asked = [{name for step in part for name in step["request"]} for part in (one, other)]
    assert not asked[0] & asked[1]
    assert len(asked[0] | asked[1]) == 2 * 12
