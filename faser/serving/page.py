"""The live page, `GET /faser/`: what may be had without the admin key, since it holds no data.

A browser sends no key on its first visit; the page asks for it, keeps it for its tab only, and fetches `/faser/live`
with it, once a second. It is a few files of this package, asks no other host, and its policy forbids all else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.responses import RedirectResponse, Response

from faser.ab.records import Records
from faser.ab.report import summary
from faser.ab.split import Split
from faser.live.history import SECONDS, merged

SUMMARY_S = 15.0
"""An A/B test's summary is made at most this often, however many look: engines wait while they tell their records."""

SCRIPTS = ("figures.js", "charts.js", "ab.js", "page.js")
TYPES = {"page.html": "text/html", "page.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page(path: str) -> Response | None:
    """The file at `path`, or for `/faser` the way to the page; None: there is none."""
    if path == "/faser":
        return RedirectResponse("faser/")  # the names of its files are relative, so the slash matters
    name = path.removeprefix("/faser/") or "page.html"
    return Response(_read(name), media_type=TYPES[name], headers=HEADERS) if name in TYPES else None


def live(engines: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page draws, of each engine's answer to `live`: see `faser.live.history.Second` for `seconds`."""
    seconds = merged(engine.pop("seconds") for engine in engines)
    return {"now": time.time(), "span": SECONDS, "engines": engines, "seconds": seconds}


class Summaries:
    """The summary of the A/B test of one server, made anew when it is old."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._at = -SUMMARY_S
        self._making = asyncio.Lock()

    async def get(self, split: Split, records: Callable[[], Awaitable[list[dict[str, Any]]]]) -> dict[str, Any]:
        """What `faser.ab.report.summary` says; records: asks all engines for theirs."""
        async with self._making:
            if time.monotonic() >= self._at + SUMMARY_S:
                try:
                    self._made = await asyncio.to_thread(_summed, await records(), split)
                finally:  # one that fails is not tried again at once either
                    self._at = time.monotonic()
        return self._made or summary(Records(), split)


def _summed(engines: list[dict[str, Any]], split: Split) -> dict[str, Any]:
    first, *others = map(Records.from_json, engines)
    return summary(first.merged(others), split)


@cache
def _read(name: str) -> bytes:
    return (files("faser.live") / name).read_bytes()
