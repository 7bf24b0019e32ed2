"""`Browser`: a headless Chromium with one page, for tests of what people see.

    with Browser() as browser:
        browser.open("http://127.0.0.1:8000/faser/", width=360)
        browser.wait("document.title === 'FASER'")

It speaks Chromium's own protocol, so no driver has to fit the browser's version.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
PATIENCE_S = 30.0


class BrowserError(RuntimeError):
    """It did not start, the page's script failed, or what was waited for never came."""


def installed() -> str | None:
    """Where a Chromium is, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """Used from one thread. problems: what its console complained of; asked: every URL that it fetched."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.asked: list[str] = []
        self._calls = 0
        self._stack = ExitStack()

    def __enter__(self) -> Browser:
        command = installed()
        if command is None:
            raise BrowserError(f"no browser; looked for {', '.join(NAMES)}")
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faser-", ignore_cleanup_errors=True))
            flags = [*FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
            process = subprocess.Popen([command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(_end, process)
            self._socket = stack.enter_context(connect(_address(Path(folder), process), max_size=None, proxy=None))
            for domain in ("Page", "Runtime", "Network", "Log"):
                self._call(f"{domain}.enable")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Go to `url` in a window of that size, CSS pixels; under 600 wide it is a phone's."""
        phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = PATIENCE_S) -> None:
        """Until `condition`, an expression in the page, holds."""
        deadline = time.monotonic() + timeout_s
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"after {timeout_s:g} s still not: {condition}")
            time.sleep(0.1)

    def type(self, text: str) -> None:
        """Into what has the focus, as from a keyboard; ends with Enter."""
        self._call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key="Enter", text="\r", windowsVirtualKeyCode=13)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._calls:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Of its page's end of the protocol, once it is there."""
    told, deadline = folder / "DevToolsActivePort", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BrowserError(f"the browser ended with status {process.returncode}")
        if told.exists() and (lines := told.read_text().split()):
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list") as answer:
                for target in json.load(answer):
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise BrowserError("the browser does not answer")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
