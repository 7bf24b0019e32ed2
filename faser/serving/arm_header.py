"""`ArmHeader`: tells clients their arm (`x-faser-arm`), and engines the arm of each request.

One decision: an arm is worked out once, here, when a request arrives. What the client is told is what the engine uses
and logs; and since it follows from the split alone, it does not matter which API process is asked.
"""

from __future__ import annotations

import os
import time
import uuid
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders

from faser.ab.arms import Assigned, assigned
from faser.ab.split import Split
from faser.serving import compat
from faser.serving.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER, KEY = "x-faser-arm", "x-faser-key"
"""KEY tells clients apart. Not Authorization: behind a gateway, or with an SDK's default, all would be one client."""

_assigned: ContextVar[Assigned | None] = ContextVar("faser_assigned", default=None)


class ArmHeader:
    """The middleware, of a server that was started with a split."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._split: Split | None = None
        self._stopped = Path()
        compat.mark_requests(_assigned.get)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].startswith("/faser/"):
            await self._app(scope, receive, send)
            return
        if self._split is None:
            config: Any = scope["app"].state.engine_client.vllm_config.additional_config
            self._split = Settings.from_config(config).split
            assert self._split is not None  # `faser serve` gives it with this middleware
            self._stopped = stop_mark(self._split)
        if self._stopped.exists():
            await self._app(scope, receive, send)
            return
        client = Headers(scope=scope).get(KEY)
        said = assigned(self._split, time.time(), client=client, request=uuid.uuid4().hex)

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = said["arm"]
            await send(message)

        token = _assigned.set(said)
        try:
            await self._app(scope, receive, told)
        finally:
            _assigned.reset(token)


def stop_mark(split: Split) -> Path:
    """A file that is there once the split was stopped; the server's API processes share the folder."""
    return Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]) / f"faser-stopped-{split.salt}"
