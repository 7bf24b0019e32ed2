"""The replay client's arithmetic, and its behaviour against a small server that speaks the same protocol."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from faser.bench.client import ReplayError, Reply, percentile, replay
from faser.bench.prompts import choose, load_prompts


def reply(tokens: int, first_s: float, last_s: float) -> Reply:
    return Reply(text="", prompt_tokens=1, tokens=tokens, first_s=first_s, last_s=last_s, end_s=last_s)


def test_tpot_is_the_time_after_the_first_token_over_the_tokens_after_it() -> None:
    assert reply(tokens=11, first_s=0.5, last_s=2.5).tpot_s == 0.2
    assert math.isnan(reply(tokens=1, first_s=0.5, last_s=0.5).tpot_s)


def test_percentiles_are_linear_and_leave_nan_out() -> None:
    values = [*map(float, range(1, 101)), float("nan")]
    assert percentile(values, 50) == 50.5
    assert percentile(values, 99) == pytest.approx(99.01)
    assert percentile([3.0], 99) == 3.0
    assert math.isnan(percentile([], 50))


class Chat(ThreadingHTTPServer):
    """Answers a prompt with its words, one a chunk, but refuses "refuse" and breaks off at "break"."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, change: int) -> None:
        with self.lock:
            self.now += change
            self.most = max(self.most, self.now)


class Handler(BaseHTTPRequestHandler):
    server: Chat

    def log_message(self, *args: object) -> None: ...

    def do_POST(self) -> None:
        self.server.count(1)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        self.send_response(400 if prompt == "refuse" else 200)
        self.end_headers()
        if prompt == "refuse":
            self.wfile.write(b'{"error": "no"}')
        else:
            self.answer(prompt.split(" "))
        self.server.count(-1)

    def answer(self, words: list[str]) -> None:
        self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for word in words:
            self.event({"choices": [{"delta": {"content": word}}]})
            time.sleep(0.005)
        if words != ["break"]:
            self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2 * len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: object) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())


@pytest.fixture
def chat() -> Iterator[Chat]:
    with Chat() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_replies_come_in_the_order_of_the_prompts_with_the_servers_token_counts(chat: Chat) -> None:
    prompts = ["one", "one two three four", "one two"]
    told: list[Reply] = []
    replies = asyncio.run(replay(chat.url, prompts, concurrency=3, max_tokens=9, on_reply=told.append))
    assert [r.text for r in replies] == [p.replace(" ", "") for p in prompts]
    assert [r.tokens for r in replies] == [2, 8, 4]
    assert {r.prompt_tokens for r in replies} == {7}
    assert all(0 < r.first_s <= r.last_s <= r.end_s for r in replies)
    assert sorted(map(id, told)) == sorted(map(id, replies))


@pytest.mark.parametrize("concurrency", [1, 4])
def test_the_loop_is_closed_at_its_concurrency(chat: Chat, concurrency: int) -> None:
    asyncio.run(replay(chat.url, ["a b c d"] * 12, concurrency=concurrency, max_tokens=9))
    assert chat.most == concurrency


def test_a_refused_request_fails_in_one_line(chat: Chat) -> None:
    with pytest.raises(ReplayError, match=r'^http://127\.0\.0\.1:\d+: status 400: \{"error": "no"\}$'):
        asyncio.run(replay(chat.url, ["one", "refuse"], concurrency=2, max_tokens=9))


def test_a_stream_without_token_counts_fails(chat: Chat) -> None:
    with pytest.raises(ReplayError, match="without its token counts"):
        asyncio.run(replay(chat.url, ["break"], concurrency=1, max_tokens=9))


def test_a_server_that_is_gone_fails_in_one_line() -> None:
    with pytest.raises(ReplayError, match=r"^http://127\.0\.0\.1:9: [^\n]+$"):
        asyncio.run(replay("http://127.0.0.1:9", ["one"], concurrency=1, max_tokens=9))


def test_the_choice_of_prompts_is_fixed_and_takes_the_domains_in_turn() -> None:
    prompts = load_prompts()
    assert len({p.domain for p in prompts}) == 5
    assert len({p.prompt for p in prompts}) == len(prompts) >= 40
    chosen = choose(prompts, 10)
    assert [p.domain for p in chosen[:5]] == [p.domain for p in chosen[5:]]
    assert len({p.domain for p in chosen}) == 5
    assert choose(prompts, 20)[:10] == chosen
    with pytest.raises(ValueError, match=f"{len(prompts) + 1} prompts asked for; allowed: 1 to {len(prompts)}"):
        choose(prompts, len(prompts) + 1)
