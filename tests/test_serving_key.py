"""A wrong admin key tells nothing, by what is done with it either: every one takes the same steps."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from faser.serving import admin
from faser.serving.admin import AdminRoutes
from faser.serving.settings import ADMIN_KEY, AdminSettings, Settings

KEY = "an-admin-key-of-a-test"


def answer(routes: AdminRoutes, key: bytes) -> tuple[int, dict[str, str]]:
    """Status and body of GET /faser/policy with that key."""
    settings = Settings(policy="none", profile="p", admin=AdminSettings(policy_dir="/nowhere"))
    config = SimpleNamespace(additional_config=settings.to_config())
    client = SimpleNamespace(vllm_config=config, engine_core=None)
    scope = {
        "type": "http", "method": "GET", "path": "/faser/policy", "query_string": b"", "client": ("127.0.0.1", 1),
        "headers": [(b"authorization", b"Bearer " + key)], "server": ("127.0.0.1", 8000), "scheme": "http",
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=client)),
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(routes(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_every_wrong_key_takes_the_same_steps_and_is_compared_at_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        raise AssertionError("vLLM was asked")

    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)  # itself in constant time for one length

    steps: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != admin.__file__:
            return None
        if event == "line":
            steps.append(frame.f_lineno)
        return trace

    monkeypatch.setenv(ADMIN_KEY, KEY)
    routes = AdminRoutes(nothing)
    monkeypatch.setattr(admin, "hmac", SimpleNamespace(compare_digest=compare))
    taken = []
    for wrong in (
        b"",
        b"x",
        KEY[:-1].encode(),
        KEY[:-1].encode() + b"x",
        KEY.encode() + b"x",
        b"x" * 5000,
        b"\xff\xfe",
    ):
        steps.clear()
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert answer(routes, wrong) == (401, {"error": "the admin key is wrong"})
        finally:
            sys.settrace(before)
        taken.append([*steps])
    assert taken[0]
    assert all(each == taken[0] for each in taken)
    assert set(compared) == {(32, 32)}
