"""A/B tests in a running server: who gets which arm, what is logged, and what a stop and a restart leave."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser import cli
from faser.ab.records import Records
from faser.ab.report import summary
from faser.ab.split import Split
from faser.bench.client import own_connections
from faser.bench.server import Server
from faser.serving import split_flags
from faser.serving.serve import build_parser
from faser.serving.state import load

pytestmark = pytest.mark.server

KEY = "an-admin-key-of-a-test"
# float32: in bfloat16 the lengths of a step change the rounding. The deadline: on a busy machine too.
COMMON = ["--dtype", "float32", "--faser-deadline-ms", "1000"]
TOKENS, AT_ONCE = 24, 16
PROMPTS = [f"Write a short story about the number {i}." for i in range(AT_ONCE)]


@dataclass(frozen=True)
class Reply:
    arm: str | None
    tokens: list[int]


async def _replies(
    url: str, names: Sequence[str], key: Callable[[int], str], at_once: int, changed: dict[str, Any]
) -> list[Reply]:
    gate = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, i: int) -> Reply:
        body = {"prompt": PROMPTS[i % len(PROMPTS)], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {
            "return_token_ids": True,
            "request_id": names[i],
            "vllm_xargs": {"faser_assigned": "a client's"},
        } | changed
        async with gate:
            response = await client.post("/v1/completions", json=body, headers={"X-Faser-Key": key(i)})
        tokens = response.raise_for_status().json()["choices"][0]["token_ids"]
        return Reply(response.headers.get("x-faser-arm"), tokens)

    async with own_connections(url) as client:  # each may meet another API process
        return await asyncio.gather(*(one(client, i) for i in range(len(names))))


def replies(
    server: Server, names: Sequence[str], key: Callable[[int], str] = str, at_once: int = AT_ONCE, **changed: Any
) -> list[Reply]:
    """The answers to requests of these ids, request i of client `key(i)`."""
    return asyncio.run(_replies(server.url, names, key, at_once, changed))


def ask(server: Server, method: str, route: str, key: str = KEY, **kwargs: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}/faser/{route}", headers=headers, timeout=60, trust_env=False, **kwargs)


def lines(log: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == kind]


def ended(names: Sequence[str], *logs: Path) -> dict[str, dict[str, Any]]:
    """Lines of requests by the ids that clients gave them, cmpl-ID-0-RANDOM; a thread of the engine writes them."""
    deadline = time.monotonic() + 30
    while True:
        found = {line["request"].split("-")[1]: line for log in logs for line in lines(log, "request")}
        if found.keys() >= {*names} or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def serve(folder: Path, flags: list[str]) -> Server:
    kept = ["--faser-state", str(folder / "state.json"), "--faser-log", str(folder / "log.jsonl")]
    return Server([*flags, *COMMON, *kept], env={"FASER_ADMIN_KEY": KEY})


class TestByRequest:
    FLAGS = ("--policy", "a=none", "--policy", "b=static:4", "--policy", "again=static:4", "--policy", "r=random:1")

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("by-request")

    @pytest.fixture(scope="class")
    def reference(self, plain: Callable[[str], Server]) -> list[list[int]]:
        """What a server without speculation writes, by prompt."""
        return [reply.tokens for reply in replies(plain("float32"), [f"r{i}" for i in range(len(PROMPTS))])]

    @pytest.fixture(scope="class")
    def server(self, folder: Path) -> Iterator[Server]:
        with serve(folder, [*self.FLAGS, "--split-by", "request"]) as running:
            yield running

    def test_arms_share_steps_and_alter_no_text(self, server: Server, reference: list[list[int]], folder: Path) -> None:
        names = [f"mixed{i}" for i in range(3 * len(PROMPTS))]
        got = replies(server, names)
        assert [reply.tokens for reply in got] == reference * 3
        assert {reply.arm for reply in got} == {"a", "b", "again", "r"}
        line_of = ended(names, folder / "log.jsonl")
        assert [line_of[name]["arm"] for name in names] == [reply.arm for reply in got]
        drafted: dict[str, set[int]] = {}
        for step in lines(folder / "log.jsonl", "step"):
            for arm, length, depth in zip(step["arms"], step["verified"], step["drafted"], strict=True):
                assert length <= {"a": 0, "b": 4, "again": 4, "r": 7}[arm]
                drafted.setdefault(arm, set()).add(depth)
        assert drafted["a"] == {0}  # though others' drafts were made beside its requests
        assert (max(drafted["b"]), max(drafted["again"]), max(drafted["r"])) == (4, 4, 7)
        assert any(len({*step["arms"]}) == 4 for step in lines(folder / "log.jsonl", "step"))

    def test_a_client_keeps_its_arm(self, server: Server, folder: Path) -> None:
        names = [f"sticky{i}" for i in range(24)]
        got = replies(server, names, key=lambda i: f"client {i % 6}")
        split = Split.from_json(ask(server, "GET", "ab").json()["split"])
        assert [reply.arm for reply in got] == [split.arm_of_key(f"client {i % 6}") for i in range(24)]
        line_of = ended(names, folder / "log.jsonl")
        assert len({line_of[name]["key"] for name in names}) == 6
        assert "client 1" not in (folder / "log.jsonl").read_text()

    def test_metrics_tell_arms_apart(self, server: Server) -> None:
        counts = server.metrics("faser:")
        rows = counts.by("faser:arm_request_steps_total", "arm")
        assert {*rows} == {"a", "b", "again", "r"}
        assert sum(rows.values()) == sum(counts.by("faser:verify_length_total", "length").values())
        assert counts.by("faser:arm_verified_tokens_total", "arm")["a"] == 0

    def test_all_records_are_those_of_the_log(self, server: Server, folder: Path) -> None:
        (engine,) = ask(server, "GET", "ab/records").json()["engines"]
        live, read = Records.from_json(engine), Records.from_log(folder / "log.jsonl")
        assert not read.counts["unread"]
        assert {*live.requests} == {*read.requests}
        assert {arm for _, arm in live.cells} == {"a", "b", "again", "r"}
        said = summary(live, Split.from_json(ask(server, "GET", "ab").json()["split"]))
        assert {arm["name"] for arm in said["arms"]} == {"a", "b", "again", "r"}

    def test_what_steps_wrote_is_what_clients_got(self, server: Server, folder: Path) -> None:
        names = [f"whole{i}" for i in range(16)]
        replies(server, names)
        line_of, written = ended(names, folder / "log.jsonl"), Counter[str]()
        for step in lines(folder / "log.jsonl", "step"):
            written.update(dict(zip(step["request"], step["written"], strict=True)))
        for name in names:
            line = line_of[name]
            assert line["tokens"] == TOKENS == 1 + written[line["request"]]  # the first comes with the prompt


class TestByWindow:
    FLAGS = ("--policy", "slow=static:7", "--policy", "quick=none")
    WINDOWS = ("--split-window-s", "3", "--split-washout-s", "0.5")

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("by-window")

    def test_from_its_start_over_a_crash_to_its_end(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FASER_ADMIN_KEY", KEY)
        flags, log = [*self.FLAGS, *self.WINDOWS], folder / "log.jsonl"
        with serve(folder, flags) as server:
            split = self.follows_the_clock(server, log)
            self.finds_which_arm_is_slow(server, split)
            self.tells_who_may_know(server, capsys)
            os.killpg(server.pid, signal.SIGKILL)
        state, before = load(folder / "state.json"), Records.from_log(log)
        assert state is not None
        assert (state.split, state.kept, before.split) == (split, None, split.to_json())
        with serve(folder, flags) as server:
            assert Split.from_json(ask(server, "GET", "ab").json()["split"]) == split  # salt and start too
            after, deadline = before, time.monotonic() + 60
            while {*after.requests} == {*before.requests} and time.monotonic() < deadline:  # all came in a washout
                replies(server, names := [f"after{time.time_ns()}x{i}" for i in range(4)])
                assert {*names} <= ended(names, log).keys()
                after = Records.from_log(log)
            assert {*before.requests} < {*after.requests}  # one test, before and after
            assert after.until > before.until
            self.is_stopped(server, folder)
            names = [f"kept{i}" for i in range(8)]
            line_of = ended(names, log)
            assert {line_of[name]["arm"] for name in names} == {None}

    def follows_the_clock(self, server: Server, log: Path) -> Split:
        split = Split.from_json(ask(server, "GET", "ab").json()["split"])
        turns = {}
        while {turn.arm for turn in turns.values()} < {"slow", "quick"}:
            name = f"clock{len(turns)}"
            (reply,) = replies(server, [name])
            line = ended([name], log)[name]
            turn = turns[name] = split.arm_at(line["arrival"] - 0.001)  # the header was worked out a little earlier
            told = (line["window"], line["arm"], line["washout"])
            assert reply.arm == line["arm"]
            assert told == turn or split.arm_at(line["arrival"] - 0.1) != turn
        steps = [s for s in lines(log, "step") if split.arm_at(s["t"]) == split.arm_at(s["t"] + 0.1)]
        assert {(s["window"], s["arm"], s["washout"]) for s in steps} == {split.arm_at(s["t"]) for s in steps}
        assert {(s["arm"], s["policy"], s["depth"]) for s in steps} == {("slow", "static:7", 7), ("quick", "none", 0)}
        return split

    def finds_which_arm_is_slow(self, server: Server, split: Split) -> None:
        """So hot, hardly a draft is right: seven cost time and save none. Requests are shorter than a window."""
        deadline, differs = time.monotonic() + 240, 0
        while not differs and time.monotonic() < deadline:
            replies(server, [f"hot{time.time_ns()}x{i}" for i in range(32)], at_once=4, temperature=2.0, max_tokens=8)
            (engine,) = ask(server, "GET", "ab/records").json()["engines"]
            (compared,) = summary(Records.from_json(engine), split, baseline="quick")["comparisons"]
            (differs,) = [metric["differs"] for metric in compared["metrics"] if metric["name"] == "e2e"]
        assert differs == 1, compared

    def tells_who_may_know(self, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
        at = ["--url", server.url]
        assert cli.main(["ab", "show", *at]) == 0
        shown = capsys.readouterr().out
        assert all(part in shown for part in ("arm slow: static:7, 50.0%", "by window of 3 s", "now: ", "engine 0: "))
        assert cli.main(["policy", "show", *at]) == 0
        assert "  arm quick: none; " in capsys.readouterr().out
        assert cli.main(["policy", "swap", "static:1", *at]) == 1
        assert "faser ab stop --keep" in capsys.readouterr().err
        assert cli.main(["ab", "stop", "--keep", "slowest", *at]) == 1
        assert "the arms are slow, quick" in capsys.readouterr().err
        for method, route in (("GET", "ab"), ("GET", "ab/records"), ("POST", "ab/stop")):
            assert ask(server, method, route, key="wrong").status_code == 401
            assert httpx.request(method, f"{server.url}/faser/{route}", trust_env=False).status_code == 404
        for body in (b"", b"{}", b'{"policy": "quick"}', b'{"keep": 1}'):
            assert ask(server, "POST", "ab/stop", content=body).status_code == 400

    def is_stopped(self, server: Server, folder: Path) -> None:
        assert cli.main(["ab", "stop", "--keep", "quick", "--url", server.url]) == 0
        got = replies(server, [f"kept{i}" for i in range(8)])
        assert {reply.arm for reply in got} == {None}
        answer = ask(server, "GET", "ab").json()
        assert (answer["kept"], answer["now"], answer["engines"][0]["policy"]) == ("quick", None, "none")
        info = server.metrics("faser:").by("faser:policy_info", "policy")
        assert {name for name, value in info.items() if value} == {"none"}
        state = load(folder / "state.json")
        assert state is not None
        args = build_parser().parse_args([*self.FLAGS, *self.WINDOWS])
        assert split_flags.chosen(args, state) == (None, "none")  # nor does a restart begin it again
        assert ask(server, "POST", "policy", json={"policy": "static:2"}).status_code == 200
        state = load(folder / "state.json")
        assert state is not None
        assert split_flags.chosen(args, state) == (None, "static:2")


def test_engines_and_api_processes_agree(tmp_path: Path) -> None:
    flags = ["--policy", "a=static:2", "--policy", "b=none", "--split-by", "request"]
    with serve(tmp_path, [*flags, "--data-parallel-size", "2", "--api-server-count", "2"]) as server:
        names = [f"dp{i}" for i in range(32)]
        got = replies(server, names, key=lambda i: f"client {i % 8}")
        answers = [ask(server, "GET", "ab").json() for _ in range(8)]
        split = Split.from_json(answers[0]["split"])
        assert [reply.arm for reply in got] == [split.arm_of_key(f"client {i % 8}") for i in range(32)]
        logs = [tmp_path / "log.jsonl", tmp_path / "log.jsonl.dp1"]
        line_of = ended(names, *logs)
        assert [line_of[name]["arm"] for name in names] == [reply.arm for reply in got]
        for log in logs:
            assert {step["policy"] for step in lines(log, "step")} == {"a=static:2, b=none"}
            assert {line["arm"] for line in lines(log, "request")} == {"a", "b"}
            assert [line["salt"] for line in lines(log, "split")] == [split.salt]
        answer = ask(server, "POST", "ab/stop", json={"keep": "b"})
        assert [engine["policy"] for engine in answer.json()["engines"]] == ["none", "none"]
        assert {reply.arm for reply in replies(server, names)} == {None}
        assert {ask(server, "GET", "ab").json()["kept"] for _ in range(8)} == {"b"}
