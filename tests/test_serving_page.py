"""Who may have the live page: this machine, and others if the owner of the server says so; its data, with the key."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from faser.ab.records import Records
from faser.ab.simulated import lines, split_of
from faser.serving.admin import AdminRoutes
from faser.serving.page import Summaries
from faser.serving.settings import ADMIN_KEY, AdminSettings, Settings

KEY = "an-admin-key-of-a-test"


def answers(client: str, path: str, *, remote: bool, key: str | None = None) -> httpx.Response:
    """To a client at that address, of a server without engines."""
    settings = Settings(policy="none", profile="", admin=AdminSettings(policy_dir="/", remote=remote))
    app = Starlette()
    app.state.engine_client = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config=settings.to_config()), engine_core=None
    )
    app.add_middleware(AdminRoutes)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as asking:
            return await asking.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/faser/", "/faser/page.js", "/faser/page.css"])
def test_another_machine_finds_no_page_unless_it_may(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    nothing = answers("10.1.2.3", "/no-such-route", remote=False)
    hidden = answers("10.1.2.3", path, remote=False, key=KEY)
    assert (hidden.status_code, hidden.text) == (nothing.status_code, nothing.text) == (404, "Not Found")
    assert answers("10.1.2.3", path, remote=True).status_code == 200
    assert answers("127.0.0.1", path, remote=False).status_code == 200


def test_the_page_is_found_without_its_last_slash_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    answer = answers("127.0.0.1", "/faser", remote=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "faser/")
    assert answers("10.1.2.3", "/faser", remote=False, key=KEY).status_code == 404
    assert answers("127.0.0.1", "/fasers", remote=False).status_code == 404


def test_its_data_need_the_key_from_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    assert answers("127.0.0.1", "/faser/live", remote=True).status_code == 404
    assert answers("127.0.0.1", "/faser/live", remote=True, key="x" * 16).status_code == 401
    assert answers("10.1.2.3", "/faser/live", remote=False, key=KEY).status_code == 404


def test_there_is_no_test_to_sum_up_without_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    answer = answers("127.0.0.1", "/faser/ab/summary", remote=False, key=KEY)
    assert (answer.status_code, "no A/B test" in answer.json()["error"]) == (409, True)


def test_many_who_look_at_a_test_cost_the_engines_one_question() -> None:
    split, asked, engines = split_of(), [], []
    for seed in (0, 1):
        engines.append(Records())
        for line in lines(split, 20, seed):
            engines[-1].add(line)

    async def records() -> list[dict[str, Any]]:
        asked.append(1)
        return [each.to_json() for each in engines]

    async def look() -> list[dict[str, Any]]:
        summaries = Summaries()
        return await asyncio.gather(*(summaries.get(split, records) for _ in range(5)))

    first, *others = asyncio.run(look())
    assert len(asked) == 1
    assert all(each == first for each in others)
    assert sum(arm["requests"] for arm in first["arms"]) == sum(len(each.requests) for each in engines)
