"""Swapping policies in a running server: at once, under load, altering nothing; and what is refused."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser import cli
from faser.bench.client import replay
from faser.bench.server import Server
from faser.checkpoints import SHIPPED_POLICY

pytestmark = pytest.mark.server

KEY = "an-admin-key-of-a-test"
STREAMS, SWAPS = 32, 40
PROMPTS = [f"Write a short story about the number {i}." for i in range(STREAMS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder: a good file, a truncated one, a link out of it; and beside it a good file."""
    root = tmp_path_factory.mktemp("live")
    (root / "policies").mkdir()
    shutil.copy(SHIPPED_POLICY, root / "policies" / "good.pt")
    shutil.copy(SHIPPED_POLICY, root / "outside.pt")
    (root / "policies" / "cut.pt").write_bytes(Path(SHIPPED_POLICY).read_bytes()[:3000])
    (root / "policies" / "link.pt").symlink_to(root / "outside.pt")
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # float32: in bfloat16 the lengths of a step change the rounding. The deadline: on a busy machine too.
    flags = ["--policy", "static:2", "--dtype", "float32", "--faser-deadline-ms", "1000", "--policy-dir"]
    flags += [str(folder / "policies"), "--faser-state", str(folder / "state.json")]
    flags += ["--faser-log", str(folder / "steps.jsonl")]
    with Server(flags, env={"FASER_ADMIN_KEY": KEY}) as running:
        yield running


def ask(server: Server, method: str, route: str, key: str | None = KEY, **kwargs: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx.request(method, f"{server.url}/faser/{route}", headers=headers, timeout=60, trust_env=False, **kwargs)


def swap(server: Server, policy: str) -> httpx.Response:
    return ask(server, "POST", "policy", json={"policy": policy})


def in_force(server: Server) -> str:
    (engine,) = ask(server, "GET", "policy").json()["engines"]
    name: str = engine["policy"]
    return name


def await_steps(log: Path, policy: str) -> None:
    """Return once two steps under `policy` were logged: the second began well after the swap."""
    until = time.monotonic() + 60
    while log.read_text().count(f'"policy":"{policy}"') < 2:
        assert time.monotonic() < until, f"no two steps under {policy}"
        time.sleep(0.02)


def texts(server: Server) -> list[str]:
    replies = asyncio.run(replay(server.url, PROMPTS, concurrency=STREAMS, max_tokens=24))
    return [reply.text for reply in replies]


def test_swaps_under_load_alter_no_request_and_each_holds_from_the_next_step(server: Server, folder: Path) -> None:
    expected = texts(server)
    done = threading.Event()
    seen: list[list[str]] = []

    def load() -> None:
        while not done.is_set():
            seen.append(texts(server))

    streams = threading.Thread(target=load)
    streams.start()
    asked, answered = [], []
    try:
        for i in range(SWAPS):
            asked.append(time.time())
            assert swap(server, f"random:{i}").status_code == 200
            answered.append(time.time())
            await_steps(folder / "steps.jsonl", f"random:{i}")
    finally:
        done.set()
        streams.join()
    assert all(each == expected for each in seen)
    assert server.metrics("faser:").total("faser:policy_swaps_total") == SWAPS

    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    met = 0
    for i in range(SWAPS):  # the steps that began once a swap was answered and before the next was asked for
        until = asked[i + 1] if i + 1 < SWAPS else float("inf")
        between = {step["policy"] for step in steps if answered[i] <= step["t"] < until}
        assert between <= {f"random:{i}"}
        met += len(between)
    assert met > SWAPS / 2
    order = [int(step["policy"].partition(":")[2]) for step in steps if step["policy"].startswith("random")]
    assert order == sorted(order)


def test_a_file_of_the_folder_takes_over_and_is_kept(server: Server, folder: Path) -> None:
    assert swap(server, "good.pt").json()["engines"][0]["policy"] == "good.pt"
    assert json.loads((folder / "state.json").read_text()) == {"version": 1, "policy": "good.pt", "benched": False}
    info = server.metrics("faser:").by("faser:policy_info", "policy")
    assert {name for name, value in info.items() if value} == {"good.pt"}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("cut.pt", "truncated"),
        ("gone.pt", "no such file"),
        ("link.pt", "no such file"),
        ("../outside.pt", "not allowed"),
        ("..%2foutside.pt", "not allowed"),
        ("/etc/passwd", "not allowed"),
        ("policies\\good.pt", "not allowed"),
        ("static:9", "0 to 7"),
        ("oracle", "simulator only"),
        ("lerned", "unknown"),
    ],
)
def test_a_refused_policy_leaves_the_one_in_force(server: Server, policy: str, says: str) -> None:
    before = in_force(server)
    answer = swap(server, policy)
    assert answer.status_code == 400
    assert says in answer.json()["error"]
    assert in_force(server) == before


@pytest.mark.parametrize("route", ["policy", "policies", "policy/bench", "live", "nothing"])
def test_without_a_key_nothing_is_there_and_a_wrong_one_is_refused(server: Server, route: str) -> None:
    for method in ("GET", "POST"):
        hidden, absent = ask(server, method, route, key=None), httpx.request(method, f"{server.url}/no-such-route")
        assert (hidden.status_code, hidden.json()) == (absent.status_code, absent.json())
        assert hidden.status_code == 404
        for wrong in ("x", KEY[:-1], KEY + "x", "x" * 5000):
            assert ask(server, method, route, key=wrong).status_code == 401
    assert ask(server, "GET", "nothing").status_code == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"{", 400), (b"[]", 400), (b"{}", 400), (b'{"policy": 3}', 400),
        (b'{"policy": "none", "more": 1}', 400), (b"x" * 5000, 413),
        (b'{"policy": "\\ud800"}', 400), (b"[" * 4000, 400),
    ],
)  # fmt: skip
def test_a_body_that_is_no_swap_is_refused(server: Server, body: bytes, status: int) -> None:
    answer = ask(server, "POST", "policy", content=body)
    assert (answer.status_code, "error" in answer.json()) == (status, True)


def test_a_benched_policy_is_not_asked_until_it_is_unbenched(server: Server, folder: Path) -> None:
    assert swap(server, "static:2").status_code == 200
    assert ask(server, "POST", "policy/bench").json()["engines"][0]["benched"] is True
    assert json.loads((folder / "state.json").read_text())["benched"] is True
    before = server.metrics("faser:")
    texts(server)
    during = server.metrics("faser:")
    assert (during - before).total("faser:decisions_total") == 0
    assert (during - before).by("faser:fallbacks_total", "reason")["benched"] > 0
    ask(server, "POST", "policy/unbench")
    texts(server)
    assert (server.metrics("faser:") - during).total("faser:decisions_total") > 0


def test_the_command_lists_shows_and_swaps(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASER_ADMIN_KEY", KEY)
    at = ["--url", server.url]
    assert cli.main(["policy", "list", *at]) == 0
    listed = capsys.readouterr().out
    assert all(part in listed for part in ("good.pt", "trained on", "cut.pt", "refused", "static:K"))
    assert cli.main(["policy", "swap", "static:3", *at]) == 0
    assert "engine 0: static:3" in capsys.readouterr().out
    assert cli.main(["policy", "show", "--json", *at]) == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["policy"] == "static:3"
    assert cli.main(["policy", "swap", "cut.pt", *at]) == 1
    assert "truncated" in capsys.readouterr().err
    assert cli.main(["policy", "show", "--faser-admin-key", "wrong", *at]) == 1
    assert "401" in capsys.readouterr().err


def test_the_key_is_in_no_log(server: Server) -> None:
    assert server.log is not None
    assert KEY not in server.log.read_text(errors="replace")
