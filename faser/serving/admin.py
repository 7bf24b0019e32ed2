"""Admin routes of a running server, under `/faser/`: which policy is in force, and another in its place.

    GET  /faser/policies        what may be swapped in
    GET  /faser/policy          what is in force, engine by engine
    POST /faser/policy          {"policy": NAME}: swap; all engines or none
    POST /faser/policy/bench    use the fallback length until /faser/policy/unbench, or a swap
    GET  /faser/ab              the A/B test: its split, what runs now, and how each arm does, engine by engine
    GET  /faser/ab/records      what it has seen; see `faser.ab.records`
    GET  /faser/ab/summary      what that comes to; see `faser.ab.report`
    POST /faser/ab/stop         {"keep": ARM}: that arm's policy alone from now on; all engines or none
    GET  /faser/live?since=T    the last minutes of all engines, from T (s since the epoch) on
    GET  /faser/                a page that draws them; see `faser.serving.page`

One decision: they are an ASGI middleware, which vLLM's own `--middleware` puts before its routes in every API process.
Each but the page asks for `Authorization: Bearer KEY`; to who sends none, or asks from another machine, they do not
exist.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import random
import time
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from faser.ab.split import Split
from faser.policies import KNOWN, PolicyError, names_file
from faser.policies.policy_file import write_atomically
from faser.serving import policy_dir
from faser.serving.arm_header import stop_mark
from faser.serving.page import Summaries, live, page
from faser.serving.settings import ADMIN_KEY, AdminSettings, Settings
from faser.serving.state import State, StateError, load, save

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_BODY = 4096
TRIES = 5
"""Of a change that meets another."""
PREFIX = "/faser/"


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminRoutes:
    """The middleware; whatever is not under `/faser/` goes through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._key = _digest(os.environ[ADMIN_KEY])
        self._summaries = Summaries()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{scope['path']}/".startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        client = request.app.state.engine_client
        every = Settings.from_config(dict(client.vllm_config.additional_config))
        settings = every.admin
        assert settings is not None  # `faser serve` gives it with this middleware
        allowed = settings.remote or _is_here(request)
        if allowed and request.method in ("GET", "HEAD") and (static := page(scope["path"])):
            await static(scope, receive, send)
            return
        given = request.headers.get("authorization")
        if given is None or not allowed:
            await self._app(scope, receive, send)  # it knows no such route, and says so in its own words
            return
        try:
            if not hmac.compare_digest(_digest(given.removeprefix("Bearer ")), self._key):
                raise RefusedError(401, "the admin key is wrong")
            answer = await _answer(request, Engines(client.engine_core), settings, every.split, self._summaries)
            response: Response = JSONResponse(answer)
        except RefusedError as refusal:
            response = JSONResponse({"error": str(refusal)}, refusal.status)
        await response(scope, receive, send)


async def _answer(
    request: Request, engines: Engines, settings: AdminSettings, split: Split | None, summaries: Summaries
) -> Any:
    match request.method, request.url.path.removeprefix(PREFIX):
        case "GET", "policies":
            return {"rules": KNOWN, "files": policy_dir.listed(Path(settings.policy_dir))}
        case "GET", "policy":
            return {"engines": await engines.ask("status")}
        case "GET", "live":
            return live(await engines.ask("live", since=_since(request)))
        case "POST", "policy":
            name = await _name(request, "policy")
            answers = await engines.swap(name, settings)
            _keep(settings, policy=name, benched=False)
            return {"engines": answers}
        case "POST", "policy/bench" | "policy/unbench" as path:
            benched = path == "policy/bench"
            answers = await engines.ask("bench", benched=benched)
            _keep(settings, benched=benched)
            return {"engines": answers}
        case _, "ab" | "ab/records" | "ab/summary" | "ab/stop":
            if split is None:
                raise RefusedError(
                    409,
                    "no A/B test ran when this server was started; what a log has of one: faser ab report --log FILE",
                )
            return await _answer_of_test(request, engines, settings, split, summaries)
    raise RefusedError(404, f"{request.method} {request.url.path}: there is no such route")


async def _answer_of_test(
    request: Request, engines: Engines, settings: AdminSettings, split: Split, summaries: Summaries
) -> Any:
    match request.method, request.url.path.removeprefix(PREFIX):
        case "GET", "ab":
            return {**_shown(split), "engines": await engines.ask("status")}
        case "GET", "ab/records":
            return {**_shown(split), "engines": await engines.ask("records")}
        case "GET", "ab/summary":
            return await summaries.get(split, partial(engines.ask, "records"))
        case "POST", "ab/stop":
            keep = await _name(request, "keep")
            answers = await engines.change("prepare_stop", keep=keep)
            _keep(settings, policy=None, split=split, kept=keep)
            try:
                write_atomically(stop_mark(split), keep.encode())
            except OSError as error:
                raise RefusedError(500, f"done, but responses go on to name arms: {error.strerror}") from None
            return {"engines": answers}
    raise RefusedError(404, f"{request.method} {request.url.path}: there is no such route")


class Engines:
    """All engines behind this address."""

    def __init__(self, core: Any) -> None:
        self._core = core  # vLLM's client of its engine processes

    async def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        """Each engine's answer, given between two of its steps; see `faser.serving.control`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            answers: list[dict[str, Any]] = await self._core.call_utility_all_async("faser_control", verb, arguments)
        except EngineDeadError as error:
            raise RefusedError(503, f"the engine is dead: {error}") from None
        return answers

    async def swap(self, name: str, settings: AdminSettings) -> list[dict[str, Any]]:
        """`name` in place of the policy in force, on all engines or none."""
        try:
            data = policy_dir.read(Path(settings.policy_dir), name) if names_file(name) else None
        except PolicyError as error:
            raise RefusedError(400, str(error)) from None
        return await self.change("prepare", policy=name, data=data)

    async def change(self, prepare: str, **arguments: Any) -> list[dict[str, Any]]:
        """What the verb `prepare` prepares, on all engines or none.

        Of two at once, each may find an engine taken by the other; then both let go, and try again at different times.
        """
        for attempt in range(TRIES):
            token = uuid.uuid4().hex
            prepared = await self.ask(prepare, token=token, **arguments)
            if not (refused := [answer for answer in prepared if "error" in answer]):
                break
            await self.ask("drop", token=token)
            if attempt + 1 < TRIES and any("again" in answer for answer in refused):
                await asyncio.sleep(random.uniform(0.0, 0.2 * 2**attempt))
                continue
            raise RefusedError(409 if "busy" in refused[0] else 400, refused[0]["error"])
        committed = await self.ask("commit", token=token)
        if refused := [answer for answer in committed if "error" in answer]:
            raise RefusedError(409, refused[0]["error"])
        return committed


def _shown(split: Split) -> dict[str, Any]:
    """kept: the arm that a stop left in force. now: what runs, if it does so by window."""
    now, mark = time.time(), stop_mark(split)
    kept = mark.read_text() if mark.exists() else None
    turn = split.arm_at(now)._asdict() if kept is None and split.unit == "window" else None
    return {"split": split.to_json(), "kept": kept, "now": turn, "running_s": round(now - split.start, 3)}


async def _name(request: Request, what: str) -> str:
    """The policy, or what else, that a request's body asks for."""
    shape = f'{{"{what}": "NAME"}}'
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_BODY:
        raise RefusedError(413, f"content-length is {length[:20]!r}; allowed: up to {MAX_BODY} bytes")
    try:
        body = json.loads(await request.body())
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate is JSON, but no text
    except (ValueError, RecursionError):
        raise RefusedError(400, f"the body is no JSON; expected {shape}") from None
    if not isinstance(body, dict) or set(body) != {what} or not isinstance(body[what], str):
        raise RefusedError(400, f"the body is not {shape}")
    name: str = body[what]
    return name


def _since(request: Request) -> float:
    text = request.query_params.get("since", "0")
    try:
        return float(text)
    except ValueError:
        raise RefusedError(400, f"since is {text[:20]!r}; allowed: seconds since the epoch") from None


def _keep(settings: AdminSettings, **changes: Any) -> None:
    if settings.state is None:
        return
    path = Path(settings.state)
    try:
        save(path, replace(load(path) or State(), **changes))
    except StateError as error:
        raise RefusedError(500, f"done, but not kept: {error}") from None
    except OSError as error:
        raise RefusedError(500, f"done, but not kept: {settings.state}: {error.strerror}") from None


def _is_here(request: Request) -> bool:
    """Whether the client is on this machine, as far as the connection tells."""
    try:
        if request.client is None:
            return True
        address = ipaddress.ip_address(request.client.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback  # mapped: where the host is "::"
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    """Of one length whatever the key's, so that comparing takes the same time for every wrong one."""
    return hashlib.sha256(key.encode()).digest()
