"""A server lasts as long as its block, whatever ends the block. A small HTTP server with a child stands in for vLLM."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faser.bench.server import Server, ServerError, free_port, group_alive

SERVE = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"faser:steps_total 3\\nother 1\\n")
child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SERVE
COMMAND = (sys.executable, "-c", SERVE)

PARENT = """
import sys, time
from faser.bench.server import Server
with Server([], command=[sys.executable, "-c", sys.argv[1]]) as server:
    print(server.pid, server.url.rpartition(":")[2], flush=True)
    time.sleep(1000)
"""


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # no wait for closed connections
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers of this test put their temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_serves_in_the_block_and_leaves_nothing_after_it(scratch: Path) -> None:
    with Server([], command=COMMAND) as server:
        pid, port = server.pid, int(server.url.rpartition(":")[2])
        assert group_alive(pid)
        assert not port_is_free(port)
        assert server.metrics().total("other") == 1
        assert server.metrics("faser:").total("other") == 0
        assert server.log_tail()[0].startswith("child ")
    assert not group_alive(pid)
    assert port_is_free(port)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_block_leaves_nothing(scratch: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), Server([], command=COMMAND) as server:  # noqa: PT012
        pid = server.pid
        raise error
    assert not group_alive(pid)
    assert list(scratch.iterdir()) == []


def test_a_server_that_ignores_the_request_to_leave_is_killed_with_its_children(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.bench.server.TERMINATE_S", 0.2)
    with Server([], command=(sys.executable, "-c", STUBBORN)) as server:
        pid = server.pid
    assert not group_alive(pid)
    assert list(scratch.iterdir()) == []


def test_children_of_a_server_that_crashed_are_killed(scratch: Path) -> None:
    with Server([], command=COMMAND) as server:
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        assert group_alive(pid)  # the child
    assert not group_alive(pid)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_death_of_the_program_that_started_it_ends_it(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", PARENT, SERVE]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout
        pid, port = map(int, parent.stdout.readline().split())
        assert group_alive(pid)
        parent.send_signal(number)
        parent.wait()
    assert soon(lambda: not group_alive(pid))
    assert soon(lambda: port_is_free(port))
    assert soon(lambda: not [path for path in tmp_path.iterdir() if path.is_dir()])


def test_a_users_mistake_is_told_in_its_own_line(scratch: Path) -> None:
    script = "import sys; print('WARNING noise'); sys.exit(print('faser serve: no such policy', file=sys.stderr) or 2)"
    with pytest.raises(ServerError) as told, Server([], command=(sys.executable, "-c", script)):
        pass
    (log,) = scratch.glob("*.log")
    assert str(told.value) == f"faser serve: no such policy (log: {log})"


def test_a_crash_shows_the_end_of_the_log_and_keeps_it(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "server.log"
    script = "import sys; print(*range(100), sep=chr(10)); sys.exit(7)"
    with pytest.raises(ServerError) as told, Server([], command=(sys.executable, "-c", script), log=log):
        pass
    first, *rest = str(told.value).splitlines()
    assert first == f"the server ended with status 7 before it was ready; log: {log}"
    assert [line.strip() for line in rest] == [str(n) for n in range(88, 100)]
    assert log.exists()


def test_a_server_that_never_answers_is_given_up_and_ended(scratch: Path) -> None:
    server = Server([], command=(sys.executable, "-c", "import time; time.sleep(1000)"), wait_s=0.3)
    with pytest.raises(ServerError, match=r"was not ready after 0\.3 s; log: "), server:
        pass
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid
    assert [path.suffix for path in scratch.iterdir()] == [".log"]


def test_what_is_asked_of_the_server_reaches_it(scratch: Path) -> None:  # noqa: ARG001
    script = SERVE.replace("child = ", "print(sys.argv[1:], __import__('os').environ['ANSWER']); child = ")
    with Server(["--policy", "none"], env={"ANSWER": "42"}, command=(sys.executable, "-c", script)) as server:
        port = server.url.rpartition(":")[2]
        assert server.log_tail()[0] == f"['--policy', 'none', '--host', '127.0.0.1', '--port', '{port}'] 42"


def test_stopping_twice_and_free_ports_are_harmless() -> None:
    Server([], command=COMMAND).stop()
    server = Server([], command=COMMAND)
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        server.start()
        server.stop()
    assert port_is_free(free_port())


def test_what_fails_in_the_block_says_how_the_server_ended() -> None:
    dies = SERVE.replace("self.end_headers()", "self.end_headers(); print('no more', flush=True); child.kill()")
    with pytest.raises(ValueError, match="a fault") as failed, Server([], command=[sys.executable, "-c", dies]):
        raise ValueError("a fault")
    (note,) = failed.value.__notes__
    assert "the server runs; it said last:" in note
    assert "no more" in note
