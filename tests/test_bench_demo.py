"""The demo refuses mistakes at once, and ends its servers whatever happens. No vLLM is started here."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from faser.bench import demo
from faser.bench.server import Server, group_alive

SERVE = (
    "import http.server, sys\n"
    "class Handler(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "    def do_POST(self): self.send_error(500, 'the engine died')\n"
    "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), Handler).serve_forever()\n"
)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pids of the servers that the demo starts: small ones that answer /health and fail every prompt."""
    pids: list[int] = []

    class Recorded(Server):
        def __init__(self, arguments: Sequence[str], *, log: Path) -> None:
            super().__init__(arguments, log=log, command=(sys.executable, "-c", SERVE))

        def start(self) -> None:
            super().start()
            pids.append(self.pid)

    monkeypatch.setattr(demo, "Server", Recorded)
    monkeypatch.setattr(demo, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(demo, "available_gib", lambda: 1000.0)
    return pids


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policies", "none", "statik:4"], "demo: policy 'statik:4' is unknown; known: none, static:K"),
        (["--policies", "none", "missing.pt"], "missing.pt"),
        (["--policies", "none", "none"], "demo: --policies names one twice: none none"),
        (["--policies", "none", "--rounds", "0"], "demo: --rounds is 0; allowed: from 1"),
        (["--policies", "none", "--max-tokens", "1"], "demo: --max-tokens is 1; allowed: from 2"),
        (["--policies", "none", "--high", "16", "9999"], "demo: --high 16 9999: 9999 prompts asked for; allowed: 1 to"),
        (["--policies", "none", "--low", "0", "5"], "demo: --low 0 5: 0 at once; allowed: from 1"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_starts(
    flags: list[str], message: str, started: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*flags, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not started


def test_missing_matplotlib_is_told_before_anything_starts(
    started: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("faser.bench.plot.find_spec", lambda _: None)
    assert demo.main(["--policies", "none"]) == 1
    assert capsys.readouterr().err == "demo: the plot needs matplotlib; install faser-serve[bench]\n"
    assert not started


def test_a_failing_server_ends_all_of_them(
    started: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--policies", "none", "static:4", "--out", str(tmp_path)]) == 1
    assert "status 500" in capsys.readouterr().err.splitlines()[-1]
    assert len(started) == 2
    assert not any(map(group_alive, started))


def test_ctrl_c_ends_all_servers(
    started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "_warm_up", lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert demo.main(["--policies", "none", "static:4", "--out", str(tmp_path)]) == 130
    assert "nothing is left running" in capsys.readouterr().err
    assert len(started) == 2
    assert not any(map(group_alive, started))


def test_with_little_memory_servers_run_one_after_another(
    started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alive: list[int] = []
    monkeypatch.setattr(demo, "available_gib", lambda: 0.0)
    monkeypatch.setattr(demo, "_warm_up", lambda _: alive.append(sum(map(group_alive, started))))
    monkeypatch.setattr(demo, "_run", lambda *_: None)
    monkeypatch.setattr(demo, "show", lambda *_: None)
    assert demo.main(["--policies", "none", "static:4", "--out", str(tmp_path)]) == 0
    assert alive == [1, 1]
    assert "one after another" in capsys.readouterr().out


def test_the_demo_imports_no_vllm_itself() -> None:
    script = "import sys, faser.bench.demo; sys.exit(bool({'vllm', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
