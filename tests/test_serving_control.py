"""Several engines swap together or not at all; and what `faser serve` and `faser policy` say of mistakes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from faser import policy_command
from faser.controller import Controller
from faser.core import LOAD_FEATURES, REQUEST_FEATURES, Capabilities, Observation
from faser.costs import load_profile
from faser.live.history import History
from faser.policies import make_policy
from faser.serving import admin
from faser.serving.admin import Engines, RefusedError
from faser.serving.control import Control
from faser.serving.metrics import StepMetrics
from faser.serving.serve import main
from faser.serving.settings import ADMIN_KEY, AdminSettings
from faser.serving.state import State, StateError, load, save

COST = load_profile("h200-llama2-13b")
SEEN = Observation(np.zeros((2, len(REQUEST_FEATURES)), np.float32), np.zeros(len(LOAD_FEATURES), np.float32))
KEY = "an-admin-key-of-a-test"


class Core:
    """The engines of one address, in this process: what vLLM's client of them does for `Engines`."""

    def __init__(self, depths: list[int]) -> None:
        self.controllers = [
            Controller(make_policy("static:2", COST), Capabilities(max_depth=depth), name="static:2")
            for depth in depths
        ]
        self.controls = [Control(controller, COST, StepMetrics(), History()) for controller in self.controllers]

    async def call_utility_all_async(self, _: str, verb: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [control.handle(verb, arguments) for control in self.controls]

    def close(self) -> None:
        for controller in self.controllers:
            controller.close()


def swap(core: Core, name: str, folder: Path) -> list[dict[str, Any]]:
    return asyncio.run(Engines(core).swap(name, AdminSettings(policy_dir=str(folder))))


def test_all_engines_swap(tmp_path: Path) -> None:
    core = Core([7, 7])
    assert [answer["policy"] for answer in swap(core, "static:5", tmp_path)] == ["static:5", "static:5"]
    assert [c.decide(SEEN).draft_depth for c in core.controllers] == [5, 5]
    core.close()


def test_one_engine_that_cannot_keeps_all_as_they_were(tmp_path: Path) -> None:
    core = Core([7, 0])
    with pytest.raises(RefusedError, match="no draft") as refused:
        swap(core, "static:5", tmp_path)
    assert refused.value.status == 400
    assert [c.name for c in core.controllers] == ["static:2", "static:2"]
    assert core.controllers[0].decide(SEEN).draft_depth == 2
    assert (
        core.controls[0].handle("prepare", {"token": "next", "policy": "none", "data": None}) == {}
    )  # none is pending
    core.close()


def test_a_second_swap_waits_for_the_first_and_a_lost_one_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core([7])
    core.controls[0].handle("prepare", {"token": "first", "policy": "static:1", "data": None})
    with pytest.raises(RefusedError, match="under way") as refused:
        swap(core, "static:5", tmp_path)
    assert refused.value.status == 409
    monkeypatch.setattr("faser.serving.control.PATIENCE_S", 0.0)
    assert swap(core, "static:5", tmp_path)[0]["policy"] == "static:5"
    assert "error" in core.controls[0].handle("commit", {"token": "first"})
    assert core.controllers[0].name == "static:5"
    core.close()


def test_two_swaps_that_meet_are_both_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has an engine at first, as two API processes' messages may come in any order."""
    core = Core([7, 7])
    ask, order = core.call_utility_all_async, iter([(0, 1), (1, 0)])

    async def crossed(_: str, verb: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if (first := next(order, None)) is None:
            return await ask(_, verb, arguments)
        answers = {}
        for engine in first:
            answers[engine] = core.controls[engine].handle(verb, arguments)
            await asyncio.sleep(0.01)
        return [answers[engine] for engine in (0, 1)]

    monkeypatch.setattr(core, "call_utility_all_async", crossed)

    async def both() -> list[Any]:
        settings = AdminSettings(policy_dir=str(tmp_path))
        return await asyncio.gather(*(Engines(core).swap(f"static:{k}", settings) for k in (3, 5)))

    assert [answer[0]["policy"] for answer in asyncio.run(both())] == ["static:3", "static:5"]
    assert core.controllers[0].name == core.controllers[1].name
    core.close()


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False), ("::ffff:10.0.0.7", False), ("2001:db8::1", False), ("x", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_here(host: str, here: bool) -> None:
    assert admin._is_here(Request({"type": "http", "client": (host, 1)})) is here


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load(path) is None
    for state in (State(), State(policy="good.pt", benched=True)):
        save(path, state)
        assert load(path) == state
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"version": 2, "policy": "none", "benched": false}', '{"version": 1}']
)
def test_another_file_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(StateError, match=r"state\.json is no state file"):
        load(tmp_path / "state.json")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy-dir", "/tmp"], ["--policy-dir", "--faser-admin-key"]),
        (["--faser-state", "x"], ["--faser-state", "--faser-admin-key"]),
        (["--faser-admin-remote"], ["--faser-admin-remote", "--faser-admin-key"]),
        (["--faser-admin-key", "short"], ["5 characters", "16"]),
        (["--faser-admin-key", KEY, "--policy-dir", "/nowhere/at/all"], ["--policy-dir", "/nowhere/at/all"]),
        (["--faser-admin-key", KEY, "--faser-state", "/nowhere/at/all"], ["--faser-state", "/nowhere/at/all"]),
    ],
)
def test_flags_that_cannot_work_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], says: list[str]
) -> None:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert main([*argv, "--policy", "none"]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("faser serve: ")]
    assert all(part in said for part in says), said


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("kept", "says"),
    [("{", "no state file"), (json.dumps({"version": 1, "policy": "gone.pt", "benched": False}), "gone.pt")],
)
def test_a_restart_that_cannot_go_on_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str, says: str
) -> None:
    (tmp_path / "state.json").write_text(kept)
    assert main(["--policy", "none", "--faser-state", str(tmp_path / "state.json"), "--policy-dir", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


def test_the_command_says_what_it_misses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FASER_ADMIN_KEY", raising=False)
    assert policy_command.main(["show"]) == 2
    assert "FASER_ADMIN_KEY" in capsys.readouterr().err
    assert policy_command.main(["show", "--faser-admin-key", KEY, "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
