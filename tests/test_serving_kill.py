"""An engine that is killed in mid-run: reported as vLLM reports it, nothing unreadable is left, a restart goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.bench.client import ReplayError, replay
from faser.bench.server import Server, group_alive

pytestmark = pytest.mark.server

KEY = "an-admin-key-of-a-test"
PROMPTS = [f"Write a short story about the number {i}." for i in range(16)]


def engine(server: Server) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
            if "EngineCor" in name and int(fields.split()[2]) == server.pid:
                return int(stat.parent.name)
    raise AssertionError("no engine in the server's process group")


def admin(server: Server, method: str, **kwargs: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.request(method, f"{server.url}/faser/policy", headers=headers, timeout=60, trust_env=False, **kwargs)


def read(log: Path) -> list[dict[str, Any]]:
    """Every line of it, strictly."""
    text = log.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_killed_engine_is_reported_leaves_all_files_readable_and_a_restart_goes_on(tmp_path: Path) -> None:
    state, log = tmp_path / "state.json", tmp_path / "log.jsonl"
    flags = ["--policy", "static:1", "--faser-state", str(state), "--faser-log", str(log), "--faser-log-prompts"]
    env, failed = {"FASER_ADMIN_KEY": KEY}, []

    def load(url: str) -> None:
        try:
            asyncio.run(replay(url, PROMPTS, concurrency=len(PROMPTS), max_tokens=400))
        except ReplayError as error:
            failed.append(str(error))

    with Server(flags, env=env, log=tmp_path / "out.txt") as server:
        assert admin(server, "POST", json={"policy": "static:3"}).status_code == 200
        streams = threading.Thread(target=load, args=(server.url,))
        streams.start()
        while server.metrics("faser:").total("faser:steps_total") < 20:
            time.sleep(0.1)
        group = server.pid
        os.kill(engine(server), signal.SIGKILL)
        streams.join(timeout=60)
        assert not streams.is_alive()
        assert failed  # requests end in an error rather than in silence
        for _ in range(300):
            if not group_alive(group):
                break
            time.sleep(0.1)
        assert not group_alive(group)  # as with vLLM, whoever supervises the server starts it anew
        with pytest.raises(httpx.TransportError):
            admin(server, "GET")
    said = (tmp_path / "out.txt").read_text(errors="replace")
    assert "EngineDeadError" in said or "died unexpectedly" in said
    assert KEY not in said

    assert json.loads(state.read_text())["policy"] == "static:3"
    before = read(log)
    assert len([line for line in before if line["kind"] == "step"]) >= 20
    with log.open("a") as torn:  # what a kill in mid-write leaves
        torn.write('{"kind":"step","t":1')

    with Server(flags, env=env) as server:
        (found,) = admin(server, "GET").json()["engines"]
        assert (found["policy"], found["benched"]) == ("static:3", False)
        asyncio.run(replay(server.url, PROMPTS[:4], concurrency=4, max_tokens=8))
    after = read(log)
    assert after[: len(before)] == before
    new = after[len(before) :]
    assert {line["policy"] for line in new if line["kind"] == "step"} == {"static:3"}
    assert sum(line["kind"] == "request" for line in new) == 4
