"""A `faser serve` on a free loopback port, for as long as a `with` block lasts.

    with Server(["--policy", "none"]) as server:
        httpx.get(f"{server.url}/v1/models")
        server.metrics().total("faser:steps_total")

The decision here: nothing outlives the block, however it ends. The server has a process group of its own, so that no
child is missed, and a guard (a shell that waits on a pipe from us) kills that group should this process be killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from faser.bench.metrics import Metrics

SERVE = (sys.executable, "-m", "faser.cli", "serve")
GUARD = """
read -r _
kill "$1"
n=0; while [ $((n += 1)) -le 50 ] && kill -0 "$1"; do sleep 0.2; done
kill -KILL "-$1"
rm -rf "$2"
"""
"""Wakes when the pipe on its stdin ends; asks the server to leave, then ends its group. $1: its pid, $2: scratch."""

TERMINATE_S = 20.0
"""How long a server may take to leave by itself once told to, seconds."""


class ServerError(RuntimeError):
    """A server that did not start; the message's first line says why, the rest, if any, is the end of its log."""


class Server:
    """A server in a subprocess, started once. `start` and `ready` are for starting several; `with` does both."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        wait_s: float = 300.0,
        command: Sequence[str] = SERVE,
    ) -> None:
        """`command` `arguments` --host 127.0.0.1 --port <a free one>; answering /health with 200 means ready.

        env: added to this process's environment. log: where its output goes; None: a temporary file, kept only if the
        server fails. wait_s: the longest wait for it to be ready.
        """
        self.arguments = list(arguments)
        self.wait_s = wait_s
        self.log = log
        self.url = ""
        self._env = {**os.environ, **(env or {})}
        self._command = list(command)
        self._keep_log = log is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._scratch = Path()
        self._client = httpx.Client(timeout=30.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._started = 0.0

    def __enter__(self) -> Server:
        self.start()
        try:
            while not self.ready():
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._process is not None:
            status = self._process.poll()
            how = "runs" if status is None else f"ended with status {status}"
            error.add_note("\n  ".join([f"the server {how}; it said last:", *self.log_tail()]))
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process, which leads its process group."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the process and return at once. Whoever calls this calls `stop`."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._scratch = Path(tempfile.mkdtemp(prefix="faser-server-"))
        if self.log is None:
            handle, path = tempfile.mkstemp(prefix="faser-server-", suffix=".log")
            os.close(handle)
            self.log = Path(path)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*self._command, *self.arguments, "--host", "127.0.0.1", "--port", str(port)]
        # What it leaves in the temporary directory when killed is in one of ours, which goes with it.
        env = {**self._env, "TMPDIR": str(self._scratch)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", str(self._process.pid), str(self._scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started = time.monotonic()

    def ready(self) -> bool:
        """Whether it answers. ServerError: it ended, or `wait_s` is over."""
        if self._process is None:
            raise ServerError("the server is not running")
        status = self._process.poll()
        if status is not None:
            self._fail(f"ended with status {status} before it was ready")
        if self.waited_s > self.wait_s:
            self._fail(f"was not ready after {self.wait_s:g} s")
        try:
            return self._client.get(f"{self.url}/health", timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def waited_s(self) -> float:
        """Seconds since `start`."""
        return time.monotonic() - self._started

    def metrics(self, prefix: str = "") -> Metrics:
        """Its counters and gauges now; only those whose names start with `prefix`. httpx.HTTPError: no answer."""
        response = self._client.get(f"{self.url}/metrics")
        return Metrics.parse(response.raise_for_status().text, prefix)

    def log_tail(self, lines: int = 12) -> list[str]:
        """The last lines of its output that are not blank."""
        if self.log is None or not self.log.exists():
            return []
        text = self.log.read_text(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def stop(self) -> None:
        """End it and all of its children; harmless if it has ended. Ctrl-C in here makes it quick, not incomplete."""
        self._client.close()
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TERMINATE_S)
        finally:
            self._end(process)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                process.pid, signal.SIGKILL
            )  # whatever child is left; the group keeps its number while it has one
        process.wait()
        _until(lambda: not group_alive(process.pid))
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self.log is not None and not self._keep_log:
            self.log.unlink(missing_ok=True)
            self.log = None

    def _fail(self, what: str) -> None:
        """Raise ServerError. The program's last line says why, unless it crashed: then the log's end is shown."""
        tail = self.log_tail()
        self._keep_log = True
        status = self._process.poll() if self._process else None
        if status == 2 and tail:  # a user's mistake: one line says it
            raise ServerError(f"{tail[-1]} (log: {self.log})")
        raise ServerError("\n  ".join([f"the server {what}; log: {self.log}", *tail]))


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def group_alive(group: int) -> bool:
    """Whether a process of this group still runs; one that has ended but was not collected by its parent does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


def _until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
